"""The section of docs/training.md that ``paper_training.py`` writes, from its results alone."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paper_tables import table
from training_equivalence import CENTRED_DROPOUT, ROUNDING
from training_plots import PICTURES
from training_runs import CBWC, LAYER_NORM, RMS_NORM
from training_tasks import PACKAGES
from training_times import CENTRED_EACH_STEP, CENTRED_LATER, NORM, PARAMETRISATION, RMS

from enjoyln_cli.clock import duration
from enjoyln_cli.text import counted

COLUMNS = 110
AFTER_EQUALITY = """\
In float32, a ReLU whose input is as close to zero as rounding is passes a gradient in one run and
not in the other. From there the runs drift apart, as LayerNorm drifts apart from itself. GELU has
no such kink. With AdamW, what is left are a few weights whose gradient in the first step is as
small as its eps of 1e-8, and so mostly rounding: Adam divides by it. With L2 in the gradient, Adam
amplifies rounding late in training with GELU too; LayerNorm drifts as far from itself."""
CHANCE = 0.1
"""The accuracy of guessing digits."""
SIGNS = "A difference whose sign is not the same for all seeds may be chance."
Found = Mapping[str, Any]


def page(experiments: Found) -> str:
    """Everything that was measured."""
    parts = ["## What was measured", _how(experiments)]
    for name, write in SECTIONS.items():
        if name in experiments:
            parts.append(write(experiments[name]["results"]))
            if name in PICTURES:
                parts.append(f"![{ALT[name]}](pictures/training_{name}.svg)")
    blocks = "\n\n".join(part.strip() for part in parts).split("\n\n")
    return "\n\n".join(_wrap(block.strip("\n")) for block in blocks) + "\n"


def _wrap(block: str) -> str:
    """A paragraph or a list in lines of ``COLUMNS``; tables, headings and code as they are."""
    lines = block.splitlines()
    if lines[0][:1] in "|#!`":
        rest = next((n for n, line in enumerate(lines) if line[:1].isalpha()), len(lines))
        if lines[0][0] != "|" or rest == len(lines):
            return block
        return "\n".join(lines[:rest]) + "\n\n" + _wrap("\n".join(lines[rest:]))
    items: list[str] = []
    for line in lines:
        if line.startswith("* ") or not items:
            items.append(line)
        else:
            items[-1] += " " + line.strip()
    indents = ["  " if item.startswith("* ") else "" for item in items]
    return "\n".join(
        textwrap.fill(item, COLUMNS, subsequent_indent=indent, break_long_words=False,
                      break_on_hyphens=False)
        for item, indent in zip(items, indents, strict=True)
    )  # fmt: skip


def _how(experiments: Found) -> str:
    runs = [found["run"] for found in experiments.values()]
    if not runs:
        return "Nothing yet."
    days = _distinct(run["date"] for run in runs)
    machines = _distinct(f"{run['hardware']} of {run['cores']}" for run in runs)
    versions = _distinct(
        ", ".join(f"{name} {number}" for name, number in run["versions"].items()) for run in runs
    )
    loads = [run["load"] for run in runs]
    taken = duration(sum(run["seconds"] for run in runs))
    processor = duration(sum(run["processor_seconds"] for run in runs))
    return f"""\
The experiments of the paper *Enjoy Your Layer Normalization*, repeated in small:

```sh
pip install scikit-learn matplotlib
OMP_NUM_THREADS=1 python scripts/paper_training.py --write-docs
```

* Run on {days}: {processor} of processor time ({taken} in all, at a load average of {min(loads)} to
  {max(loads)}, which counts other programs too). {machines} cores; {versions}.
* Seeds are fixed, but another release of Python has other texts, and another machine rounds
  differently.
* `W` is a weight as the optimizer has it. "Rounding" compares LayerNorm with itself: the rows of
  each batch are in reverse order, which changes nothing but the order in which sums are rounded.
