"""Every model type of transformers: how many of its LayerNorms fold, and is the result the same?

    python scripts/census.py --out census.jsonl            every type that is not in the file yet
    python scripts/census.py --out census.jsonl --types gpt2,whisper --again
    python scripts/census.py --out census.jsonl --fast      one type for each mechanism
    python scripts/census.py --out census.jsonl --markdown docs/architectures.md

For each class of a type: a shrunken config, random weights in float64 (γ, β and biases moved, means
of weights not zero), the plan that ``analyze`` proves, the live model folded by it, and the largest
difference of any returned tensor over three inputs, relative to that tensor's largest element.
Every type runs in a process of its own, with limits on time and memory.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import re
import resource
import subprocess
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

SEEDS = (0, 1, 2)
HEADS = (
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
)
"""The auto mappings that are walked: the base model and the usual heads."""

FAST = (
    "gpt2", "gpt_neox", "gptj", "bloom", "falcon", "mpt", "opt", "phi", "stablelm", "persimmon",
    "cohere", "olmo", "biogpt", "xglm", "bert", "albert", "electra", "deberta",
    "deberta-v2", "bart", "bigbird_pegasus", "whisper", "speech_to_text", "wav2vec2", "vit",
    "beit", "dinov2", "swin", "convnext", "segformer", "clip", "blip", "layoutlm", "videomae",
    "audio-spectrogram-transformer", "canine", "mobilevit", "phimoe",
)  # fmt: skip
"""One type for each way in which norms, writers and observers are put together."""

LAYERS = re.compile(r"layers?$|^depths?$|num_blocks|_depth$|num_.*_layers|n_layers?")
WIDTHS = re.compile(
    r"hidden|embed|dim|width|channels|inner|ffn|intermediate|d_model|d_ff|d_kv|n_embd|rank|proj|size"
)
FIXED = re.compile(
    r"vocab|image|patch|kernel|window|position|num_channels|batch|pad|group|type|stride|tile|crop"
    r"|max_|token|dilation|pool_size|_id|scale|bins|in_channels|n_mels|sample"
)
TEXT_IDS = re.compile(r"_token_id$|_token_index$")
VOCABULARY = 131


def shrink(config: Any, factor: int) -> None:
    """Fewer layers, narrower by one factor throughout, a small vocabulary, in every sub-config."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrink(value, factor)
        elif name == "vocab_size" and value is None:
            config.vocab_size = VOCABULARY
        elif isinstance(value, bool) or name.startswith("_"):
            continue
        elif isinstance(value, (int, list, tuple)) and (new := _smaller(name, value, factor)):
            try:
                setattr(config, name, new)
            except (AttributeError, TypeError, ValueError):
                continue


def _smaller(name: str, value: Any, factor: int) -> Any:
    if isinstance(value, (list, tuple)):
        parts = [_smaller(name, part, factor) or part for part in value]
        return type(value)(parts)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return None
    if name == "vocab_size" or name.endswith("_vocab_size") and value > VOCABULARY:
        return min(value, VOCABULARY)
    if TEXT_IDS.search(name) and value >= VOCABULARY:
        return VOCABULARY - 1 - value % 16
    if LAYERS.search(name):
        return min(value, 2)
    if WIDTHS.search(name) and not FIXED.search(name) and value >= 4 * factor:
        return value // factor if value % factor == 0 else None
    return None


def classes_of(model_type: str) -> list[str]:
    from transformers.models.auto import modeling_auto

    names: dict[str, None] = {}
    for table in HEADS:
        entry = getattr(modeling_auto, table, {}).get(model_type, ())
        names.update(dict.fromkeys((entry,) if isinstance(entry, str) else entry))
    return list(names)


def built(model_class: str, model_type: str) -> tuple[Any, Any]:
    """A small live model in float64 with random weights, and its config."""
    import torch
    import transformers

    failure: Exception | None = None
    for factor in (16, 8, 4, 1):
        config = transformers.CONFIG_MAPPING[model_type]()
        shrink(config, factor)
        try:
            with torch.device("meta"):
                sketch = getattr(transformers, model_class)(copy.deepcopy(config))
            if sum(p.numel() for p in sketch.parameters()) > 2e8:
                continue
            torch.manual_seed(0)
            model = getattr(transformers, model_class)(copy.deepcopy(config)).eval()
        except Exception as error:  # a config can be wrong in as many ways as there are models
            failure = failure or error
            continue
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    spread = 0.3 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
                    start = 1.0 if parameter.dim() < 2 else 0.3 * spread
                    parameter.copy_(start + spread * torch.randn_like(parameter))
        return model.double(), config
    raise failure or MemoryError("too large")


def compared(original: Any, folded: Any, seed: int, dtype: Any) -> float:
    import torch

    from enjoyln_cli.compare import Float64
    from enjoyln_cli.inputs import seeded
    from enjoyln_cli.trace import tensors_in

    worst = 0.0
    for batch in seeded(original, 2, seed, dtype):
        with torch.no_grad(), Float64() if dtype == torch.float64 else nullcontext():
            torch.manual_seed(seed)
            expected = [t.clone() for t in tensors_in(original(**batch))]
            torch.manual_seed(seed)
            found = tensors_in(folded(**batch))
        for a, b in zip(found, expected, strict=True):
            if not b.is_floating_point() or not b.numel():
                continue
            finite = torch.isfinite(b)
            if not torch.equal(finite, torch.isfinite(a)):
                return float("inf")
            if finite.any():
                scale = b[finite].abs().max().clamp_min(1e-30)
                worst = max(worst, float((a - b)[finite].abs().max() / scale))
    return worst


