"""Writes the rows of a census as Markdown: totals, why LayerNorms stay, a line for each class."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

INTRODUCTION = """\
Written by `scripts/census.py` with torch {torch} and transformers {transformers}. It examines every
model type of the auto mappings with its usual heads, from a shrunken config, with random weights
(random γ, β and biases, weights with non-zero means). The error is the largest difference of any
returned tensor, relative to its largest element, over three seeded inputs and every call of the
proof (prefill and decoding with the cache, optional inputs); in float64 unless marked. The rows
come from several runs of the script; the row of each class is from the latest run that examined it.
"""
LEGEND = """\
Of the *LNs*, those *in weights* become RMSNorm in the weights alone, those *with ops* with an added
mean subtraction. *kept* counts the others by reason: **m** the output of a LayerNorm with
weights, **r** a weight that is also read by another op, **n** not exercised by these inputs, **o**
others.
"""


NEVER_RUN = {
    "blip": "the text model of `BlipModel` is never given what its cross attention reads",
    "csm": "the codec is run by `generate`, and to make labels of sound",
    "kyutai_speech_to_text": "the codec is run by `generate`, before `forward`",
    "lw_detr": "all of `enc_output_norm` but the first are for training",
    "nemo_speechlm": "`word_timestamp_encoder` is run by a method of its own, not by `forward`",
    "rf_detr": "all of `enc_output_norm` but the first are for training",
    "seamless_m4t": "`t2u_model` and `vocoder` are run by `generate`, not by `forward`",
    "seamless_m4t_v2": "`t2u_model` and `vocoder` are run by `generate`, not by `forward`",
    "vits": "`post_flows` run in training, and inference leaves out the second of `flows`",
}
"""LayerNorms that no inference call of the class runs, according to the modelling code."""

MISSING = {
    "xclip": "a token is concatenated with the others, and cut off again before its mean is read",
}
"""The rule that would fold norms kept without an observer, according to the modelling code."""

OBSTACLES = {
    "could not be traced": (
        ("_forward_unimplemented", "has no `forward`"),
        ("Cannot cast tensor(", "an activation decides which way it goes"),
        ("writes what has no values into what has", "an activation decides which way it goes"),
    ),
    "": (
        ("requires the ", "needs a library that is not here"),
        ("takes inference_session", "takes a session, which is an object"),
        ("has no attribute", "has no class"),
    ),
}
"""From parts of the error of a class that could not be examined to the meaning."""
UNDECIDED = "an activation decides which way it goes"


def _obstacle(row: dict[str, Any]) -> str:
    why = row.get("failure", "")
    for context, meanings in OBSTACLES.items():
        for part, meaning in meanings if context in why else ():
            if part in why and (part != "has no attribute" or "module transformers" in why):
                return meaning
    return str(row["status"])


def summary(rows: list[dict[str, Any]]) -> str:
    """The Markdown page: the results of all types, why norms stay, and one line for each class."""
    import torch
    import transformers

    modes = ("options", "rotate")
    latest = {(row["type"], row["class"], *(m in row for m in modes)): row for row in rows}
    rows = [row for row in latest.values() if not any(mode in row for mode in modes)]
    optional = [row for row in latest.values() if "options" in row]
    rotated = [row for row in latest.values() if "rotate" in row]
    with_norms = [row for row in rows if row["status"] not in ("no class", "no LayerNorm")]
    done = [row for row in with_norms if "audit" in row]
    lines = [
        "# LayerNorm architectures in transformers",
        "",
        INTRODUCTION.format(torch=torch.__version__, transformers=transformers.__version__),
        *_totals(rows, with_norms, done),
        *_reasons(done),
        *_answers(done),
        *(_with_options(optional, done) if optional else []),
        "## Every class",
        "",
        LEGEND,
        "| type | class | LNs | in weights | with ops | ops | kept | error | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(done, key=lambda row: (row["type"], row["class"])):
        kinds = Counter(_kind(reason) for _, reason, _ in row["kept"])
        single = " (float32)" if row["dtype"] == "float32" else ""
        if "own_rounding" in row:
            single += f" (by rounding its weights: {row['own_rounding']:.0e})"
        cells = [
            row["type"], row["class"] + ("*" if row["by_example"] else ""), row["norms"],
            row["in_weights"], row["folded"] - row["in_weights"], row["ops"],
            " ".join(f"{count}{kind}" for kind, count in sorted(kinds.items())),
            f"{row['error']:.0e}{single}", row["seconds"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "\\* shapes depend on values, so that the graph was recorded on example inputs.",
        "",
    ]
    lines += [
        "## What could not be examined",
        "",
        "| type | class | what | why |",
        "|---|---|---|---|",
    ]
    for row in sorted(with_norms, key=lambda row: (_obstacle(row), row["type"], row["class"])):
        if "audit" not in row:
            why = row.get("failure", "").replace("|", "/").replace("\n", " ")[:110]
            lines.append(f"| {row['type']} | {row['class']} | {_obstacle(row)} | {why} |")
    lines += _rotated(rotated) if rotated else []
    return "\n".join(lines) + "\n"


def _kind(reason: str) -> str:
    if reason.startswith("the output of a LayerNorm with weights"):
        return "m"
    if "is also read by" in reason:
        return "r"
    return "n" if reason == "no traced call runs it" else "o"


def _totals(
    rows: list[dict[str, Any]], with_norms: list[dict[str, Any]], done: list[dict[str, Any]]
) -> list[str]:
    import transformers

    def types(some: list[dict[str, Any]]) -> int:
        return len({row["type"] for row in some})

    runnable = [
        row
        for row in with_norms
        if row["status"] not in ("not built", "no inputs") or _obstacle(row) == UNDECIDED
    ]
    analysed = [r for r in runnable if "norms" in r]
    wrong = [row for row in done if row["status"] == "wrong"]
    cancelling = [row["class"] for row in done if "own_rounding" in row]
    exact = [r["error"] for r in done if r["dtype"] == "float64" and "own_rounding" not in r]
    single = [row["error"] for row in done if row["dtype"] == "float32"]
    norms, weights, folded = (
        sum(row[k] for row in done) for k in ("norms", "in_weights", "folded")
    )
    left = len(set(transformers.CONFIG_MAPPING) - {row["type"] for row in rows})
    return [
        f"* {types(rows)} model types; {types(with_norms)} have a LayerNorm or are not built here.",
        *([f"* {left} types have not been examined yet."] if left else []),
        f"* {types(runnable)} types can be built and given inputs; {types(analysed)} of them are "
        f"analysed, {types(done)} folded and compared ({len(done)} classes).",
        f"* {norms} LayerNorms: {weights} become RMSNorm in the weights alone, "
        f"{folded - weights} with an added mean subtraction, {norms - folded} stay.",
        f"* Wrong folds: {len(wrong)}. Largest error in float64 {max(exact, default=0):.0e} "
        f"({len(exact)} classes), in float32 {max(single, default=0):.0e} ({len(single)}).",
        *(
            f"* {name} returns a tensor that cancels almost to nothing: changing each weight by "
            "its last bit changes it as much as folding does."
            for name in cancelling
        ),
        "",
    ]


def _reasons(done: list[dict[str, Any]]) -> list[str]:
    lines = ["## Why LayerNorms stay", "", "| reason | LNs | types |", "|---|---|---|"]
    reasons = types_by((reason, row["type"]) for row in done for _, reason, _ in row["kept"])
    for reason, types in sorted(reasons.items(), key=lambda item: -len(set(item[1]))):
        lines.append(f"| {reason} | {len(types)} | {len(set(types))} |")
    return [*lines, ""]


def types_by(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """From each text to the types of the LayerNorms that it is about; the most LayerNorms first."""
    found: dict[str, list[str]] = {}
    for text, model_type in pairs:
        found.setdefault(text, []).append(model_type)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


KINDS = {"residual": "streams", "values": "values of attention", "heads": "heads"}
"""The kinds of groups: residual streams, values of attentions, heads with norms of their own."""


def _rotated(rows: list[dict[str, Any]]) -> list[str]:
    """What is rotated in each class that was rotated, and why the other rotation groups stay."""
    import torch
    import transformers

    done = [row for row in rows if "error" in row]
    seen = [row for row in rows if "rotated" in row]
    wrong = [row for row in done if row["status"] == "wrong"]
    right = [row for row in done if row["status"] != "wrong"]
    near = [row for row in right if "own_rounding" in row]
    exact, single = (
        [row["error"] for row in right if row["dtype"] == dtype and "own_rounding" not in row]
        for dtype in ("float64", "float32")
    )
    rotations = Counter(kind for row in seen for kind in row["rotated"])
    stays = Counter(kind for row in seen for kind, *_ in row["not_rotated"])
    counts = ", ".join(
        f"{rotations[kind]} of {rotations[kind] + stays[kind]} {many}"
        for kind, many in KINDS.items()
    )
    types = set(transformers.CONFIG_MAPPING)
    left = len(types - {row["type"] for row in rows})
    missing = [row for row in rows if "rotated" not in row and row["status"] != "no class"]
    obstacles = Counter(_obstacle(row) for row in missing)
    lines = [
        "",
        "## Rotated",
        "",
        f"{len(seen)} classes ({len({row['type'] for row in seen})} types) under "
        "`enjoyln rotate --untie`, without `--untie` where a class cannot untie. The rotated model "
        "runs in its own class, with random weights, on three seeded inputs and the optional "
        "inputs of the proof that do not rotate. The error is measured as above. Written "
        f"with torch {torch.__version__} and transformers {transformers.__version__}.",
        "",
        *([f"* {left} of {len(types)} model types were not run yet."] if left else []),
        f"* Rotation groups that are rotated: {counts}. "
        "[`rotate`](commands/rotate.md#what-is-rotated) says what the three kinds are. What a norm "
        "reads as a whole counts as a stream, also inside of a layer (behind a gate, for example).",
        f"* {len(done)} classes rotate something and were compared. Wrong rotations: {len(wrong)}. "
        f"Largest error in float64 {max(exact, default=0):.0e} ({len(exact)} classes), in float32 "
        f"{max(single, default=0):.0e} ({len(single)}).",
        *(
            f"* `{row['class']}` nearly cancels an output: the error is {row['error']:.0e}, and "
            f"rounding its weights once costs it {row['own_rounding']:.0e}."
            for row in near
        ),
        f"* {len(seen) - len(done)} classes rotate nothing, or could not be compared. "
        f"{len(missing)} classes could not be examined ("
        + "; ".join(f"{count}: {what}" for what, count in obstacles.most_common())
        + ").",
        "",
        "| why a rotation group stays | streams | values | heads | types |",
        "|---|---|---|---|---|",
    ]
    reasons: dict[str, list[tuple[str, str]]] = {}
    for row in seen:
        for kind, reason, _ in row["not_rotated"]:
            short = re.sub(r" from \(.*?\) to \(.*?\)", "", reason)
            reasons.setdefault(short, []).append((kind, row["type"]))
    for reason, found in sorted(reasons.items(), key=lambda item: -len(item[1])):
        kinds = Counter(kind for kind, _ in found)
        cells = [reason, *(kinds[kind] or "" for kind in KINDS), len({name for _, name in found})]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "What is rotated in each class, as a number of all rotation groups of the kind:",
        "",
        "| type | class | streams | values | heads | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(seen, key=lambda row: (row["type"], row["class"])):
        rotated, kept = Counter(row["rotated"]), Counter(kind for kind, *_ in row["not_rotated"])
        every = rotated + kept
        cells = [f"{rotated[k]}/{every[k]}" if every[k] else "" for k in KINDS]
        error = f"{row['error']:.0e}" if "error" in row else ""
        lines.append(f"| {row['type']} | {row['class']} | {' | '.join(cells)} | {error} |")
    return lines


def _with_options(optional: list[dict[str, Any]], plain: list[dict[str, Any]]) -> list[str]:
    """The results of the classes that were examined again with every option."""
    done = [row for row in optional if "audit" in row]
    before = {row["class"]: row["folded"] for row in plain}
    both = [row for row in done if row["class"] in before]
    counts = {k: sum(row[k] for row in both) for k in ("norms", "folded", "fused", "widened")}
    tied = [row for row in optional if "without untying" in row.get("failure", "")]
    wrong = [row for row in done if row["status"] == "wrong"]
    exact = [row["error"] for row in done if row["dtype"] == "float64" and row not in wrong]
    answers = Counter(answer for row in done for answer in row["audit"].values())
    return [
        "## With every option",
        "",
        f"{len(both)} of these classes ({len({row['type'] for row in both})} types) once more, "
        "with `--widen-mlp`, `--untie` and `--merge affine` together:",
        "",
        f"* Of {counts['norms']} LayerNorms {counts['folded']} fold, without options "
        f"{sum(before[row['class']] for row in both)}; {counts['widened']} MLPs are widened, "
        f"{counts['fused']} norms fused into the layers that read them.",
        f"* Wrong folds: {len(wrong)}. Largest error in float64 {max(exact, default=0):.0e}.",
        "* The reasons of the norms that still stay: "
        + ", ".join(f"{count} {answer}" for answer, count in answers.most_common())
        + ".",
        *([f"* {len(tied)} classes cannot be untied, and say why."] if tied else []),
        "",
    ]


def _answers(done: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## The reasons put to the test",
        "",
        "If the reason is that a shift of a weight would be noticed, the weight was shifted, and",
        "an output has to change. *unseen*: no output changed; *true of another source*: only the",
        "shift of another source of the same mean was noticed. If the reason is that an op does",
        "not keep a zero mean, the op was run on random numbers, and must not commute with",
        "centring, whichever operands are centred. *missing rule*: it does. If a LayerNorm is in",
        "no graph but runs, its weights were changed. *it runs, and no output depends on it*: no",
        "output changed.",
        "",
        "| answer | LNs | types |",
        "|---|---|---|",
    ]
    answers = [(answer, row["type"]) for row in done for answer in row["audit"].values()]
    for answer, types in types_by(answers).items():
        names = sorted(set(types))
        shown = ", ".join(names) if len(names) <= 6 else len(names)
        lines.append(f"| {answer} | {len(types)} | {shown} |")
    idle = {row["type"] for row in done if "not exercised" in row["audit"].values()}
    others = ", ".join(sorted(idle - NEVER_RUN.keys()))
    return [
        *lines,
        "",
        "No call can exercise some of the LayerNorms that are *not exercised*:",
        "",
        *(f"* {name}: {why}." for name, why in NEVER_RUN.items() if name in idle),
        "",
        *([f"No inputs that exercise them are made up for {others}.", ""] if others else []),
        *_missing_rules(done),
    ]


def _missing_rules(done: list[dict[str, Any]]) -> list[str]:
    """The missing rules, with the LayerNorms and types that each would convert."""
    missing = (
        (MISSING.get(row["type"], answer), row["type"])
        for row in done
        for answer in row["audit"].values()
        if answer.startswith(("unseen", "missing rule", "its memory is written"))
    )
    lines = [
        f"* {rule}: {len(types)} LayerNorms, of {', '.join(sorted(set(types)))}."
        for rule, types in types_by(missing).items()
    ]
    return ["Rules that are missing:", "", *(lines or ["* No missing rule is known."]), ""]
