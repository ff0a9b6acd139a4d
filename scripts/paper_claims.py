"""Sets claims of the papers beside what this project computes: docs/papers.md.

    OMP_NUM_THREADS=1 python scripts/paper_claims.py > docs/papers.md

The text is that of ``paper_claims.md``, with the computed values in place of the names in braces.
Nothing is timed. Models have their full-size configurations and no weights, except where errors are
measured: those are of the small trained checkpoints in ``tests/checkpoints``, in float64.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
import transformers
from bench_models import MODELS as FULL_SIZE
from paper_figures import GPTJ, OVERHEAD, TABLE_3, TABLE_7, TABLE_8, TABLE_9, TABLE_10, TABLE_16
from paper_table import MODELS, ROOT
from paper_tables import PAPER_MODELS, percent, table
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from enjoyln_cli import analyze
from enjoyln_cli.analysis.analyze import Analysis
from enjoyln_cli.analysis.paper import algorithm_1
from enjoyln_cli.comparison.batches import seeded_batches
from enjoyln_cli.comparison.metrics import distances, relative
from enjoyln_cli.comparison.run import run
from enjoyln_cli.report.placement import norm_places
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.install import install

PHI_1 = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
         "num_attention_heads": 32}  # fmt: skip
PEAKS = {"A100": 19.5, "V100": 15.7}
"""TFLOP/s in float32 without tensor cores, from NVIDIA's data sheets (V100: the SXM2 module)."""
TICKS = (1, 1, 3)
"""Clock ticks of an addition, a multiplication and a division (Enjoy-LN, G.1)."""
MOST_TERMS = 60
"""The most norms that a printed percentage is compared with."""
SURVEYS: list[tuple[str, str, str, str]] = [
    ("GPT-2", "gpt2", "LayerNorm, pre", "LayerNorm"),
    ("BERT", "bert", "-", "LayerNorm"),
    ("Transformer of 2017 (Marian)", "marian", "LayerNorm, post", "LayerNorm"),
    ("T5", "t5", "RMSNorm, pre", "-"),
    ("LLaMA", "llama", "RMSNorm, pre", "RMSNorm"),
    ("Mistral", "mistral", "RMSNorm, pre", "RMSNorm"),
    ("Qwen2", "qwen2", "RMSNorm, pre", "RMSNorm"),
    ("Qwen3", "qwen3", "RMSNorm, pre", "RMSNorm"),
    ("DeepSeek-V3", "deepseek_v3", "RMSNorm, pre", "-"),
    ("Gemma", "gemma", "RMSNorm, pre", "RMSNorm"),
    ("Gemma 2", "gemma2", "RMSNorm, pre", "RMSNorm"),
    ("Gemma 3", "gemma3_text", "RMSNorm, pre", "RMSNorm"),
]
"""Model, model type, and what the two background pages say."""


def built(kind: str, model_class: str, settings: dict[str, Any]) -> Any:
    """The model without weights."""
    with torch.device("meta"):
        config = transformers.CONFIG_MAPPING[kind](**settings)
        return getattr(transformers, model_class)(config).eval()


def linear_elements(model: nn.Module) -> int:
    """Elements of the weight matrices of all linear layers, the output head included.

    Each is multiplied and added once for each token, so a call takes at least twice as many
    operations for each token. Attention scores are not counted.
    """
    linear = [m for m in model.modules() if isinstance(m, (nn.Linear, Conv1D))]
    return sum(layer.weight.numel() for layer in linear)


# Table 3.


def as_fraction(shown: float, most: int = MOST_TERMS) -> Fraction:
    """The fraction with the smallest denominator that rounds to ``shown`` percent."""
    for whole in range(1, most + 1):
        part = round(whole * shown / 100)
        if round(100 * part / whole, 2) == shown:
            return Fraction(part, whole)
    raise ValueError(f"no fraction of at most {most} norms is {shown} %")


def foldable() -> Iterator[tuple[object, ...]]:
    swin = ("Swin", "swin", "SwinModel", {}, "", "")
    two = ("BLOOM, default config", "bloom", "BloomForCausalLM", {}, "", "")
    for name, kind, model_class, settings, *_ in (*MODELS, two, swin):
        config = transformers.CONFIG_MAPPING[kind](**settings)
        found = analyze(config, model_class=model_class)
        first, second = _printed(name)
        without = len(algorithm_1(found.subject.traces[0], centre_embeddings=False))
        many = len(found.plan.norms)
        yield (name, many, first, f"{without} ({100 * without / many:.2f} %)", second,
               len(found.paper), len(found.plan.folded))  # fmt: skip


def _printed(name: str) -> list[str]:
    known = next((pair for key, pair in TABLE_3.items() if name.startswith(key)), (None, None))
    return [percent(value) for value in known]