* ± is one standard deviation over the seeds.
* All numbers are in [paper_training.json](paper_training.json)."""


def _distinct(values: Any) -> str:
    return "; ".join(dict.fromkeys(values))


def _equality(found: Found) -> str:
    body = []
    compared = (CBWC, ROUNDING)
    outside: Counter[tuple[str, str]] = Counter()
    for row in found["rows"]:
        furthest = {name: max(row["weights"][name]) for name in compared}
        for name in compared:
            beyond = max(furthest[name], row["loss"][name]) > row["bound"]
            outside[name, row["dtype"]] += beyond
        weights = [_small(furthest[name]) + _share(row["beyond"][name]) for name in compared]
        losses = [_small(row["loss"][name]) for name in compared]
        body.append((
            f"{row['optimizer']}, {row['activation']}, {row['dtype']}", *weights, *losses,
            f"{row['first_loss']:.2f} to {_small(row['last_loss'])}",
            f"{100 * row['accuracy']:.1f} %",
        ))  # fmt: skip
    head = ("method", "weights: CBWC", "rounding", "losses: CBWC", "rounding", "training loss",
            "held-out accuracy")  # fmt: skip
    counts = Counter(row["dtype"] for row in found["rows"])
    return f"""\
### Proposition 2: the same weights and losses

An MLP with {found["depth"]} linear layers of width {found["width"]} learns scikit-learn's digits
for {found["epochs"]} epochs ({found["steps"]} steps), once with LayerNorm and once with CBWC. The
table has the largest difference of any element of any `W` after any epoch, and of the loss in any
step. Our bound in float64 was 1e-11: of {counts["float64"]} runs, CBWC was outside of it in
{outside[CBWC, "float64"]}, and LayerNorm against itself in {outside[ROUNDING, "float64"]}. The
paper's bound is 1e-5: of {counts["float32"]} runs in float32, CBWC was outside of it in
{outside[CBWC, "float32"]}, and LayerNorm against itself in {outside[ROUNDING, "float32"]}. In
brackets: which share of all weights is outside at the end.

{table(head, body)}
{AFTER_EQUALITY}"""


def _transformer(found: Found) -> str:
    body = [
        (f"{case}: {'rounding' if name == ROUNDING else name}", _small(max(distances)),
         f"{one['curves'][name][-1]:.4f}")
        for case, one in found["cases"].items()
        for name, distances in one["distances"].items()
        if name != LAYER_NORM
    ]  # fmt: skip
    return f"""\
### A transformer: equal without dropout, and with dropout if the mean is subtracted behind it

A pre-LN language model (`GPT2LMHeadModel`) is trained on Python's own source for
{found["steps"]} steps in float64 ({found["method"]}). The table has the largest difference from
LayerNorm's loss in any step, with the same dropout masks. `{CENTRED_DROPOUT}` is
`reparametrize(model, dropout="centre")`.

{table(("run", "largest difference", "loss of the last step"), body)}"""


def _dropout(found: Found) -> str:
    parts = []
    for task, runs in found.items():
        key = "accuracy" if task == "classification" else "loss"
        unit, digits = (100, 1) if key == "accuracy" else (1, 3)
        parts.append((f"**{task}, {counted(len(_first(runs)['train']), 'seed')}**", "", "", ""))
        for name, one in runs["variants"].items():
            tested = [unit * curve[-1][key] for curve in one["test"]]
            parts.append((
                name, _spread([curve[-1] for curve in one["train"]], 3), _spread(tested, digits),
                _paired(runs, name, key, unit, digits),
            ))  # fmt: skip
    runs = _first_value(found)
    steps, every = runs["steps"], runs["every"]
    guess = 1.1 / len(PACKAGES)
    stuck = {
        name: sum(curve[-1]["accuracy"] < guess for curve in one["test"])
        for name, one in found["classification"]["variants"].items()
    }
    counts = ", ".join(f"{count} with {name}" for name, count in stuck.items())
    head = ("norms", f"training loss, last {every} steps", "held out", "minus LayerNorm's")
    return f"""\
### With dropout: figures 6 and 7 of the paper

With dropout of 0.1 in front of the norms, CBWC as the paper uses it (`approximate=True`) is no
longer LayerNorm. The same transformer is trained in float32 for {steps} steps as a language model
(held out: loss). One of half its depth learns to tell which of the packages {", ".join(PACKAGES)}
of Python a piece of source is from (held out: accuracy in %). The last column is the difference
from LayerNorm with the same seed, and for how many seeds it is below zero.
{SIGNS} The paper reports RMSNorm well behind LayerNorm, and CBWC level with LayerNorm or
between the two, after much longer training of other models.

