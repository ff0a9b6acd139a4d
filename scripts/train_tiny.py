"""Trains one small checkpoint of each of the six families, for the tests and the README.

    python scripts/train_tiny.py [FAMILY ...] [-o tests/checkpoints] [--seed 0]

Decides the sizes, the data and the initial weights. Language models are trained on the source of
Python's standard library (the package ``json`` is held out) with a small byte-level BPE tokenizer.
ViT classifies four drawn shapes. Standard initialisation hides mistakes in a fold (gamma 1, beta 0,
no biases, no weight means). So all of these start with random values, and Adam without weight decay
keeps them away from the standard values. Training uses one thread and a fixed number of steps, so
the seed, the Python release and the torch release determine the result.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import is_vision_available

STDLIB = Path(sysconfig.get_path("stdlib"))
VOCABULARY = 509
CONTEXT = 64
ROWS = {"input_ids": 8, "pixel_values": 64}
IMAGE, PATCH = 32, 8
SHAPES = ("disc", "square", "cross", "ring")
CLIP = 1.0
MASKED, HIDDEN, KEPT = 0.2, 0.6, 0.3
IGNORED = -100

Batch = dict[str, torch.Tensor]
Source = Callable[[int], Batch]
"""Draws a batch with the given number of rows."""


@dataclass(frozen=True)
class Family:
    """The settings of one family: its class, its size, its number of training steps."""

    model_class: str
    steps: int
    settings: dict[str, object]
    rate: float = 3e-3
    """The highest learning rate. A post-LN network needs a low rate: with 3e-3, BERT soon gives the
    same output for every input."""


FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        800,
        {"n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT},
    ),
    "bert": Family(
        "BertForMaskedLM",
        1200,
        {
            "hidden_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 5,
            "intermediate_size": 320,
            "max_position_embeddings": CONTEXT,
        },
        rate=1e-3,
    ),
    "opt": Family(
        "OPTForCausalLM",
        800,
        {
            "hidden_size": 72,
            "word_embed_proj_dim": 72,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "ffn_dim": 288,
            "max_position_embeddings": CONTEXT,
            "do_layer_norm_before": True,
            "pad_token_id": 0,
        },
    ),
    "bloom": Family("BloomForCausalLM", 800, {"hidden_size": 64, "n_layer": 4, "n_head": 4}),
    "phi": Family(
        "PhiForCausalLM",
        800,
        {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "max_position_embeddings": CONTEXT,
            "qk_layernorm": True,
            "tie_word_embeddings": False,
        },
    ),
    "vit": Family(
        "ViTForImageClassification",
        300,
        {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "image_size": IMAGE,
            "patch_size": PATCH,
            "id2label": dict(enumerate(SHAPES)),
            "label2id": {shape: i for i, shape in enumerate(SHAPES)},
        },
    ),
}


def stdlib_files(held_out: bool = False) -> list[str]:
    """The source files for training, or the held-out files."""
    folder = STDLIB / "json" if held_out else STDLIB
    return [path.read_text("utf-8") for path in sorted(folder.glob("*.py"))]


def train_tokenizer(files: list[str], masked: bool) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with BERT's special tokens, or with a single end of text."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] if masked else ["<|endoftext|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(files, trainer)
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token"), special[0])
    if masked:
        keys = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        names = dict(zip(keys, special, strict=True))
        bpe.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=CONTEXT, **names)


def encode(tokenizer: PreTrainedTokenizerFast, files: list[str]) -> torch.Tensor:
    """Token numbers ``(tokens,)`` in int64; token 0 ends each file."""
    rows = tokenizer.backend_tokenizer.encode_batch(files, add_special_tokens=False)
    return torch.tensor([number for row in rows for number in [*row.ids, 0]])


def text_source(tokenizer: PreTrainedTokenizerFast, files: list[str]) -> Source:
    """Windows of ``CONTEXT`` tokens from random places, with their labels."""
    tokens = encode(tokenizer, files)

    def batch(rows: int) -> Batch:
        starts = torch.randint(len(tokens) - CONTEXT, (rows, 1))
        window = tokens[starts + torch.arange(CONTEXT)]
        if tokenizer.mask_token_id is None:
            return {"input_ids": window, "labels": window}
        return masked_batch(window, tokenizer)

    return batch


def masked_batch(rows: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> Batch:
    """Rows between ``[CLS]`` and ``[SEP]``; a fifth of the other tokens has to be predicted.

    Of these ``HIDDEN`` show ``[MASK]``, ``KEPT`` show themselves and the others a random token.
    BERT's own shares are 0.8 and 0.1; more kept tokens teach a small model sooner to look at its
    input.
    """
    rows = rows.clone()
    rows[:, 0], rows[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    chosen = torch.rand(rows.shape) < MASKED
    chosen[:, 0] = chosen[:, -1] = False
    fate = torch.rand(rows.shape)
    shown = rows.masked_fill(chosen & (fate < HIDDEN), int(tokenizer.mask_token_id))
    other = torch.randint_like(rows, len(tokenizer))
    shown = torch.where(chosen & (fate >= HIDDEN + KEPT), other, shown)
    return {"input_ids": shown, "labels": rows.masked_fill(~chosen, IGNORED)}


def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy pictures ``(count, IMAGE, IMAGE, 3)`` in uint8 and their classes ``(count,)``.

    Place, size and both colours are random. The class is given by the shape only.
    """
    labels = torch.randint(len(SHAPES), (count,))
    middle = IMAGE / 2 + 6 * (torch.rand(count, 2, 1, 1) - 0.5)
    radius = 7 + 5 * torch.rand(count, 1, 1)
    line = torch.arange(IMAGE) + 0.5
    y = (line[:, None] - middle[:, 0]).abs() / radius
    x = (line[None, :] - middle[:, 1]).abs() / radius
    distance = (x * x + y * y).sqrt()
    inside = torch.stack(
        [
            distance < 1,
            torch.maximum(x, y) < 0.85,
            (torch.minimum(x, y) < 0.25) & (torch.maximum(x, y) < 1),
            (distance < 1) & (distance > 0.6),
        ]
    )[labels, torch.arange(count)]
    ground, ink = torch.rand(2, count, 1, 1, 3)
    ink = torch.where((ink - ground).abs() < 0.3, (ground + 0.5) % 1, ink)
    picture = torch.where(inside[..., None], ink, ground)
    picture = picture + 0.05 * torch.randn(picture.shape)
    return (picture.clamp(0, 1) * 255).round().to(torch.uint8), labels


