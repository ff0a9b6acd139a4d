"""Every model type of transformers: how many of its LayerNorms fold, and is the result the same?

    python scripts/census.py --out census.jsonl            every type that is not in the file yet
    python scripts/census.py --out census.jsonl --types gpt2,whisper --again
    python scripts/census.py --out census.jsonl --fast      one type for each mechanism
    python scripts/census.py --out census.jsonl --options   with all options of a fold
    python scripts/census.py --out census.jsonl --rotate    rotated, not folded
    python scripts/census.py --out census.jsonl --markdown docs/architectures.md

For each class of a type, the script shrinks the config, makes random weights in float64 (random γ,
β and biases, weights with non-zero means), and folds the model by the plan of ``analyze``. It
records the largest difference of any returned tensor over three inputs, relative to that tensor's
largest element. Then it writes the folded checkpoint, loads it through ``from_pretrained``, which
calls ``optimize``, and compares the loaded model as well. Every type runs in its own process, with
limits on time and memory. With ``--options`` the plan may also widen MLPs, untie, and merge. The
reasons of the norms that are still kept are audited as well, in separate rows of the same file.
With ``--rotate`` each model is rotated instead, and runs as its own class; these are separate rows,
too.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import multiprocessing
import resource
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from census_models import built
from census_runs import (
    differing,
    is_lost,
    loading,
    outputs_of,
    proof_runs,
    rounded,
    seeded_runs,
    untied,
    without_cache,
    without_outputs,
)

FORK = multiprocessing.get_context("fork")
MODES = ("options", "rotate")
"""Ways to convert besides a plain fold; rows name the one that they were made with."""
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
"""The auto mappings whose classes are examined: the base model and the usual heads."""

FAST = (
    "gpt2", "gpt_neox", "gptj", "bloom", "falcon", "mpt", "opt", "phi", "stablelm", "persimmon",
    "cohere", "olmo", "biogpt", "xglm", "bert", "albert", "electra", "deberta",
    "deberta-v2", "bart", "bigbird_pegasus", "whisper", "speech_to_text", "wav2vec2", "vit",
    "beit", "dinov2", "swin", "convnext", "segformer", "clip", "blip", "layoutlm", "videomae",
    "audio-spectrogram-transformer", "canine", "mobilevit", "phimoe",
)  # fmt: skip
"""One type for each way in which a model combines norms, writers and observers."""


def classes_of(model_type: str) -> list[str]:
    from transformers.models.auto import modeling_auto

    names: dict[str, None] = {}
    for table in HEADS:
        entry = getattr(modeling_auto, table, {}).get(model_type, ())
        names.update(dict.fromkeys((entry,) if isinstance(entry, str) else entry))
    return list(names)


def examine(model_class: str, model_type: str, mode: str = "") -> dict[str, Any]:
    """One class, as a row of the census; ``mode`` is empty or one of ``MODES``."""
    import torch
    from audit import audited

    from enjoyln_cli.analysis.analyze import analyze_config
    from enjoyln_cli.errors import UnsupportedModel
    from enjoyln_cli.plan.fold_options import Options
    from enjoyln_cli.runtime.call_guards import input_means
    from enjoyln_cli.runtime.install import fold_in_memory

    options = Options()
    if mode == "options":
        options = Options(widen_mlp=True, untie=True, merge="affine")
    elif mode == "rotate":
        options = Options(fold=False, rotate=True, untie=True)
    row: dict[str, Any] = {"type": model_type, "class": model_class, "status": "not built"}
    begin = time.perf_counter()
    try:
        model, config, accepted = built(model_class, model_type)
        row["status"] = "not analysed" if accepted else "no inputs"
        if mode == "rotate":
            without_cache(model)
        try:
            analysis = analyze_config(config, model_class=model_class, options=options)
        except UnsupportedModel:  # some classes cannot untie
            if not options.untie:
                raise
            analysis = analyze_config(
                config, model_class=model_class, options=replace(options, untie=False)
            )
        plan = analysis.plan
        row |= {
            "norms": len(plan.norms),
            "in_weights": sum(verdict.status == "in_weights" for verdict in plan.norms),
            "folded": len(plan.folded),
            "ops": len(plan.subtractions),
            "kept": [[v.norm, v.reason, v.culprit] for v in plan.kept],
            "rms_norms": sum(count for _, count in plan.other_norms),
            "by_example": any(t.by_values for t in analysis.problem.flow.traces),
            "seconds_of_analysis": round(time.perf_counter() - begin, 1),
            "widened": len(plan.widened),
            "untied": len(plan.untied),
            "fused": len(plan.fused),
            "rotated": [group.kind for group in plan.rotated],
            "changed": sorted({field for group in plan.rotated for field in group.outputs}),
            "not_rotated": [
                [b.kind, b.reason, b.culprit] for b in plan.rotation_groups if not b.is_rotated
            ],
            "status": "not run",
        }
        if mode == "rotate" and not plan.rotated:
            return row | {"status": "nothing rotates"}
        if mode != "rotate" and not plan.norms:
            return row | {"status": "no LayerNorm"}
        if row["changed"]:
            without_outputs(model, row["changed"])
        dtype = torch.float64
        try:
            expected = seeded_runs(model, dtype)
            if is_lost(expected.values()):
                raise ValueError("float64 overflows where its code makes masks in float32")
        except (RuntimeError, TypeError, UnsupportedModel, ValueError):
            dtype, model = torch.float32, model.float()
            expected = seeded_runs(model, dtype)
        first, *_ = seeds = list(expected)
        omitted = {name for group in plan.rotated for name in group.inputs} | {*plan.unproven}
        for run in proof_runs(model, dtype, omitted if mode == "rotate" else None):
            with suppress(Exception):  # not every model takes every optional input
                expected[run] = outputs_of(run, model, dtype)
        if is_lost(expected.values()):
            raise ArithmeticError("the original gives NaN, so nothing can be compared")
        same = differing(outputs_of(first, model, dtype), expected[first])
        row["dtype"] = str(dtype).removeprefix("torch.")
        row["status"] = "not folded"
        folded = copy.deepcopy(model)
        fold_in_memory(folded, plan)
        names = [verdict.norm for verdict in plan.folded]
        with input_means(folded) as means:
            apart = [differing(outputs_of(run, folded, dtype), expected[run]) for run in expected]
        row["error"] = max(apart)
        row["calls"] = len(expected) - len(seeds)
        row["not_exercised"] = len(set(names) - set(means))
        row["mean"] = max(means.values(), default=0.0)
        bound = 1e-4 if dtype == torch.float32 else 1e-9
        if row["error"] > bound:  # rounding alone may move an output that nearly cancels as far
            near = rounded(model)
            found = [differing(outputs_of(run, near, dtype), expected[run]) for run in expected]
            row["own_rounding"] = max(found)
            bound = 10 * row["own_rounding"]
        row["status"] = "random" if same > 0 else "ok" if row["error"] <= bound else "wrong"
        if names:
            row |= loading(model, plan, expected, dtype, bound)
        shown = [first, *(run for run in expected if run not in seeds)]
        if mode == "rotate":
            row["seconds"] = round(time.perf_counter() - begin, 1)
            return row
        audit_on = untied(model, plan) if plan.untied else model
        runs = [(partial(outputs_of, run, audit_on, dtype), expected[run]) for run in shown]
        row["audit"] = audited(analysis, audit_on, runs)
    except Exception as error:  # the row records it
        row["failure"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
    row["seconds"] = round(time.perf_counter() - begin, 1)
    return row


def child(model_type: str, memory: int, mode: str, connection: Any) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    for model_class in classes_of(model_type):
        connection.send(examine(model_class, model_type, mode))
    connection.close()


FORKING = threading.Lock()
"""Held while a process is started, so that no other process inherits its end of the pipe."""


def rows_of(model_type: str, seconds: int, memory: int, mode: str = "") -> list[dict[str, Any]]:
    """A row for each class of a type, examined in a process of its own.

    If the process is stopped, each class that is missing has a row that says why.
    """
    names = classes_of(model_type)
    if not names:
        return [{"type": model_type, "class": "", "status": "no class"}]
    rows: list[dict[str, Any]] = []
    end, stopped = time.monotonic() + seconds, ""
    with FORKING:
        receiving, sending = FORK.Pipe(duplex=False)
        process = FORK.Process(target=child, args=(model_type, memory, mode, sending))
        process.start()
        sending.close()
    with suppress(EOFError):
        while receiving.poll(max(0.0, end - time.monotonic())):
            rows.append(receiving.recv())
        process.kill()
        stopped = "too slow"
    process.join()
    stopped = stopped or ("crashed" if process.exitcode else "")
    left = names[len(rows) :] if stopped else []
    return rows + [{"type": model_type, "class": name, "status": stopped} for name in left]


def census_of(
    types: list[str], jobs: int, seconds: int, memory: int, mode: str = ""
) -> Iterator[dict[str, Any]]:
    """The rows of all types, from ``jobs`` processes at a time.

    The processes are forks of this process, which has already imported what they need.
    """
    import torch
    import transformers

    from enjoyln_cli.analysis import analyze  # noqa: F401
    from enjoyln_cli.runtime import install  # noqa: F401

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    transformers.logging.disable_progress_bar()
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(rows_of, name, seconds, memory, mode) for name in types]
        for finished in as_completed(waiting):
            yield from finished.result()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fold every model type, and compare.")
    parser.add_argument("--out", type=Path, default=Path("census.jsonl"))
    parser.add_argument("--types", help="comma-separated types (default: all)")
    parser.add_argument("--fast", action="store_true", help="about 40 types, one per mechanism")
    parser.add_argument("--options", action="store_true", help="widen MLPs, untie, and merge")
    parser.add_argument("--rotate", action="store_true", help="rotate instead of folding")
    parser.add_argument("--again", action="store_true", help="examine types in the file again")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=180, help="time limit for a type")
    parser.add_argument("--memory", type=float, default=6, help="memory limit for a process, in GB")
    parser.add_argument("--markdown", type=Path, help="write a summary of the file; run nothing")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.out.open()] if args.out.exists() else []
    if args.markdown:
        from census_tables import summary

        args.markdown.write_text(summary(rows), encoding="utf-8")
        return
    from transformers import CONFIG_MAPPING

    chosen = args.types.split(",") if args.types else FAST if args.fast else ()
    types = chosen or list(CONFIG_MAPPING)
    mode = "options" if args.options else "rotate" if args.rotate else ""
    asked = {mode: True} if mode else {}
    same = [row for row in rows if {name for name in MODES if name in row} == set(asked)]
    seen = set() if args.again else {row["type"] for row in same}
    todo = [name for name in types if name not in seen]
    begin = time.perf_counter()
    with args.out.open("a") as file:
        memory = int(args.memory * 1e9)
        for row in census_of(todo, args.jobs, args.seconds, memory, mode):
            print(json.dumps(row | asked), file=file, flush=True)
    used, minutes = resource.getrusage(resource.RUSAGE_CHILDREN), (time.perf_counter() - begin) / 60
    busy = (used.ru_utime + used.ru_stime) / 60
    print(
        f"{len(todo)} types in {minutes:.0f} minutes, {busy:.0f} minutes of one core; the largest "
        f"process took {used.ru_maxrss / 1e6:.1f} GB"
    )


if __name__ == "__main__":
    main()
