"""How fast folded models with random weights are, beside their originals.

    python scripts/model_times.py --models gpt2,bert --sizes 1x128,1x512 --dtype float32

Three models take turns: the original, the folded model, and the original with norms that return
their input. The outputs of the third are meaningless, but no change of the norms can save more time
than leaving them out.
"""

from __future__ import annotations

import argparse
import copy
import math
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import enjoyln_cli
from enjoyln_cli.comparison.batches import Batch, unpadded_batches
from enjoyln_cli.comparison.timing import time_rounds
from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.version import versions

Settings = dict[str, Any]
OPT_125M = {
    "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "word_embed_proj_dim": 768,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, Settings]] = {
    "gpt2": ("gpt2", "GPT2LMHeadModel", {}),
    "bert": ("bert", "BertModel", {}),
    "opt-125m": ("opt", "OPTForCausalLM", OPT_125M),
    "bloom-560m": ("bloom", "BloomForCausalLM", {
        "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}),
    "vit": ("vit", "ViTForImageClassification", {}),
    "minilm": ("bert", "BertModel", {
        "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
        "intermediate_size": 1536}),
    "tiny": ("gpt2", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
}  # fmt: skip
"""From a name to the model type, the class and the settings that differ from its defaults."""
ROUNDS = 15
DOUBT = 0.05
"""Probability that the true median lies outside of its interval."""


def random_model(
    model_type: str, model_class: str, settings: Settings, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """A model in evaluation mode with random weights, biases and norms."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**settings)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) if parameter.ndim == 1 else 0.001)
    return model.to(dtype)


def time_model(
    kind: tuple[str, str, Settings],
    folder: Path,
    pairs: Iterable[tuple[int, int]],
    dtype: str,
    device: str,
    seconds: float,
    mode: str,
) -> dict[str, Any]:
    """Fold a model with random weights, and time calls with these rows and tokens.

    Each size gets an equal share of what is left of ``seconds``. ``fold_seconds`` is the time to
    fold, with reading and writing. ``folder`` is a new directory, which is removed afterwards.
    """
    end, rows, left_out = time.perf_counter() + seconds, [], []
    try:
        original = random_model(*kind, getattr(torch, dtype))
        original.save_pretrained(folder / "original")
        begin = time.perf_counter()
        enjoyln_cli.fold(folder / "original", folder / "folded", verify=False)
        fold_seconds = time.perf_counter() - begin
        folded = enjoyln_cli.from_pretrained(folder / "folded", device_map=device)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    inputs = batches(original, pairs)
    without = without_norms(original.to(device))
    models = {"original": original, "folded": folded, "no_norm": without}
    for number, (case, count, tokens, batch) in enumerate(inputs):
        share = (end - time.perf_counter()) / (len(inputs) - number)
        if share <= 0:
            left_out.append(f"{case}: no time was left")
            continue
        given = {name: value.to(device) for name, value in batch.items()}
        if hasattr(original.config, "use_cache"):
            given["use_cache"] = False
        torch._dynamo.reset()
        compiled = mode == "compile"
        ready = {n: torch.compile(model) if compiled else model for n, model in models.items()}
        calls = {name: partial(model, **given) for name, model in ready.items()}
        try:
            with torch.no_grad():
                times = time_rounds(calls, ROUNDS, share)
            rows.append(row_of(f"{case}, {mode}", count, tokens, times))
        except torch.OutOfMemoryError:
            left_out.append(f"{case}: does not fit in the memory of {device}")
    about = {"fold_seconds": fold_seconds, "dtype": dtype, "date": date.today().isoformat()}
    about |= {"hardware": hardware(device), "versions": versions("torch", "transformers")}
    return about | {"rows": rows, "left_out": left_out}


def time_models(
    cases: Iterable[tuple[str, Sequence[tuple[int, int]]]],
    device: str,
    dtype: str,
    seconds: float,
    mode: str = "eager",
) -> dict[str, Any]:
    """From each name of ``MODELS`` to what ``time_model`` measured, or to ``left_out``, with why.

    Each model gets its share of ``seconds``.
    """
    results: dict[str, Any] = {}
    cases = list(cases)
    for name, pairs in cases:
        print(name, file=sys.stderr, flush=True)
        share = seconds / len(cases)
        with tempfile.TemporaryDirectory() as folder:
            try:
                results[name] = time_model(
                    MODELS[name], Path(folder, name), pairs, dtype, device, share, mode
                )
            except (EnjoyLNError, torch.OutOfMemoryError) as error:
                results[name] = {"rows": [], "left_out": [str(error).partition("\n")[0]]}
    return results


def batches(
    model: Any, pairs: Iterable[tuple[int, int]]
) -> list[tuple[str, int, int | None, Batch]]:
    """A name, rows, tokens (``None`` for images) and inputs, for each pair that differs by them."""
    found: dict[str, tuple[str, int, int | None, Batch]] = {}
    for rows, tokens in pairs:
        (batch,) = unpadded_batches(model, ((rows, tokens),), model.dtype)
        reads_text = "input_ids" in batch
        case = f"{rows} x {tokens} tokens" if reads_text else f"{rows} images"
        found.setdefault(case, (case, rows, tokens if reads_text else None, batch))
    return list(found.values())


def without_norms(model: Any) -> Any:
    """A copy that shares all weights, in which each LayerNorm returns its input."""
    tensors = (*model.parameters(), *model.buffers())
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for module in copied.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.forward = lambda x: x
    return copied


def row_of(
    case: str, rows: int, tokens: int | None, times: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """What the seconds of each round say: medians of ratios within a round, with 95 % intervals."""
    ratios = {
        name: [a / b for a, b in zip(times["original"], seconds, strict=True)]
        for name, seconds in times.items()
    }
    costs = [1 - 1 / ratio for ratio in ratios["no_norm"]]
    speedup, cost = (statistics.median(each) for each in (ratios["folded"], costs))
    low, high = median_interval(ratios["folded"]) or (0.0, math.inf)
    gains = low > 1 and (median_interval(costs) or (0,))[0] > 0 and 1 - 1 / speedup <= cost
    models = {
        name: {"median_ms": 1e3 * statistics.median(times[name]), "times_as_fast": median}
        for name, median in ((name, statistics.median(each)) for name, each in ratios.items())
    }
    return {
        "case": case,
        "batch_size": rows,
        "seq_len": tokens,
        "rounds": len(costs),
        "models": models,
        "speedup": speedup,
        "speedup_interval": median_interval(ratios["folded"]),
        "norm_cost": cost,
        "norm_cost_interval": median_interval(costs),
        "verdict": "slower" if high < 1 else "faster" if gains else "no gain here",
    }


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The interval that has the true median with at least 95 %; ``None`` for too few values.

    Of ``n`` sorted values, the true median lies between the ``k``-th smallest and the ``k``-th
    largest with a probability of ``1 - 2 P(B < k)``, where B is the number of heads in ``n`` coin
    flips.
    """
    count, below, beyond = len(values), 0, 0.0
    while True:
        beyond += math.comb(count, below) / 2**count
        if 2 * beyond > DOUBT:
            break
        below += 1
    ordered = sorted(values)
    return (ordered[below - 1], ordered[count - below]) if below else None


def model_lines(results: Mapping[str, Any]) -> list[str]:
    """A table of how many times as fast each folded model is; then what was left out, and why."""
    body, left_out = [], []
    for name, found in results.items():
        for row in found["rows"]:
            spread = " to ".join(f"{end:.3f}" for end in row["speedup_interval"] or [])
            times = f"{row['speedup']:.3f} ({spread or 'too few rounds'}, {row['verdict']})"
            ms = f"{row['models']['original']['median_ms']:.4g}"
            body.append((name, row["case"], ms, times, f"{100 * row['norm_cost']:.2f} %"))
        left_out += [f"* left out: {name}: {line}" for line in found["left_out"]]
    head = ("model", "case", "LayerNorm, ms", "times as fast (95 %)", "norms cost")
    lines = [head, ["---"] * len(head), *body]
    return [*(f"| {' | '.join(line)} |" for line in lines), "", *left_out]


def hardware(device: str) -> str:
    """The name of the GPU, or of the processor with the number of threads."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    info, name = Path("/proc/cpuinfo"), platform.processor() or platform.machine()
    if info.is_file():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        name = next((v.strip() for key, _, v in lines if key.strip() == "model name"), name)
    return f"{name}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(name for name in MODELS if name != "tiny"))
    parser.add_argument("--sizes", default="1x128,1x512", help="rows and tokens")
    parser.add_argument("--mode", choices=("eager", "compile"), default="eager")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600, help="for all models")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes.split(",")]
    cases: Any = [(name, sizes) for name in args.models.split(",")]
    results = time_models(cases, args.device, args.dtype, args.seconds, args.mode)
    print("\n".join(model_lines(results)))


if __name__ == "__main__":
    main()
