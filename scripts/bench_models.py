"""Times whole models with LayerNorm and with RMSNorm, with random weights; writes one JSON object.

    OMP_NUM_THREADS=1 python scripts/bench_models.py --models gpt2,bert --out models.json

This does what ``enjoyln bench`` does for a checkpoint, with models of the sizes of ``MODELS``.
Norms may be too small a part of a model to be measured in it. So ``norms_ms`` has the time of all
norms without the model, on inputs of the same shapes, with the additions before them: the additions
alone, with LayerNorm, with RMSNorm, and with the single operation that the backend ``enjoyln`` uses
for an addition and its norm. That operation overwrites its operands, as after their last use in a
model. ``--norms-alone`` measures only this.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from datetime import date
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

from enjoyln_cli import analyze, kernels, optimize
from enjoyln_cli.benchmark.baselines import share_weights
from enjoyln_cli.benchmark.cases import BenchOptions, compare_speeds
from enjoyln_cli.benchmark.results import hardware
from enjoyln_cli.benchmark.timing import Task, quartiles, time_rounds, waiter_for
from enjoyln_cli.benchmark.workload import sizes, to_device
from enjoyln_cli.checkpoint.config import MARKER
from enjoyln_cli.checkpoint.marker import marker
from enjoyln_cli.clock import Clock
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.in_memory import centre_parameters

BERT, GPT2, OPT, BLOOM = "BertModel", "GPT2LMHeadModel", "OPTForCausalLM", "BloomForCausalLM"
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2, {}),
    "bert": ("bert", BERT, {}),
    "opt-125m": ("opt", OPT, {
        "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "word_embed_proj_dim": 768}),
    "bloom-560m": ("bloom", BLOOM, {
        "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}),
    "vit": ("vit", "ViTForImageClassification", {}),
    "minilm": ("bert", BERT, {
        "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
        "intermediate_size": 1536}),
    "tiny": ("gpt2", GPT2, {"n_embd": 64, "n_layer": 2, "n_head": 4}),
}  # fmt: skip


def random_model(
    kind: str, cls: str, settings: dict[str, Any], dtype: torch.dtype, device: str = "cpu"
) -> Any:
    """A model that is ready to run, with the initial weights of transformers."""
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, cls)(transformers.CONFIG_MAPPING[kind](**settings))
    return model.to(dtype).eval().requires_grad_(False)


def plan_of(kind: str, cls: str, settings: dict[str, Any]) -> Plan:
    """The plan of such a model."""
    return analyze(transformers.CONFIG_MAPPING[kind](**settings), model_class=cls).plan


def folded_of(original: Any, plan: Plan) -> Any:
    """Centre ``original`` in place. Returns a model with the same weights that runs RMSNorm."""
    centre_parameters(original, plan)
    folded = share_weights(original)
    setattr(folded.config, MARKER, marker(plan, SimpleNamespace(model="random", revision=None)))
    return optimize(folded) if plan.folded else folded


def norms_of(plan: Plan) -> list[str]:
    """Paths of all LayerNorms."""
    return [verdict.norm for verdict in plan.norms]


def numbers(text: str) -> tuple[int, ...]:
    """``1,8`` as numbers."""
    return tuple(int(number) for number in text.split(","))


def norms_alone(
    original: Any,
    norms: list[str],
    pair: tuple[int, int],
    phase: str,
    repeats: int,
    device: torch.device,
) -> dict[str, Any]:
    """Milliseconds of all norms one after the other, each with an addition before it.

    ``pair`` is the batch size and the length of the prompt.
    """
    (size,) = to_device(sizes(original, [pair])[0], device)
    shapes: list[tuple[Any, tuple[int, ...]]] = []
    modules = [original.get_submodule(path) for path in norms]
    hooks = [m.register_forward_hook(lambda m, a, _: shapes.append((m, tuple(a[0].shape))))
             for m in modules if isinstance(m, nn.LayerNorm)]  # fmt: skip
    original.to(device)(**size.given)
    for hook in hooks:
        hook.remove()
    if phase == "decode":
        shapes = [(m, (pair[0], 1, shape[-1])) for m, shape in shapes]
    made = {"dtype": original.dtype, "device": device}
    given = [(m, torch.randn(shape, **made), torch.randn(shape, **made)) for m, shape in shapes]
    given = [(m, *(x - x.mean(-1, keepdim=True) for x in pair)) for m, *pair in given]

    def each(way: Any) -> Task:
        return Task(lambda _: [way(m, x, r) for m, x, r in given])

    tasks = {
        "no_norm": each(lambda m, x, r: x + r),
        "layer_norm": each(lambda m, x, r: m(x + r)),
        "rms_norm": each(lambda m, x, r: kernels.rms_norm(x + r, m.weight, m.bias, m.eps)),
        "add_rms_norm": each(
            lambda m, x, r: kernels.add_rms_norm_over(x, r, m.weight, m.bias, m.eps)
        ),
        "sum_layer_norm": each(
            lambda m, x, r: kernels.sum_layer_norm_over(x, r, m.weight, m.bias, m.eps)
        ),
    }
    times = time_rounds(tasks, repeats, waiter_for(device))
    return {"count": len(given)} | {
        name: quartiles(values).times(1e3).rounded(6) for name, values in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the JSON (default: standard output)")
    parser.add_argument("--models", default=",".join(name for name in MODELS if name != "tiny"))
    parser.add_argument("--batch-size", type=numbers, default=(1,))
    parser.add_argument("--seq-len", type=numbers, default=(128, 512))
    parser.add_argument("--mode", default="eager,fused")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="for each model; cases are left out for it"
    )
    parser.add_argument("--norms-alone", action="store_true", help="leave out the whole models")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    device, modes = torch.device(args.device), tuple(args.mode.split(","))
    pairs = tuple(product(args.batch_size, args.seq_len))
    asked = BenchOptions(pairs, modes, repeats=args.repeats, seconds=args.seconds)
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hardware": hardware(device),
        "kernels": kernels.native.status(device.type).what,
        "dtype": args.dtype,
        "threads": args.threads,
        "models": {},
    }
    for name in args.models.split(","):
        clock = Clock(time.perf_counter, args.seconds)
        plan = plan_of(*MODELS[name])
        original = random_model(*MODELS[name], getattr(torch, args.dtype))
        folded, norms = folded_of(original, plan), norms_of(plan)
        if args.norms_alone:
            phases = ("prefill", "decode") if original.can_generate() else ("prefill",)
            cases = [(pair, phase, {"seq_len": pair[1]}) for pair in pairs for phase in phases]
            left_out: list[str] = []
        else:
            rows, left_out = compare_speeds(original, folded, norms, asked, device, clock=clock)
            cases = [((r.batch_size, r.seq_len or 1), r.phase, r.to_json()) for r in rows]
        alone, found = {}, []
        for given, phase, row in cases:
            if (given, phase) not in alone:
                with torch.no_grad():
                    alone[given, phase] = norms_alone(
                        original, norms, given, phase, args.repeats, device
                    )
            found.append(row | {"phase": phase, "norms_ms": alone[given, phase]})
        result["models"][name] = {"rows": found, "left_out": left_out}
        text = json.dumps(result, indent=2)
        if args.out:
            args.out.write_text(text + "\n")
        del original, folded
    if not args.out:
        print(text)


if __name__ == "__main__":
    main()