{table(head, parts)}
Classifications that did not get beyond guessing ({100 / len(PACKAGES):.0f} %): {counts}."""


def _fine_tuning(found: Found) -> str:
    body = []
    for name, one in found["variants"].items():
        losses = [curve[-1]["loss"] for curve in one["test"]]
        body.append((
            name, _spread([start["loss"] for start in one["start"]], 3), _spread(losses, 4),
            _spread([math.exp(loss) for loss in losses], 3), _paired(found, name, "loss", 1, 4),
        ))  # fmt: skip
    head = ("norms", "held-out loss before", "held-out loss", "perplexity", "minus LayerNorm's")
    return f"""\
### Fine-tuning: Table 2 of the paper

The small trained GPT-2 of this repository, which knows source code, learns Python's language
reference in {found["steps"]} steps with dropout of 0.1 ({found["method"]}), with
{counted(len(_first(found)["train"]), "seed")}: in LayerNorm, with CBWC (`approximate=True`), and in
RMSNorm after its weights were centred once.

{table(head, body)}
{SIGNS} The paper reports test losses of 0.2553 (LayerNorm), 0.2526 (RMSNorm) and 0.2430 (CBWC), and
no spread."""


def _norms(found: Found) -> str:
    body = []
    smaller, chance = 0, []
    for depth, runs in found["depths"].items():
        ranges = {}
        for name, one in runs.items():
            curves = one["last_layer"]
            ranges[name] = [max(curve) - min(curve) for curve in curves]
            body.append((
                f"{depth} layers, {name}", _spread([curve[0] for curve in curves], 2),
                _spread([curve[-1] for curve in curves], 2), _spread(ranges[name], 2),
                _spread([100 * value for value in one["accuracy"]], 1),
            ))  # fmt: skip
        smaller += max(ranges[LAYER_NORM]) < min(ranges[RMS_NORM])
        if max(max(one["accuracy"]) for one in runs.values()) < 2 * CHANCE:
            chance.append(depth)
    head = ("MLP", "before training", "after", "largest minus smallest", "held-out accuracy, %")
    seeds = len(_first_value(found["depths"])[LAYER_NORM]["last_layer"])
    unlearned = f"With {' and '.join(chance)} layers neither learns in so few epochs." * bool(
        chance
    )
    return f"""\
### Norms of the last layer's input: section 5.1 of the paper

MLPs of width {found["width"]} learn the digits for {found["epochs"]} epochs by SGD with
momentum, with {counted(seeds, "seed")}. The table has the mean norm of what the last linear layer
reads, over the held-out digits.

{table(head, body)}
At {smaller} of {len(found["depths"])} depths the norm moves less with LayerNorm than with RMSNorm
for every seed, as the paper finds. {unlearned}"""


def _moving(found: Found) -> str:
    body = [
        (row["optimizer"], _small(row["loss"]["loaded"]),
         f"{_small(row['weights'])} (`{row['of']}`)", _small(row["loss"]["in place"]))
        for row in found["rows"]
    ]  # fmt: skip
    head = ("optimizer", "loss, loaded by name", "weights, loaded by name", "loss, in place")
    return f"""\
### A run that changes its norms in the middle

A third of {found["steps"]} steps in LayerNorm, a third with CBWC, and a third in LayerNorm again,
in float64, against LayerNorm all the way. "Loaded by name": `W` and the optimizer's state go into
a new model and a new optimizer. "In place": `reparametrize(model)`, and later `merge(model)`, with
the same optimizer all the time. The table has the largest difference in any step, and of any weight
at the end.

{table(head, body)}
`merge` drops the mean of `W`, which no norm sees. Adam sees it if L2 is added to the gradient: then
load `W` itself, or merge at the end."""


def _step_times(found: Found) -> str:
    body = []
    for tokens, one in found["cases"].items():
        for name in (LAYER_NORM, CBWC, CENTRED_LATER, CENTRED_EACH_STEP, PARAMETRISATION):
            low, middle, high = one[name]["ms"]
            body.append((f"{tokens} tokens: {name}", f"{middle:.1f} ({low:.1f} to {high:.1f})",
                         f"{one[name]['ratio']:.3f}",
                         "" if name == LAYER_NORM else _interval(one[name]["ratio_interval"]),
                         one[name]["rounds"]))  # fmt: skip
    verdicts = [
        f"{_verdict(one[CBWC]['ratio_interval'])} with {tokens} tokens"
        for tokens, one in found["cases"].items()
    ]
    head = ("one training step", "ms (quartiles)", "divided by LayerNorm's", "95 %", "rounds")
    return f"""\
### Time of a training step

