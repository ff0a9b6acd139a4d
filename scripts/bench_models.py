"""Times whole models with LayerNorm, with RMSNorm, and with the additions in it; one JSON object.

    OMP_NUM_THREADS=1 python scripts/bench_models.py --models gpt2,bert --out models.json

Random weights of the sizes that the names stand for. In one process and turn by turn:

    original   as transformers runs it                      bare          its norms left out
    folded     ``enjoyln_cli.optimize``                     captured      original, one graph
    fused      and ``torch.compile(backend="enjoyln")``     captured_bare bare, one graph

``tax`` is original - bare, what norms cost at all; a share is what part of it is saved. A captured
graph saves Python's time, too, which is no merit of fusion: ``share_fused`` is captured - fused
over captured - captured_bare. Where norms are too little of a model to be seen in it,
``norms_ms`` tells how long they take by themselves, on inputs of the same shapes, with the
additions before them: as LayerNorm, as RMSNorm, and as one.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import DynamicCache

from enjoyln_cli import analyze, kernels, optimize
from enjoyln_cli.config import MARKER
from enjoyln_cli.fold import centre_parameters
from enjoyln_cli.fusion import fuse
from enjoyln_cli.kernels import native
from enjoyln_cli.marker import marker

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("gpt2", "GPT2LMHeadModel", {}),
    "bert": ("bert", "BertModel", {}),
    "opt-125m": ("opt", "OPTForCausalLM", {
        "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "word_embed_proj_dim": 768}),
    "bloom-560m": ("bloom", "BloomForCausalLM", {
        "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}),
    "vit": ("vit", "ViTForImageClassification", {}),
    "minilm": ("bert", "BertModel", {
        "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
        "intermediate_size": 1536}),
    "tiny": ("gpt2", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
}  # fmt: skip
CASES = ("prefill128", "prefill512", "decode")
STEPS = 16
"""Tokens of one turn of decoding, after a prompt of 128."""
RESOLVED = 0.005
"""The part of a model's time below which a tax is lost in the noise, and has no shares."""
Call = Callable[[], Any]


