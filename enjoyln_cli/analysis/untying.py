"""Which parameters a model ties, and how to store them untied.

If ``tie_word_embeddings`` of a config is true, transformers ties parameters; if it is false, it
loads a tensor for each name. This module decides whether that entry, in the config or in a config
inside it, can be set to false so that the result loads untied, and under which names the copies are
stored. ``same_ops`` checks that the model computes the same otherwise. A model that ties parameters
in another way cannot be untied by a checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from enjoyln_cli.analysis import stored_names
from enjoyln_cli.analysis.stored_names import Shape, StoredClass
from enjoyln_cli.checkpoint.config import set_entry, with_entries
from enjoyln_cli.checkpoint.reader import Checkpoint
from enjoyln_cli.edits.planned_edits import edits_of
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models import classes
from enjoyln_cli.plan.plan import Plan, RotationGroup, Setting, UntiedParameter

FLAG = "tie_word_embeddings"


@dataclass(frozen=True, eq=False)
class UntiedClasses:
    """The classes that load a checkpoint, tied (``before``) and untied (``after``)."""

    before: dict[str, StoredClass]
    after: dict[str, StoredClass]
    """Both by class name, the plan's own class first."""
    untied: tuple[UntiedParameter, ...]
    """The new copies, with the names of the first class."""
    settings: tuple[Setting, ...]


def find_untied_classes(
    config: Any,
    tied: Sequence[StoredClass],
    shapes: Mapping[str, Shape],
    checkpoint: Checkpoint | None,
) -> UntiedClasses | None:
    """How to store the checkpoint of the ``tied`` classes (the plan's own first) without ties.

    Returns ``None`` if nothing is tied. Raises ``UnsupportedModel`` if parameters are tied and no
    entry of the config can untie them, or if the classes would not load the copies.
    """
    if not any(_shared(candidate.model) for candidate in tied):
        return None
    settings, models = _flags_off(config, tied, checkpoint)
    wanted = [_names(candidate, model) for candidate, model in zip(tied, models, strict=True)]
    for own_names in (False, True):
        untied = _copies(tied, wanted, own_names=own_names)
        more = {**shapes, **{copied.tensor: copied.shape for copied in untied}}
        with_copies = checkpoint and _with_copies(checkpoint, untied)
        after = [stored_names.candidate(model, more, with_copies) for model in models]
        if all(map(_loads, tied, after, wanted)):
            before = {candidate.name: candidate for candidate in tied}
            return UntiedClasses(before, {each.name: each for each in after}, untied, settings)
    raise UnsupportedModel(
        f"{tied[0].name} would not load a separate copy of {untied[0].stored} under any name, so "
        "it stays tied; fold it without --untie"
    )


def _shared(model: Any) -> list[tuple[str, ...]]:
    """The names of each parameter that has several."""
    together: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        together.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in together.values() if len(names) > 1]


def _flags_off(
    config: Any, tied: Sequence[StoredClass], checkpoint: Checkpoint | None
) -> tuple[tuple[Setting, ...], list[Any]]:
    """The fewest config entries to set to false to untie all that can be, and the models then."""
    names = _flags_on(config)
    models = _build_models(config, names, tied)
    left = [_shared(model) for model in models]
    together = next(iter([names for candidate in tied for names in _shared(candidate.model)]))
    if left == [_shared(candidate.model) for candidate in tied]:
        raise UnsupportedModel(
            f"{tied[0].name} ties {together[1]} to {together[0]} even if {FLAG} is false in its "
            "config, so a checkpoint cannot untie them; fold it without --untie"
        )
    for name in tuple(names) if len(names) > 1 else ():
        fewer = [other for other in names if other != name]
        built = _build_models(config, fewer, tied)
        if [_shared(model) for model in built] == left and not _true_when_loaded(
            config, fewer, checkpoint
        ):
            names, models = fewer, built
    if back := _true_when_loaded(config, names, checkpoint):
        raise UnsupportedModel(
            f"{type(config).__name__} loads {back} as true even if it is false in config.json, so "
            f"a checkpoint cannot untie {together[1]}; fold it without --untie"
        )
    return tuple(Setting(name, False) for name in names), models


def _build_models(config: Any, names: Iterable[str], tied: Sequence[StoredClass]) -> list[Any]:
    off = copy.deepcopy(config)
    for name in names:
        set_entry(off, name, False)
    return [classes.build(type(candidate.model), off) for candidate in tied]