A GPT-2 of {found["layers"]} layers and width {found["width"]} with AdamW, in float32, without
dropout, on one thread of this CPU, in processor time. In a round each runs once; ratios are medians
over the rounds. `{CENTRED_LATER}` is what `EnjoyLNCallback` and `keep_centred` do between two
evaluations, and `{CENTRED_EACH_STEP}` is their `every="step"`.

{table(head, body)}
By these intervals, a step with CBWC is {", ".join(verdicts)}."""


def _verdict(ends: Sequence[float] | None) -> str:
    """What the interval of a ratio to LayerNorm's time says."""
    if ends is None or ends[0] <= 1 <= ends[1]:
        return "neither faster nor slower"
    return "slower" if ends[0] > 1 else "faster"


def _break_even(found: Found) -> str:
    body = []
    widths: dict[int, Found] = {}
    for name, one in found.items():
        widths[one["width"]] = one["norm_times"]
        body.append((
            name, f"{one['folded']} of {one['norms']}", one["centrings"],
            f"{one['columns']:,}", _tokens(one["counted_tokens"]),
            f"{one['parametrisation_ms']:.1f}", _tokens(one["measured_tokens"]),
        ))  # fmt: skip
    norms = [
        (width, f"{one[NORM]:.0f}", f"{one[RMS]:.0f}", f"{one['ratio']:.2f}",
         _interval(one["ratio_interval"]))
        for width, one in sorted(widths.items())
    ]  # fmt: skip
    head = ("model", "norms converted", "added centrings", "columns centred", "tokens by count",
            "V = P W, ms a step", "tokens here")  # fmt: skip
    return f"""\
### From how many tokens on CBWC may pay off

The paper counts operations: centring `W` of `d` rows and `p` columns once per step costs `d p`, a
LayerNorm's centring `d` for each of `s b` tokens, so CBWC needs `s b > p` (section 5.3). A model
has more columns than norms; "tokens by count" is all columns divided by the norms that become
RMSNorm, less the explicit centrings. "Tokens here" divides the time of `V = P W` and its gradient
on this CPU by what RMSNorm saves per token; "no gain": RMSNorm with its gradients is not faster
than torch's LayerNorm here, so no number of tokens is enough. Plans are those without dropout.

{table(head, body)}
Nanoseconds of processor time per row for one norm and its gradients:

{table(("width", "LayerNorm", "RMSNorm", "RMSNorm / LayerNorm", "95 %"), norms)}"""


def _tokens(value: float | None) -> str:
    return "no gain" if value is None else f"{value:,.0f}"


def _small(value: float) -> str:
    """Two digits; with an exponent below a thousandth."""
    return "0" if value == 0 else f"{value:.1e}" if value < 1e-3 else f"{value:.2g}"


def _share(value: float) -> str:
    return f" ({100 * value:.2g} %)" if value else ""


def _interval(ends: Sequence[float] | None) -> str:
    return "-" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"


def _spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation."""
    apart = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ± {apart:.{digits}f}"


def _paired(runs: Found, name: str, key: str, unit: float, digits: int) -> str:
    """The differences from LayerNorm with the same seed."""
    if name == LAYER_NORM:
        return ""
    ours, theirs = (
        [unit * curve[-1][key] for curve in runs["variants"][one]["test"]]
        for one in (name, LAYER_NORM)
    )
    apart = [a - b for a, b in zip(ours, theirs, strict=True)]
    spread = _spread(apart, digits)
    below = f"{sum(value < 0 for value in apart)} of {len(apart)}"
    return f"{spread if spread.startswith('-') else f'+{spread}'} (below in {below})"


def _first(runs: Found) -> Found:
    return _first_value(runs["variants"])


def _first_value(values: Mapping[str, Any]) -> Any:
    return next(iter(values.values()))


SECTIONS: dict[str, Callable[[Found], str]] = {
    "equality": _equality,
    "transformer": _transformer,
    "dropout": _dropout,
    "fine_tuning": _fine_tuning,
    "norms": _norms,
    "moving": _moving,
    "step_times": _step_times,
    "break_even": _break_even,
}
ALT = {
    "equality": "How far weights are from LayerNorm's, by epoch",
    "transformer": "Loss curves, and how far they are from LayerNorm's",
    "dropout": "Training loss and held-out results with dropout",
    "fine_tuning": "Held-out loss while fine-tuning",
    "norms": "Input norm of the last layer by epoch, and of each layer at the end",
}