# Times.


def bounds() -> Iterator[tuple[object, ...]]:
    """The paper's times, and the rate that they need if they are of float32."""
    phi = PAPER_MODELS["Phi"]
    candidates = {
        "Bert": ("Bert", PAPER_MODELS["Bert"]), "GPT2": ("GPT2", PAPER_MODELS["GPT2"]),
        "OPT": ("OPT", PAPER_MODELS["OPT"]),
        "Phi, if Phi-2": ("Phi", (phi[0], "PhiForCausalLM", phi[2])),
        "Phi, if Phi-2 without its head": ("Phi", phi),
        "Phi, if phi-1": ("Phi", (phi[0], "PhiForCausalLM", PHI_1)),
    }  # fmt: skip
    for shown, (name, model) in candidates.items():
        count = 2 * 256 * linear_elements(built(*model))
        for where, rows in OVERHEAD.items():
            yield _bound(f"{shown}, {where}", where[:4], count, rows[name][3])
    gptj = linear_elements(built("gptj", "GPTJForCausalLM", {}))
    for rows, tokens in ((4, 64), (4, 1024)):
        figures = GPTJ[rows, tokens]
        assert figures is not None
        shown = f"GPT-J, {rows} x {tokens}, A100 (Table 17)"
        yield _bound(shown, "A100", 2 * rows * tokens * gptj, figures[0])


def _bound(shown: str, gpu: str, count: int, seconds: float) -> tuple[object, ...]:
    least = count / PEAKS[gpu] / 1e12
    fits = "yes" if seconds >= least else "**no**"
    return (shown, f"{count / 1e9:.0f}", f"{1e3 * least:.1f}", f"{1e3 * seconds:.1f}",
            f"{count / seconds / 1e12:.1f}", fits)  # fmt: skip


def beyond_the_share() -> Iterator[tuple[object, ...]]:
    """Every saving that the paper reports for a model of its Table 9, and the largest of each."""
    saved: dict[str, dict[str, float]] = {name: {} for name in TABLE_9}
    for where, rows in OVERHEAD.items():
        for name, figures in rows.items():
            if name in saved:
                saved[name][where] = figures[5]
    for (name, where), figures in TABLE_10.items():
        saved[name][f"{where} (Table 10)"] = figures[2]
    for name, shares in TABLE_16.items():
        for tokens, share in zip((64, 256, 1024, 4096, 16384), shares, strict=True):
            saved[name][f"4 x {tokens} (Table 16)"] = share
    for name, found in saved.items():
        all_of_it = TABLE_9[name][2]
        more = {where: share for where, share in found.items() if share > all_of_it}
        if more:
            which = "; ".join(f"{part:.2f} %, {where}" for where, part in more.items())
            yield name, percent(all_of_it), f"{len(more)} of {len(found)}", which


def share_by_length() -> Iterator[tuple[object, ...]]:
    """Operations of BERT's norms (8 d each, Table 7) for each token, as a share, by length."""
    model = built(*PAPER_MODELS["Bert"])
    layers, width = model.config.num_hidden_layers, model.config.hidden_size
    norms = 8 * width * (2 * layers + 1)
    for tokens in (256, 1024, 4096, 16384):
        products = 2 * linear_elements(model) + 4 * tokens * width * layers
        yield tokens, f"{products / 1e6:.0f}", f"{100 * norms / (norms + products):.3f} %"


def norms_of_bloom() -> float:
    """How many norms Table 9's time for Bloom is, at the time of each of BERT's 25."""
    return TABLE_9["Bloom"][1] / (TABLE_9["Bert"][1] / 25)


def shares() -> Iterator[tuple[object, ...]]:
    ours = json.loads((ROOT / "docs" / "paper_timings.json").read_text())["rows"]
    for name, (total, norms, printed) in TABLE_9.items():
        here = [r["norm_tax"] for r in ours if r["model"] == name and r["mode"] == "eager"
                and (r["batch_size"], r["seq_len"]) == (2, 256)]  # fmt: skip
        yield (name, percent(printed), f"{100 * norms / total:.2f} %",
               f"{100 * here[0]:.2f} %" if here else "-")  # fmt: skip


# Equations.


def mean_of(y: torch.Tensor) -> float:
    """The root mean square of the means over channels, relative to that of ``y``."""
    return float(y.mean(1).square().mean().sqrt() / y.square().mean().sqrt())