def pixels(pictures: torch.Tensor) -> torch.Tensor:
    """The output of the saved image processor: ``(count, 3, IMAGE, IMAGE)``, in -1 .. 1."""
    return (pictures.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5


def picture_source(rows: int) -> Batch:
    """New random pictures with their classes."""
    pictures, labels = draw(rows)
    return {"pixel_values": pixels(pictures), "labels": labels}


def build(family: str) -> PreTrainedModel:
    """The untrained model, with the random weights of ``perturb``."""
    chosen = FAMILIES[family]
    text = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    model_class = getattr(transformers, chosen.model_class)
    common = text if model_class.main_input_name == "input_ids" else {}
    if family == "bert":
        common = {"vocab_size": VOCABULARY}
    model = model_class(model_class.config_class(**common, **chosen.settings))
    perturb(model)
    return model


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Set random gamma, beta and biases, and matrices with random means of rows and of columns.

    A fold that forgets a mean, a beta or a bias then gives visibly wrong outputs.
    """
    norms = {id(m.weight) for m in model.modules() if isinstance(m, nn.LayerNorm)}
    shifts = {id(m.bias) for m in model.modules() if isinstance(m, nn.LayerNorm)}
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        if id(parameter) in norms:
            parameter.copy_(1 + 0.2 * noise)
        elif parameter.dim() == 1:
            parameter.copy_((0.2 if id(parameter) in shifts else 0.1) * noise)
        else:
            rows = torch.randn(*parameter.shape[:-1], 1)
            columns = torch.randn(1, *parameter.shape[1:])
            parameter.copy_(0.08 * (noise + 0.5 * rows + 0.5 * columns))


@torch.no_grad()
def measure(model: PreTrainedModel, source: Source, batches: int = 8) -> float:
    """Mean loss over batches from ``source``."""
    model.eval()
    rows = ROWS[model.main_input_name]
    return sum(float(model(**source(rows)).loss) for _ in range(batches)) / batches


def train(model: PreTrainedModel, source: Source, family: Family) -> None:
    """Train with Adam, a short warm-up and a cosine decay.

    Dropout stays off, since the models are very small.
    """
    model.eval()
    optimiser = torch.optim.Adam(model.parameters(), lr=family.rate)
    for step in range(family.steps):
        rate = min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / family.steps))
        for group in optimiser.param_groups:
            group["lr"] = family.rate * rate
        optimiser.zero_grad()
        model(**source(ROWS[model.main_input_name])).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None, into: Path) -> int:
    """Save model and tokenizer or image processor into a new directory. Returns its bytes."""
    shutil.rmtree(into, ignore_errors=True)
    model.save_pretrained(into)
    if tokenizer is not None:
        tokenizer.save_pretrained(into)
    else:
        half = [0.5] * 3
        size = {"height": IMAGE, "width": IMAGE}
        transformers.ViTImageProcessorPil(
            size=size, image_mean=half, image_std=half
        ).save_pretrained(into)
    return sum(path.stat().st_size for path in into.iterdir())


def make(family: str, into: Path, seed: int) -> None:
    """Train one family, save it, and print its losses and statistics."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    tokenizer: PreTrainedTokenizerFast | None = None
    source: Source = picture_source
    unseen: Source = picture_source
    if family != "vit":
        files = stdlib_files()
        tokenizer = train_tokenizer(files, masked=family == "bert")
        source = text_source(tokenizer, files)
        unseen = text_source(tokenizer, stdlib_files(held_out=True))
    model = build(family)
    before = measure(model, unseen)
    train(model, source, FAMILIES[family])
    after = measure(model, unseen)
    size = save(model, tokenizer, into / family)
    classes = len(SHAPES) if tokenizer is None else VOCABULARY
    print(
        f"{family}: {model.num_parameters():,} parameters, {size:,} bytes, "
        f"{FAMILIES[family].steps} steps, {time.perf_counter() - start:.0f} s\n"
        f"  held-out loss {before:.2f} -> {after:.2f} (uniform {math.log(classes):.2f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one small checkpoint of each family.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("-o", "--output", type=Path, default=Path("tests/checkpoints"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    families = args.families or list(FAMILIES)
    unknown = [family for family in families if family not in FAMILIES]
    if unknown:
        parser.error(f"no family {unknown[0]!r}; choose from {', '.join(FAMILIES)}")
    if "vit" in families and not is_vision_available():
        parser.error("ViT's image processor needs Pillow; install it with: pip install pillow")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    for family in families:
        make(family, args.output, args.seed)


if __name__ == "__main__":
    main()
