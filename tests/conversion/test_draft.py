"""An EAGLE-3 draft model goes on working when its target is rotated, or is refused by name.

The drafts are written here in plain torch, with the names and shapes of published drafts.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import good, refused
from safetensors.torch import load_file, save_file
from tiny_models import GPT2, PHI, TOKENS, live
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from enjoyln_cli import Options, fold

Tensors = dict[str, torch.Tensor]
LLAMA = {
    **TOKENS,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TARGETS: dict[str, tuple[str, Any]] = {
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig(**LLAMA)),
    "phi": ("PhiForCausalLM", transformers.PhiConfig(**{**PHI, "num_hidden_layers": 4})),
}
LAYERS = (1, 2, 3)
"""The hidden states that the drafts read: inputs of these layers."""
IDS = torch.randint(3, 37, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The targets, and their results, which are rotated in the stock class or also folded."""
    folder = tmp_path_factory.mktemp("targets")
    for name, target in TARGETS.items():
        live(*target).save_pretrained(folder / name)
        rotated = Options(fold=False, rotate=True, seed=3)
        fold(folder / name, folder / f"{name}-rotated", options=rotated, verify=False)
    fold(folder / "phi", folder / "phi-folded", options=Options(rotate=True), verify=False)
    live("GPT2LMHeadModel", transformers.GPT2Config(**GPT2)).save_pretrained(folder / "gpt2")
    good("rotate", folder / "gpt2", "-o", folder / "gpt2-values", "--no-verify")
    return {path.name: path for path in folder.iterdir()}


def in_float64(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def run_target(folder: Path) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Hidden states of three layers, the embedding table, and the most likely next tokens."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float64).eval()
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):  # it computes in float32
            module.forward = partial(in_float64, module)
    with torch.no_grad():
        result = model(IDS, output_hidden_states=True)
        table = model.get_input_embeddings().weight.detach()
        return [result.hidden_states[layer] for layer in LAYERS], table, result.logits.argmax(-1)


def draft_of(table: torch.Tensor, layer: str, embedding: str, norm_before_fc: bool) -> Tensors:
    """A draft with a vocabulary of 20 tokens; ``embedding`` is none, a copy, or its own."""
    torch.manual_seed(4)
    d, width, tokens = table.shape[1], 56, 20
    shapes = {
        "fc.weight": (d, 3 * d),
        **{f"{layer}.self_attn.{part}_proj.weight": (d, 2 * d) for part in "qkv"},
        f"{layer}.self_attn.o_proj.weight": (d, d),
        f"{layer}.mlp.gate_proj.weight": (width, d),
        f"{layer}.mlp.up_proj.weight": (width, d),
        f"{layer}.mlp.down_proj.weight": (d, width),
        "lm_head.weight": (tokens, d),
        **{f"{layer}.{name}.weight": (d,) for name in ("input_layernorm", "hidden_norm")},
        f"{layer}.post_attention_layernorm.weight": (d,),
        "norm.weight": (d,),
    }
    if norm_before_fc:
        shapes["input_norm.weight"] = (3 * d,)
    tensors = {
        name: 0.1 + torch.randn(shape, dtype=torch.float64) / (1.5 if len(shape) == 1 else d**0.5)
        for name, shape in shapes.items()
    }
    chosen = torch.randperm(len(table))[:tokens].sort().values
    tensors["d2t"] = chosen - torch.arange(tokens)
    tensors["t2d"] = torch.zeros(len(table), dtype=torch.bool).index_fill(0, chosen, True)
    if embedding != "none":
        tensors["embed_tokens.weight"] = table.clone()
    if embedding == "own":
        tensors["embed_tokens.weight"] += torch.randn(table.shape, dtype=torch.float64)
    return tensors


def run_draft(
    tensors: Tensors, states: list[torch.Tensor], table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft's logits, and the tokens that it proposes, with the embedding ``table``."""
    (layer,) = {name.split(".hidden")[0] for name in tensors if "hidden_norm" in name}

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], 1e-6)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ tensors[f"{name}.weight"].T

    x = torch.cat(states, -1)
    x = linear(normed(x, "input_norm") if "input_norm.weight" in tensors else x, "fc")
    embedded = normed(table[IDS], f"{layer}.input_layernorm")
    inputs = torch.cat([embedded, normed(x, f"{layer}.hidden_norm")], -1)
    q, k, v = (
        linear(inputs, f"{layer}.self_attn.{part}_proj").unflatten(-1, (4, -1)).transpose(1, 2)
        for part in "qkv"
    )
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + linear(attended.transpose(1, 2).flatten(2), f"{layer}.self_attn.o_proj")
    y = normed(x, f"{layer}.post_attention_layernorm")
    y = functional.silu(linear(y, f"{layer}.mlp.gate_proj")) * linear(y, f"{layer}.mlp.up_proj")
    logits = linear(normed(x + linear(y, f"{layer}.mlp.down_proj"), "norm"), "lm_head")
    best = logits.argmax(-1)
    return logits, best + tensors["d2t"][best]