def examine(model_class: str, model_type: str) -> dict[str, Any]:
    """One class, as a row of the census."""
    import torch

    from enjoyln_cli import analyze
    from enjoyln_cli.fold import centre_parameters
    from enjoyln_cli.norms import input_means, install

    row: dict[str, Any] = {"type": model_type, "class": model_class, "status": "not built"}
    begin = time.perf_counter()
    try:
        model, config = built(model_class, model_type)
        row["status"] = "not analysed"
        plan = analyze(config, model_class=model_class).plan
        row |= {
            "norms": len(plan.norms),
            "static": sum(verdict.status == "static" for verdict in plan.norms),
            "folded": len(plan.folded),
            "ops": len(plan.ops),
            "kept": [[v.norm, v.reason, v.culprit] for v in plan.kept],
            "rms_norms": sum(count for _, count in plan.other_norms),
            "status": "not run",
        }
        if not plan.norms:
            return row | {"status": "no LayerNorm"}
        dtype = torch.float64
        try:
            compared(model, model, 0, dtype)
        except (RuntimeError, TypeError, ValueError):
            dtype, model = torch.float32, model.float()
        same = compared(model, model, 0, dtype)
        row["dtype"] = str(dtype).removeprefix("torch.")
        row["status"] = "not folded"
        folded = copy.deepcopy(model)
        centre_parameters(folded, plan)
        names = [verdict.norm for verdict in plan.folded]
        install(folded, names, plan.ops, plan.entry_inputs, plan.unproven)
        with input_means(folded) as means:
            row["error"] = max(compared(model, folded, seed, dtype) for seed in SEEDS)
        row["not_exercised"] = len(set(names) - set(means))
        row["mean"] = max(means.values(), default=0.0)
        bound = 1e-4 if dtype == torch.float32 else 1e-9
        row["status"] = "random" if same > 0 else "ok" if row["error"] <= bound else "wrong"
    except Exception as error:  # the row says what it was
        row["failure"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
    row["seconds"] = round(time.perf_counter() - begin, 1)
    return row


def child(model_type: str, memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    import torch

    torch.set_num_threads(1)
    for model_class in classes_of(model_type):
        print(json.dumps(examine(model_class, model_type)), flush=True)


def parent(model_type: str, seconds: int) -> list[dict[str, Any]]:
    """The rows of one type; what a process that was stopped had not said counts as stopped."""
    command = [sys.executable, __file__, "--child", model_type]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        output, stopped = done.stdout, "crashed" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        output, stopped = (error.stdout or b"").decode(), "too slow"
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    said = {row["class"] for row in rows}
    left = [name for name in classes_of(model_type) if name not in said]
    rows += [{"type": model_type, "class": name, "status": stopped} for name in left if stopped]
    return rows or [{"type": model_type, "class": "", "status": "no class"}]


def summary(rows: list[dict[str, Any]]) -> str:
    """Markdown: what became of all classes, then one line for each."""
    counts = Counter(row["status"] for row in rows)
    lines = [
        "# LayerNorm architectures in transformers",
        "",
        "Written by `scripts/census.py`: shrunken configs, random weights, float64 where the code",
        "allows it. `error` is the largest difference of any output, relative to its size.",
        "",
        "; ".join(f"{status}: {count}" for status, count in counts.most_common()),
        "",
        "| type | class | LNs | in weights | folded | ops | error | status |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["type"], row["class"])):
        if row.get("norms") or row["status"] not in ("ok", "no class"):
            cells = [row.get(key, "") for key in ("norms", "static", "folded", "ops")]
            error = f"{row['error']:.0e}" if "error" in row else ""
            line = [row["type"], row["class"], *cells, error, row["status"]]
            lines.append(f"| {' | '.join(map(str, line))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Fold every model type, and compare.")
    parser.add_argument("--out", type=Path, default=Path("census.jsonl"))
    parser.add_argument("--types", help="comma-separated; all of them by default")
    parser.add_argument("--fast", action="store_true", help="about 40 types, one per mechanism")
    parser.add_argument("--again", action="store_true", help="also those in the file")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=180, help="limit for a type")
    parser.add_argument("--memory", type=float, default=6, help="limit for a process, in GB")
    parser.add_argument("--markdown", type=Path, help="write the summary of the file, run nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.child, int(args.memory * 1e9))
    rows = [json.loads(line) for line in args.out.open()] if args.out.exists() else []
    if args.markdown:
        args.markdown.write_text(summary(rows), encoding="utf-8")
        return None
    from transformers import CONFIG_MAPPING

    chosen = args.types.split(",") if args.types else FAST if args.fast else ()
    types = chosen or list(CONFIG_MAPPING)
    seen = set() if args.again else {row["type"] for row in rows}
    todo = [name for name in types if name not in seen]
    with ThreadPoolExecutor(args.jobs) as pool, args.out.open("a") as file:
        for found in pool.map(lambda name: parent(name, args.seconds), todo):
            for row in found:
                print(json.dumps(row), file=file, flush=True)
    return None


if __name__ == "__main__":
    main()