def _true_when_loaded(config: Any, names: Iterable[str], checkpoint: Checkpoint | None) -> str:
    """The first of these entries that loads as true although ``config.json`` has false."""
    raw = checkpoint.raw_config if checkpoint else config.to_dict()
    loaded = type(config).from_dict(with_entries(raw, dict.fromkeys(names, False)))
    on = _flags_on(loaded)
    return next((name for name in names if name in on), "")


def _flags_on(config: Any) -> list[str]:
    """The dotted names of the entries ``FLAG`` that are true, also in configs inside the config."""
    parts = classes.nested_configs(config)
    return [prefix + FLAG for prefix, part in parts if getattr(part, FLAG, None)]


def _names(candidate: StoredClass, model: Any) -> dict[str, str]:
    """Map each parameter that the untied ``model`` holds to a stored parameter that it was tied to.

    Raises ``UnsupportedModel`` if the stored parameter has another layout, or if the untied model
    lacks a parameter: somebody has parametrised the tied one.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names: dict[str, str] = {}
    for together in _shared(candidate.model):
        for name in together:
            if name not in parameters:
                raise UnsupportedModel(
                    f"{name} is a parameter that {candidate.name} does not have as its config "
                    "describes it, so what is tied to it cannot get a copy; fold it without --untie"
                )
        stored = next((name for name in together if name in candidate.stored), None)
        if stored is None and any(name in candidate.converted for name in together):
            raise UnsupportedModel(
                f"{together[0]} is tied to {together[1]} and stored in another layout, so it "
                "cannot get a copy; fold it without --untie"
            )
        if stored is None:
            continue
        seen = {id(parameters[stored])}
        for name in together:
            if id(parameters[name]) not in seen:
                names[name] = stored
            seen.add(id(parameters[name]))
    return names


def _copies(
    tied: Sequence[StoredClass], wanted: Sequence[dict[str, str]], *, own_names: bool
) -> tuple[UntiedParameter, ...]:
    """A copy for each parameter, named as in the first class, or with ``own`` as in its own."""
    copies: dict[str, UntiedParameter] = {}
    for candidate, names in zip(tied, wanted, strict=True):
        naming = classes.naming_between(candidate.model, tied[0].model)
        for name, source in names.items():
            parameter, tensors = naming(name), candidate.stored.get(name, ())
            tensor = next(iter(tensors), name if own_names else parameter)
            stored = tensor if tensors else candidate.stored[source][0]
            shape = tuple(candidate.model.get_parameter(source).shape)
            copies.setdefault(
                tensor, UntiedParameter(parameter, tensor, naming(source), stored, shape)
            )
    return tuple(copies.values())


def _with_copies(checkpoint: Checkpoint, untied: Iterable[UntiedParameter]) -> Checkpoint:
    copies = {copied.tensor: checkpoint.tensors[copied.stored] for copied in untied}
    return replace(checkpoint, tensors=copies | checkpoint.tensors)


def _loads(before: StoredClass, after: StoredClass, names: Iterable[str]) -> bool:
    """Whether no further parameter is missing after untying, and every copy is loaded."""
    return {*after.missing} <= {*before.missing} and all(name in after.stored for name in names)


def untie(plan: Plan, untied_classes: UntiedClasses) -> Plan:
    """The plan with the copies, or without them if it rotates all tied parameters alike, or none.

    The untied names are dropped from ``plan.unproven``: a copy that no trace reads needs no proof.
    """
    concerned = {
        name for copied in untied_classes.untied for name in (copied.parameter, copied.source)
    }
    left = tuple(name for name in plan.unproven if name not in concerned)
    plan = replace(plan, unproven=left)
    edited = {writer.parameter for writer in plan.centred_weights}
    edited |= {part.parameter for mlp in plan.widened for part in mlp.parts}
    edited |= {named.parameter for fusion in plan.fused for named in fusion.names}
    edited |= {reader.weight.parameter for fusion in plan.fused for reader in fusion.readers}
    edits = edits_of(plan, in_memory=True)
    alike = all(
        edits.get(copied.parameter) == edits.get(copied.source) for copied in untied_classes.untied
    )
    if alike and concerned.isdisjoint(edited):
        copies = {
            copied.tensor for copied in untied_classes.untied if copied.tensor != copied.stored
        }
        return replace(
            plan, rotation_groups=tuple(_without(group, copies) for group in plan.rotation_groups)
        )
    return replace(
        plan, untied=untied_classes.untied, settings=(*plan.settings, *untied_classes.settings)
    )


def _without(group: RotationGroup, tensors: Container[str]) -> RotationGroup:
    return replace(group, tensors=tuple(t for t in group.tensors if t.tensor not in tensors))