def convolutions() -> dict[str, float]:
    """The mean over channels that a convolution's output keeps, by how its weight is centred."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 5, 9, 8).double(), torch.randn(6, 5, 3, 3).double() + 0.3
    centred = {
        "not centred": weight,
        "over the output channels (equation 24)": weight - weight.mean(0, keepdim=True),
        "over the second dimension (the sentence after 26)": weight - weight.mean(1, keepdim=True),
        "over the h x w positions (26 and 27 as printed)": weight - weight.mean((2, 3), True),
    }
    return {how: mean_of(F.conv2d(x, w)) for how, w in centred.items()}


def group_matrix(groups: int, size: int, has_identity: bool) -> torch.Tensor:
    """``A`` of equation 34: as printed (``has_identity``), or without the ``I``."""
    blocks = torch.block_diag(*[torch.full((size, size), 1 / size)] * groups).double()
    return torch.eye(groups * size).double() - blocks if has_identity else blocks


def group_means(has_identity: bool, groups: int = 3, size: int = 4) -> float:
    """The mean over groups that ``(I - A) W x`` keeps, relative to its size."""
    torch.manual_seed(0)
    weight, x = torch.randn(groups * size, 7).double() + 0.3, torch.randn(50, 7).double()
    centred = weight - group_matrix(groups, size, has_identity) @ weight
    return mean_of((x @ centred.T).view(-1, size))


def group_norm_error(shape: tuple[int, ...], groups: int = 3) -> float:
    """Relative change of a GroupNorm's result when each position of each group is centred before.

    For a layer before it, that is the constraint of equation 30.
    """
    torch.manual_seed(0)
    x = torch.randn(shape).double() + 0.3
    split = x.view(shape[0], groups, shape[1] // groups, *shape[2:])
    centred = (split - split.mean(2, keepdim=True)).view(shape)
    exact = F.group_norm(x, groups)
    return float((F.group_norm(centred, groups) - exact).norm() / exact.norm())


# Operation counts.


def counted() -> dict[str, tuple[tuple[int, int, int], tuple[int, int, int]]]:
    """LN's and RMSNorm's operations for d features, in units of d, from the rows of the tables."""
    mean, variance, scaling, affine = (1, 0, 0), (2, 1, 0), (1, 0, 1), (1, 1, 0)
    square, divide, gain = (1, 1, 0), (0, 0, 1), (0, 1, 0)
    merged = (5, 1, 1)  # one step of Welford's algorithm
    return {
        "Table 7": (_sum(mean, variance, scaling, affine), _sum(square, divide, gain)),
        "Table 8": (_sum(merged, (1, 1, 0), (1, 1, 0)), _sum(square, gain, gain)),
    }


def _sum(*steps: tuple[int, int, int]) -> tuple[int, int, int]:
    adds, products, divisions = (sum(column) for column in zip(*steps, strict=True))
    return adds, products, divisions


def ticks(operations: tuple[int, int, int]) -> int:
    return sum(many * each for many, each in zip(operations, TICKS, strict=True))


def operations() -> Iterator[tuple[object, ...]]:
    printed = {"Table 7": TABLE_7, "Table 8": TABLE_8}
    for name, (ln, rms) in counted().items():
        assert (ln, rms) == (printed[name]["LN"], printed[name]["RMS"]), name
        yield _operations(f"{name}, totals", ln, rms)
    ln, rms = counted()["Table 7"]
    yield _operations("Table 7, as the text above it says", ln, (*rms[:2], 0))


def _operations(name: str, ln: Any, rms: Any) -> tuple[object, ...]:
    saved = 100 * (1 - ticks(rms) / ticks(ln))
    return (name, *(" + ".join(f"{n} d" for n in one) for one in (ln, rms)), ticks(ln), ticks(rms),
            f"{saved:.0f} %")  # fmt: skip


# Models.


def full_size(name: str) -> Analysis:
    kind, model_class, settings = FULL_SIZE[name]
    return analyze(transformers.CONFIG_MAPPING[kind](**settings), model_class=model_class)


def break_even() -> Iterator[tuple[object, ...]]:
    """Tokens of a training step from which on centring weights is less work than centring norms."""
    for name in ("gpt2", "opt-125m", "bloom-560m", "vit"):
        found = full_size(name)
        plan, model = found.plan, found.subject.reference.model
        owners = [(one, model.get_submodule(one.parameter.rpartition(".")[0]))
                  for one in plan.writers if len(one.shape) > 1]  # fmt: skip
        inputs = [torch.Size(one.shape).numel() // one.axis.size for one, owner in owners
                  if isinstance(owner, (nn.Linear, nn.Conv2d, Conv1D))]  # fmt: skip
        features: list[Any] = [model.get_submodule(v.norm) for v in plan.folded]
        norms = sum(norm.normalized_shape[0] for norm in features)
        added = sum(op.axis.size for op in plan.ops)
        weights = sum(torch.Size(one.shape).numel() for one in plan.writers)
        yield (name, len(plan.folded), len(plan.ops), min(inputs), max(inputs),
               f"{weights / (norms - added):,.0f}")  # fmt: skip


def exact_folds() -> Iterator[tuple[object, ...]]:
    """Exact folds of the trained checkpoints, without any training, and their error in float64."""
    for folder, _, model_class in [(m[-1], m[1], m[2]) for m in MODELS]:
        load = getattr(transformers, model_class).from_pretrained
        model = load(ROOT / "tests" / "checkpoints" / folder, dtype=torch.float64).eval()
        found = analyze(model.config, model_class=model_class)
        batches = seeded_batches(model, 16, 0, torch.float64)
        exact = run(model, batches)
        centre_parameters(model, found.plan)
        install(model, [v.norm for v in found.plan.folded], found.plan.ops)
        error = max(relative(distances(run(model, batches), exact)).values())
        yield (folder, model_class, len(found.plan.norms), len(found.plan.folded),
               len(found.plan.ops), f"{error:.0e}")  # fmt: skip


def places() -> Iterator[tuple[object, ...]]:
    for name, kind, placement, comparison in SURVEYS:
        config = transformers.CONFIG_MAPPING[kind]()
        for key in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers",
                    "encoder_layers", "decoder_layers"):  # fmt: skip
            if hasattr(config, key):
                setattr(config, key, 2)
        if hasattr(config, "layer_types"):
            config.layer_types = config.layer_types[:2]
        model_class = transformers.MODEL_MAPPING[type(config)].__name__
        here = norm_places(analyze(config, model_class=model_class))
        counts = (
            f"{norm}: {', '.join(f'{n} {place}' for place, n in found.items())}"
            for norm, found in here.items()
        )
        yield name, placement, comparison, "; ".join(counts).replace("_", " ")


def tied() -> str:
    """Why two language models need an added mean subtraction."""
    reasons = {name: full_size(name).plan.ops[0].reason for name in ("gpt2", "opt-125m")}
    return "\n  ".join(f"`{name}`: {reason}." for name, reason in reasons.items())


def share(value: float) -> str:
    return f"{100 * value:.0f} %" if value > 1e-3 else f"{value:.0e}"


def values() -> dict[str, str]:
    """The text for each name in braces in ``paper_claims.md``."""
    kernels = list(convolutions().values())
    even = list(break_even())
    rates = [float(str(row[4])) / PEAKS["A100"] for row in bounds() if "GPT-J" in str(row[0])]
    first = ("model", "LNs", "paper: first", "Algorithm 1, no embedding centred", "paper: second",
             "Algorithm 1", "exact")  # fmt: skip
    limits = ("model, GPU", "GFLOP", "at least, ms", "paper, ms", "paper, TFLOP/s", "possible")
    ticks_head = ("count", "LN (+, x, /)", "RMSNorm (+, x, /)", "LN, ticks / d", "RMSNorm", "saved")
    even_head = ("model", "norms folded", "added subtractions", "smallest p", "largest p",
                 "whole model, tokens")  # fmt: skip
    pages = ("model", "RMSNorm and pre-norm placement", "RMSNorm vs. LayerNorm", "found")
    errors = ("checkpoint", "class", "LNs", "converted", "added subtractions", "error")
    larger = ("model", "share of LNs (Table 9)", "larger savings", "which")
    return {
        "foldable": table(first, foldable()),
        "bloom": str(as_fraction(83.33)).replace("/", " of "),
        "vmamba": str(as_fraction(70.59)).replace("/", " of "),
        "of_bloom": f"{norms_of_bloom():.1f}",
        "tied": tied(),
        "beyond": table(larger, beyond_the_share()),
        "lengths": table(("tokens", "MFLOP for each token", "norms"), share_by_length()),
        "gptj": " and ".join(map(share, rates)),
        "bounds": table(limits, bounds()),
        "shares": table(("model", "printed", "norms / total", "here"), shares()),
        "none": share(kernels[0]),
        "eq24": share(kernels[1]),
        "second": share(kernels[2]),
        "eq26": share(kernels[3]),
        "eq34": share(group_means(has_identity=True)),
        "without": share(group_means(has_identity=False)),
        "rows": share(group_norm_error((4, 12))),
        "images": share(group_norm_error((4, 12, 9, 7))),
        "operations": table(ticks_head, operations()),
        "ops": ", ".join(str(row[0]) for row in even if row[2]),
        "break_even": table(even_head, even),
        "places": table(pages, places()),
        "exact": table(errors, exact_folds()),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    transformers.logging.disable_progress_bar()
    page = (ROOT / "scripts" / "paper_claims.md").read_text()
    print(page.format(**values()), end="")


if __name__ == "__main__":
    main()
