"""How much smaller is the error of quantised models after `enjoyln rotate`?

    python scripts/train_tiny.py opt phi gpt2 -o checkpoints
    python scripts/quantisation.py checkpoints/opt checkpoints/phi checkpoints/gpt2

For each checkpoint: as it is, with its norms' weights merged, and rotated. Each of these is
quantised by simulated rounding, by torchao (8-bit and 4-bit weights and inputs), and by
onnxruntime's dynamic quantisation. The tables show the relative error of the logits against the
exact original, and the perplexity, both on text that the model was not trained on: the package
``json`` of Python's standard library.

``--outliers N`` plants N outlier features first, since tiny models have none. The weight and bias
of each norm are multiplied by 20 there, and the layers that read the norm divide by 20; the same
holds for N features of the values of each attention head. The model computes the same function.

torchao quantises ``nn.Linear`` only, so GPT-2 is left out there. Both libraries are optional; what
is not installed is left out. All runs use float32 on the CPU.
"""

from __future__ import annotations

import argparse
import copy
import math
import sysconfig
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from enjoyln_cli.analysis.analyze import analyze_config
from enjoyln_cli.comparison.quantisation import SCHEMES, input_dimension, linear_layers, simulated
from enjoyln_cli.plan.plan import Options, Plan
from enjoyln_cli.rewrite.in_memory import centre_parameters

WINDOWS = 48
OUTLIER = 20.0
Logits = Callable[[torch.Tensor], torch.Tensor]


def held_out(folder: Path, length: int) -> torch.Tensor:
    """Token ids of shape (WINDOWS, length)."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    files = sorted((Path(sysconfig.get_path("stdlib")) / "json").glob("*.py"))
    ids = tokenizer("\n".join(file.read_text() for file in files))["input_ids"]
    return torch.tensor(ids[: WINDOWS * length]).view(-1, length)


def plant(model: Any, plan: Plan, count: int) -> None:
    """Multiply ``count`` features of each merged norm and of the values; divide what reads them."""
    generator = torch.Generator().manual_seed(0)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    linear = linear_layers(model)
    with torch.no_grad():
        for merge in plan.merged:
            size = len(parameters[f"{merge.norm}.weight"])
            chosen = torch.randperm(size, generator=generator)[:count]
            for name in ("weight", "bias"):
                parameters[f"{merge.norm}.{name}"][chosen] *= OUTLIER
            for reader in merge.readers:
                parameters[reader.weight.parameter].movedim(reader.dim, 0)[chosen] /= OUTLIER
        for basis in plan.turned:
            chosen = torch.randperm(basis.size, generator=generator)[:count]
            for tensor in basis.tensors if basis.kind == "values" else ():
                axis = tensor.held or tensor.axis
                module, _, name = tensor.parameter.rpartition(".")
                reads = name == "weight" and input_dimension(linear[module]) == axis.dim
                part = parameters[tensor.parameter].narrow(axis.dim, axis.start, axis.length)
                heads = part.unflatten(axis.dim, (axis.outer, axis.size, axis.inner))
                heads.movedim(axis.dim + 1, 0)[chosen] *= 1 / OUTLIER if reads else OUTLIER


def variants(folder: Path, outliers: int) -> dict[str, Any]:
    """The untied model as it is, with merged norms, and rotated: the same function each time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = copy.deepcopy(model.config)
    options = Options(fold=False, rotate=True, untie=True)
    plan = analyze_config(config, model_class=type(model).__name__, options=options).plan
    only_merged = replace(plan, bases=())
    centre_parameters(model, replace(only_merged, merged=()))  # unties
    plant(model, plan, outliers)
    found = {"original": model}
    for name, some in (("merged", only_merged), ("rotated", plan)):
        found[name] = copy.deepcopy(model)
        centre_parameters(found[name], replace(some, untied=()))
    return found


def quantised_by_torchao(model: Any, kind: str) -> Logits:
    from torchao import quantization as ao

    configs = {
        "torchao W8A8": lambda: ao.Int8DynamicActivationInt8WeightConfig(),
        "torchao W4A8": lambda: ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=ao.PerAxis(0)
        ),
        "torchao W4": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4),
    }
    model = copy.deepcopy(model)
    chosen = set(linear_layers(model))
    ao.quantize_(model, configs[kind](), filter_fn=lambda _, path: path in chosen)
    return lambda ids: model(ids).logits


def quantised_by_onnxruntime(model: Any, ids: torch.Tensor, folder: Path) -> Logits:
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    class Only(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids, use_cache=False).logits

    plain, rounded = folder / "plain.onnx", folder / "rounded.onnx"
    torch.onnx.export(Only(), (ids,), plain, dynamo=True, verbose=False)
    quantize_dynamic(plain, rounded, per_channel=True, weight_type=QuantType.QInt8)
    session = onnxruntime.InferenceSession(rounded, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda ids: torch.from_numpy(session.run(None, {name: ids.numpy()})[0])


def score(logits: torch.Tensor, exact: torch.Tensor, ids: torch.Tensor) -> tuple[float, float]:
    """The relative error of the logits, and the perplexity."""
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return float((logits - exact).norm() / exact.norm()), math.exp(float(loss))


def measure(folder: Path, outliers: int) -> dict[str, dict[str, tuple[float, float]]]:
    """For each way to quantise and each variant: error and perplexity."""
    models = variants(folder, outliers)
    ids = held_out(folder, models["original"].config.max_position_embeddings)
    linear = any(isinstance(m, torch.nn.Linear) for m in linear_layers(models["original"]).values())
    rows: dict[str, dict[str, tuple[float, float]]] = {}
    with torch.no_grad():
        exact = copy.deepcopy(models["original"]).double()(ids).logits.float()

        def add(way: str, name: str, run: Logits) -> None:
            rows.setdefault(way, {})[name] = score(run(ids), exact, ids)

        for name, model in models.items():

            def plain(ids: torch.Tensor, model: Any = model) -> torch.Tensor:
                return model(ids).logits

            add("float32", name, plain)
            for scheme, bits in SCHEMES.items():
                with simulated(model, bits):
                    add(f"simulated {scheme}", name, plain)
            for kind in ("torchao W8A8", "torchao W4A8", "torchao W4"):
                if linear and find_spec("torchao"):
                    add(kind, name, quantised_by_torchao(model, kind))
            if find_spec("onnxruntime") and find_spec("onnxscript"):
                with tempfile.TemporaryDirectory() as place:
                    run = quantised_by_onnxruntime(model, ids, Path(place))
                    add("onnxruntime dynamic W8A8", name, run)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--outliers", type=int, default=0, metavar="N")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    for folder in args.checkpoints:
        what = f", {args.outliers} outlier features planted" if args.outliers else ""
        print(f"\n### {folder.name}{what}\n")
        rows = measure(folder, args.outliers)
        names = list(next(iter(rows.values())))
        print(f"| error of the logits (perplexity) | {' | '.join(names)} |")
        print("|---|" + "---:|" * len(names))
        for way, found in rows.items():
            cells = [f"{error:.2g} ({perplexity:.2f})" for error, perplexity in found.values()]
            print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