def save(folder: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **config}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("embedding", "layer", "norm_before_fc"),
    [("none", "midlayer", False), ("copy", "layers.0", True), ("own", "midlayer", False)],
)
def test_a_draft_proposes_the_same_tokens_for_the_rotated_target(
    target: str,
    embedding: str,
    layer: str,
    norm_before_fc: bool,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    states, table, wanted = run_target(folders[target])
    rotated_states, rotated_table, wanted_after = run_target(folders[f"{target}-rotated"])
    tensors = draft_of(table, layer, embedding, norm_before_fc)
    exact, proposed = run_draft(tensors, states, tensors.get("embed_tokens.weight", table))

    draft, new = save(tmp_path / "draft", tensors), tmp_path / "new"
    good("rotate", draft, "--like", folders[f"{target}-rotated"], "-o", new)
    edited = load_file(new / "model.safetensors")
    assert (new / "config.json").read_bytes() == (draft / "config.json").read_bytes()

    tables = [] if embedding == "none" else [edited["embed_tokens.weight"]]
    tables += [] if embedding == "own" else [rotated_table]  # a program may share the target's
    for each in tables:
        logits, tokens = run_draft(edited, rotated_states, each)
        assert float((logits - exact).abs().max() / exact.abs().max()) < 1e-12
        assert torch.equal(tokens == wanted_after, proposed == wanted)
        before, _ = run_draft(tensors, rotated_states, each)
        assert float((before - exact).abs().max() / exact.abs().max()) > 1e-2

    reads = {"fc.weight", "input_norm.weight"}
    if embedding != "own":
        reads |= {f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"}
        reads |= {f"{layer}.input_layernorm.weight", "embed_tokens.weight"}
    changed = {name for name in tensors if not torch.equal(tensors[name], edited[name])}
    assert changed == reads & tensors.keys() and edited.keys() == tensors.keys()


def test_drafts_that_cannot_rotate_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    _, table, _ = run_target(folders["phi"])
    tensors = draft_of(table, "midlayer", "none", False)
    d = table.shape[1]

    def said(tensors: Tensors, like: str = "phi-rotated", **config: Any) -> str:
        shutil.rmtree(tmp_path / "draft", ignore_errors=True)
        draft = save(tmp_path / "draft", tensors, **config)
        return refused("rotate", draft, "--like", folders[like], "-o", tmp_path / "new")

    assert "its hidden states lack their mean" in said(tensors, "phi-folded")
    assert "which are not several hidden states of 40" in said(tensors, "llama-rotated")
    assert "hidden states of" in (text := said(tensors, "gpt2-values")) and "not rotated" in text
    assert "was not folded" in said(tensors, "phi")
    eagle_1 = {name: tensor for name, tensor in tensors.items() if "hidden_norm" not in name}
    eagle_1["fc.weight"] = eagle_1["fc.weight"][:, : 2 * d].contiguous()
    assert "what the lm_head of the target reads" in said(eagle_1)
    medusa = {"0.0.linear.weight": torch.eye(d), "0.0.linear.bias": torch.ones(d)}
    assert "x can be rotated and the SiLU cannot" in said(medusa, medusa_num_heads=1)
    headless = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    assert "stores no lm_head.weight" in said(headless)
    assert "fc_2.weight is no known tensor of EAGLE-3" in said(
        {**tensors, "fc_2.weight": torch.eye(d)}
    )
    assert "use_aux_hidden_state is false" in said(
        tensors, eagle_config={"use_aux_hidden_state": False}
    )
    assert "its model_type gemma is not one of llama" in said(tensors, model_type="gemma")
    narrow = {**tensors, "midlayer.self_attn.k_proj.weight": torch.ones(d, d)}
    assert "does not read 24 features of an embedding" in said(narrow)
    assert "no draft of EAGLE-3" in said({"weight": torch.eye(d)})
    assert not (tmp_path / "new").exists()
