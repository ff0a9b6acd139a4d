"""A report as lines of text: what is added or fused, and why norms stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from enjoyln_cli.calls.call_text import summary
from enjoyln_cli.plan.covered_calls import CallSignature
from enjoyln_cli.plan.mean_units import Widening
from enjoyln_cli.plan.plan import NOT_ASKED, NormFusion, Plan, RotationGroup, UnfusedNorm, Verdict
from enjoyln_cli.recipe.stock_targets import stock_targets
from enjoyln_cli.report.layer_names import compact
from enjoyln_cli.report.model_report import ModelReport, counts_of
from enjoyln_cli.text import counted, size

if TYPE_CHECKING:
    from enjoyln_cli.analysis.output_gains import OutputGain
    from enjoyln_cli.analysis.suggest import Suggestion

UNTIED = "an engine that ignores the copy gives wrong results; docs/untied_heads.md has a check"
"""Warning for a result with untied weights."""

MOST_CALLS = 3
"""Number of proven calls that are named in one line."""

Kept = Verdict | UnfusedNorm | RotationGroup
"""Something that stays as it is."""
Grouped = TypeVar("Grouped")


def grouped(items: Iterable[Grouped], key: Callable[[Grouped], Any]) -> dict[Any, list[Grouped]]:
    """The items by their key, in the order in which the keys first occur."""
    groups: dict[Any, list[Grouped]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def notes(report: ModelReport, bytes_added: int | None = None) -> list[str]:
    """The lines below the table for one model: what is added or fused, and why norms stay.

    ``bytes_added`` is how many bytes a result has more than the original, if that is known.
    """
    plan, already = report.plan, sum(many for _, many in report.plan.other_norms)
    if not plan.norms and not plan.rotation_groups and not plan.scaled:
        if already:
            return [f"{report.model}: {already} norms are RMSNorm already, no LayerNorm to convert"]
        return [f"{report.model}: no LayerNorm in this model"]
    lines = [f"{report.model} ({plan.model_class})"]
    if plan.outputs:
        lines.append(f"  only these outputs stay the same: {', '.join(plan.outputs)}")
    for op in plan.subtractions:
        where = f"{'output' if op.place == 'output' else 'input'} of {op.module}"
        lines.append(f"  mean subtraction added at the {where}: {op.reason}")
    lines += _rotated_lines(plan)
    lines += (
        f"  hold the stream of {stream.name} at 2^-{stream.shift} of its scale, for float16"
        for stream in plan.scaled
    )
    lines += _widened_lines(plan.widened)
    lines += _fused_lines(plan)
    for table, norm in plan.baked.items():
        weight = norm.weight.parameter.rpartition(".")[0]
        lines.append(f"  bake the norm {weight} into {table}, so the norm passes its rows on as is")
    for copy in plan.untied:
        same = copy.tensor == copy.stored
        of = "" if same else f", as a copy of {copy.stored}"
        lines.append(f"  store {copy.tensor} separately{of}")
    if plan.untied:
        lines.append(f"    {UNTIED}")
    if more := _added_size(plan, bytes_added):
        lines.append(f"  {more} more than the original")
    for reason, kept in grouped(plan.kept, attrgetter("reason")).items():
        if reason == NOT_ASKED:
            continue
        lines.append(
            f"  {'1 stays' if len(kept) == 1 else f'{len(kept)} stay'} LayerNorm: {reason}"
        )
        lines.append(f"    {', '.join(compact(verdict.norm for verdict in kept))}")
        lines += _because(kept)
    lines += [f"  {suggestion(one)}" for one in report.suggestions]
    lines += [_gain_line(gain, plan) for gain in report.gains]
    if plan.by_example:
        called = ", ".join(plan.by_example)
        lines.append(f"  proven on example inputs, whose values the code may read: {called}")
    only_rotated = plan.rotated and not plan.folded
    if plan.covered is not None:
        other = "may give wrong outputs" if only_rotated else "is refused"
        lines.append(_proven_calls(plan.covered.signatures, other))
    elif plan.unproven:
        inputs = [name for name in plan.unproven if "." not in name]  # not the weights they need
        unproven = ", ".join(compact(inputs or plan.unproven))
        what = "not proven for" if only_rotated else "LayerNorm is used in"
        if plan.folded and (plan.fused or plan.baked or plan.scaled):
            what = "a folded model refuses"
        lines.append(f"  {what} calls with {unproven}")
    return lines if len(lines) > 1 else []


def stock_lines(plan: Plan) -> list[str]:
    """The stock class with RMSNorm that a model can be stored as, or why there is none."""
    if plan.rotated or not plan.folded:
        return []
    known, name = stock_targets(), plan.model_class
    if why := known.none.get(name):
        return [f"fold --as cannot store {name} as another class: {why}"]
    return [
        f"fold --as {target.name} stores {name} as {target.target}, which computes RMSNorm itself"
        for target in known.targets
        if target.source == name
    ]


def _because(some: Iterable[Kept]) -> list[str]:
    """One line with what prevents the change of all; none if nothing is named."""
    culprits = compact(dict.fromkeys(kept.culprit for kept in some if kept.culprit))
    return [f"    because of {'; '.join(culprits)}"] if culprits else []


def _proven_calls(signatures: Sequence[CallSignature], other: str) -> str:
    """The proven calls in one short line; the marker and the JSON have them in full.

    ``other`` says what becomes of any other call.
    """
    shown = list(dict.fromkeys(map(summary, signatures)))
    if not shown:
        return "  no call could be proven, so the model cannot be converted"
    more = f" and {len(shown) - MOST_CALLS} more" if len(shown) > MOST_CALLS else ""
    named = "; ".join(shown[:MOST_CALLS])
    return f"  proven for calls with {named}{more}; any other call {other}"


def _rotated_lines(plan: Plan) -> list[str]:
    """What is rotated, and what is not, and why."""
    lines = [
        f"  rotate {_groups_in_words(plan.rotated, kind)}"
        for kind in ("residual", "heads", "values")
        if any(group.kind == kind for group in plan.rotated)
    ]
    if any(group.compressed for group in plan.rotated):
        lines.append("  leave out the feature that is the mean of the stream then, and zero")
    left = (group for group in plan.rotation_groups if group.reason)
    for (kind, reason), kept in grouped(left, attrgetter("kind", "reason")).items():
        lines.append(f"  not rotated: {_groups_in_words(kept, kind)}: {reason}")
        lines += _because(kept)
    if any(group.kind == "residual" for group in plan.rotated):
        fields = dict.fromkeys(name for group in plan.rotated for name in group.outputs)
        lines.append(
            f"  these outputs change: {', '.join(['hidden states', *fields])}; "
            "--outputs names what must stay the same"
        )
    if inputs := list(dict.fromkeys(name for group in plan.rotated for name in group.inputs)):
        named = " and ".join(inputs)
        lines.append(f"  {named} must come from the rotated model itself, if they are passed")
    return lines


def _groups_in_words(rotation_groups: Iterable[RotationGroup], kind: str) -> str:
    some = [group for group in rotation_groups if group.kind == kind]
    sizes = ", ".join(map(str, dict.fromkeys(group.size for group in some)))
    if kind == "values":
        return f"the values of {counted(len(some), 'attention')}, {sizes} features in each head"
    names = ", ".join(compact(group.name for group in some if group.name))
    if kind == "heads":
        return f"the heads of {names}, {sizes} features each"
    return f"{counted(len(some), 'residual stream')} of {sizes} features ({names})"


def suggestion(gain: Suggestion) -> str:
    """The line for an option that converts more norms."""
    return f"{gain.option} would convert {gain.become_rmsnorm} of {gain.layernorms}"


def _widened_lines(mlps: Sequence[Widening]) -> list[str]:
    """One line for each config attribute that gives the width of MLPs, and each change of it."""
    lines, change = [], attrgetter("attribute", "size", "to")
    for (attribute, units, to), some in grouped(mlps, change).items():
        many = counted(len(some), "MLP")
        names = ", ".join(compact(mlp.second.tensor for mlp in some if mlp.subtracts))
        text = f"  add {to - units} hidden units to {many} ({attribute} {units} becomes {to})"
        lines.append(f"{text}, which subtract the mean of the residual stream: {names}")
    return lines


def _fused_lines(plan: Plan) -> list[str]:
    """Which norms are fused into the layers after them, and why others are not."""

    def moving(fusion: NormFusion) -> str:
        return " and ".join(name for name in ("weight", "bias") if getattr(fusion, name))

    lines = []
    for parameters, some in grouped(plan.fused, moving).items():
        norms = ", ".join(compact(fusion.norm for fusion in some))
        readers = (reader.weight.tensor for fusion in some for reader in fusion.readers)
        into = ", ".join(compact(dict.fromkeys(readers)))
        lines.append(f"  fuse the {parameters} of {norms} into {into}")
    for reason, kept in grouped(plan.unfused, attrgetter("reason")).items():
        norms = ", ".join(compact(norm.norm for norm in kept))
        lines.append(f"  not fused: {norms}: {reason}")
        lines += _because(kept)
    return lines


def _added_size(plan: Plan, bytes_added: int | None) -> str:
    """How much larger a result is than the original: in bytes if known, else in parameters."""
    if bytes_added is not None:
        return size(bytes_added) if bytes_added else ""
    parameters = sum(prod(copy.shape) for copy in plan.untied)
    return f"{parameters:,} parameters" if parameters else ""


def _gain_line(gain: OutputGain, plan: Plan) -> str:
    norms = f"{gain.norms} more LayerNorm" + ("s become" if gain.norms != 1 else " becomes")
    alone = f"; for {plan.model_class} alone" if len(plan.classes) > 1 else ""
    outputs, changed = ",".join(gain.outputs), ", ".join(gain.without)
    return f"  if {changed} may change: {norms} RMSNorm (--outputs {outputs}{alone})"


def verbs(plan: Plan) -> tuple[str, str]:
    """What a fold or a rotation does with a model, and what it did."""
    if plan.folded:
        return "convert", "converted"
    return ("rotate", "rotated") if plan.rotated else ("scale", "scaled")


def counts(plan: Plan) -> str:
    """``25 of 25 LayerNorms, using 1 added mean subtraction; 49 tensors centred (...)``."""
    if verbs(plan) == ("scale", "scaled"):
        scaled = {tensor.tensor for stream in plan.scaled for tensor in stream.tensors}
        return counted(len(scaled), "tensor")
    if plan.rotated and not plan.folded:
        rotated = {edited.tensor for group in plan.rotated for edited in group.tensors}
        fused = counted(len(plan.fused), "norm")
        return f"{counted(len(rotated), 'tensor')}; {fused} fused into the layers that read them"
    many, added = counts_of(plan), len(plan.subtractions)
    norms = f"{many.become_rmsnorm} of {many.layernorms} LayerNorms"
    using = f"using {counted(added, 'added mean subtraction')}" if added else "in the weights alone"
    tensors = counted(many.tensors_centred, "tensor")
    scales = {edited.scale.tensor for edited in plan.edited_tensors if edited.scale}
    more = (
        (scales, "scale", "fused into them"),
        (plan.fused, "norm", "fused into the layers that read them"),
        (plan.widened, "MLP", "widened"),
    )
    shown = [f"{counted(len(some), noun)} {what}" for some, noun, what in more if some]
    centred = f"{tensors} centred ({many.parameters_centred:,} parameters)"
    return f"{norms}, {using}; {', '.join([centred, *shown])}"