def built(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """The original and the folded model with the same centred weights, and one without norms."""
    kind, cls, settings = MODELS[name]
    config = transformers.CONFIG_MAPPING[kind](**settings)
    plan = analyze(config, model_class=cls).plan
    torch.manual_seed(0)
    original = getattr(transformers, cls)(config).to(dtype).eval().requires_grad_(False)
    centre_parameters(original, plan)
    models = {"original": original, "bare": without_norms(shared(original))}
    folded = shared(original)
    setattr(folded.config, MARKER, marker(plan, SimpleNamespace(model=name, revision=None)))
    return {**models, "folded": optimize(folded) if plan.folded else folded}


def shared(model: Any) -> Any:
    """A copy that shares its weights."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def without_norms(model: Any) -> Any:
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.LayerNorm):
            above, _, name = path.rpartition(".")
            setattr(model.get_submodule(above), name, nn.Identity())
    return model


def captured(model: Any, fused: list[int] | None = None) -> Any:
    """A copy of ``model`` that runs as one graph, with the additions fused if they are counted."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if fused is not None:
            fused.append(fuse(gm))
        return gm.forward

    return torch.compile(shared(model), backend=backend)


def inputs_for(name: str, model: Any, case: str, dtype: torch.dtype) -> dict[str, Any] | None:
    length = {"prefill128": 128, "prefill512": 512, "decode": 128}[case]
    if name == "vit":
        return {"pixel_values": torch.randn(1, 3, 224, 224, dtype=dtype)} if length == 512 else None
    return {"input_ids": torch.randint(5, model.config.vocab_size, (1, length))}


def prefill(model: Any, given: dict[str, Any], causal: bool) -> Call:
    extra = {"use_cache": False} if causal else {}
    return lambda: model(**given, **extra)


def decoding(model: Any, given: dict[str, Any]) -> Call:
    """``STEPS`` single tokens behind the prompt, from the same cache every time."""
    start = DynamicCache(config=model.config)
    model(**given, past_key_values=start, use_cache=True)
    token = given["input_ids"][:, -1:]

    def run() -> None:
        cache = copy.deepcopy(start)
        begin = time.perf_counter()
        for _ in range(STEPS):
            model(input_ids=token, past_key_values=cache, use_cache=True)
        run.seconds = (time.perf_counter() - begin) / STEPS  # type: ignore[attr-defined]

    return run


def medians(calls: dict[str, Call], seconds: float) -> dict[str, float]:
    return middle(turns(calls, seconds))


def middle(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def quartiles(times: dict[str, list[float]], slow: str, fast: str) -> list[float]:
    """Of the ratio within a turn: where they lie on both sides of 1, nothing is resolved."""
    each = [a / b for a, b in zip(times[slow], times[fast], strict=True)]
    return statistics.quantiles(each, n=4)


def turns(calls: dict[str, Call], seconds: float, fewest: int = 9) -> dict[str, list[float]]:
    """Milliseconds of each, turn by turn; every other turn goes backwards."""
    for _ in range(3):
        for call in calls.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    end, turn = time.perf_counter() + seconds, 0
    while turn < fewest or time.perf_counter() < end:
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            call = calls[name]
            begin = time.perf_counter()
            call()
            taken = time.perf_counter() - begin
            times[name].append(1e3 * getattr(call, "seconds", taken))
        turn += 1
    return times


def norms_alone(model: Any, given: dict[str, Any], decode: bool, seconds: float) -> dict[str, Any]:
    """All norms of the model one after the other, each with an addition before it."""
    shapes: list[tuple[Any, tuple[int, ...]]] = []
    modules = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    hooks = [m.register_forward_hook(lambda m, a, _: shapes.append((m, a[0].shape)))
             for m in modules]  # fmt: skip
    model(**given)
    for hook in hooks:
        hook.remove()
    if decode:
        shapes = [(m, (1, 1, shape[-1])) for m, shape in shapes]
    dtype = model.dtype
    rows = [(m, torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype))
            for m, shape in shapes]  # fmt: skip
    rows = [(m, x - x.mean(-1, keepdim=True), r - r.mean(-1, keepdim=True)) for m, x, r in rows]

    def as_layer_norm() -> None:
        for m, x, r in rows:
            m(x + r)

    def as_rms_norm() -> None:
        for m, x, r in rows:
            kernels.rms_norm(x + r, m.weight, m.bias, m.eps)

    def as_one() -> None:
        for m, x, r in rows:
            kernels.add_rms_norm(x, r, m.weight, m.bias, m.eps)

    def as_one_layer_norm() -> None:
        for m, x, r in rows:
            kernels.sum_layer_norm(x, r, m.weight, m.bias, m.eps)

    calls = {"layer_norm": as_layer_norm, "rms_norm": as_rms_norm, "add_rms_norm": as_one,
             "sum_layer_norm": as_one_layer_norm}  # fmt: skip
    return {"count": len(rows), **medians(calls, seconds)}


def measured(name: str, case: str, models: dict[str, Any], seconds: float) -> dict[str, Any] | None:
    original = models["original"]
    given = inputs_for(name, original, case, original.dtype)
    causal = getattr(original.config, "use_cache", None) is not None and original.can_generate()
    decode = case == "decode"
    if given is None or (decode and not causal):
        return None
    torch._dynamo.reset()
    fused: list[int] = []
    variants = {
        **models,
        "captured": captured(original),
        "captured_bare": captured(models["bare"]),
        "fused": captured(models["folded"], fused),
    }
    calls = {
        key: decoding(model, given) if decode else prefill(model, given, causal)
        for key, model in variants.items()
    }
    times = turns(calls, seconds)
    ms = middle(times)
    return {
        "ms": ms,
        "additions_fused": max(fused),
        "tax": (ms["original"] - ms["bare"]) / ms["original"],
        "share_folded": _share(ms, "original", "folded", "bare"),
        "share_fused": _share(ms, "captured", "fused", "captured_bare"),
        "speed_folded": ms["original"] / ms["folded"],
        "speed_fused": ms["original"] / ms["fused"],
        "speed_fused_over_captured": ms["captured"] / ms["fused"],
        "spread": {
            "speed_folded": quartiles(times, "original", "folded"),
            "speed_fused": quartiles(times, "original", "fused"),
            "speed_fused_over_captured": quartiles(times, "captured", "fused"),
        },
        "norms_ms": norms_alone(original, given, decode, seconds / 4),
    }


def _share(ms: dict[str, float], before: str, after: str, bare: str) -> float | None:
    tax = ms[before] - ms[bare]
    return (ms[before] - ms[after]) / tax if tax > RESOLVED * ms[before] else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the JSON; standard output without")
    parser.add_argument("--models", default=",".join(name for name in MODELS if name != "tiny"))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="for every case of a model")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch._dynamo.config.cache_size_limit = 64
    transformers.logging.set_verbosity_error()
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kernels": native.status("cpu").what,
        "dtype": args.dtype,
        "threads": args.threads,
        "models": {},
    }
    with torch.no_grad():
        for name in args.models.split(","):
            models = built(name, getattr(torch, args.dtype))
            found = {
                case: measured(name, case, models, args.seconds) for case in args.cases.split(",")
            }
            result["models"][name] = {case: entry for case, entry in found.items() if entry}
            text = json.dumps(result, indent=2)
            if args.out:
                args.out.write_text(text + "\n")
            del models
    if not args.out:
        print(text)


if __name__ == "__main__":
    main()
