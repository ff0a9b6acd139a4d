"""What a model ties, and what it takes to store it untied.

transformers ties where ``tie_word_embeddings`` of a config is true, and loads as many tensors as
there are names where it is false. Decides whether that entry, in the config or in one nested in it,
can be changed so that the result loads untied (``same_ops`` tells whether all else stays), in which
tensors the copies are stored, and under what names. A tie that is made in another way cannot be
undone by a checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from enjoyln_cli.analysis import stored_names
from enjoyln_cli.analysis.stored_names import Candidate, Shape
from enjoyln_cli.checkpoint.config import raw_config, set_entry, with_entries
from enjoyln_cli.checkpoint.reader import Checkpoint
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models import classes
from enjoyln_cli.plan.plan import Plan, Setting, UntiedParameter

FLAG = "tie_word_embeddings"


@dataclass(frozen=True, eq=False)
class Apart:
    """The classes that load a checkpoint, as they are and as they will be with nothing tied."""

    before: dict[str, Candidate]
    after: dict[str, Candidate]
    """By name, the plan's own class first."""
    untied: tuple[UntiedParameter, ...]
    """With the names of the first class."""
    settings: tuple[Setting, ...]


def apart(
    config: Any,
    tied: Sequence[Candidate],
    shapes: dict[str, Shape],
    checkpoint: Checkpoint | None,
) -> Apart | None:
    """How to store untied what ``tied`` classes, the plan's own first, load from one checkpoint.

    ``None`` where nothing is tied. Raises ``UnsupportedModel`` where something is, and no entry of
    the config decides that.
    """
    if not any(_shared(found.model) for found in tied):
        return None
    settings, models = _flags_off(config, tied, checkpoint)
    wanted = [_names(found, model) for found, model in zip(tied, models, strict=True)]
    for own in (False, True):
        untied = _copies(tied, wanted, own=own)
        more = shapes | {one.tensor: one.shape for one in untied}
        held = checkpoint and _with_copies(checkpoint, untied)
        after = [stored_names.candidate(model, more, held) for model in models]
        if all(map(_loads, tied, after, wanted)):
            before, new = ({found.name: found for found in these} for these in (tied, after))
            return Apart(before, new, untied, settings)
    raise UnsupportedModel(
        f"{tied[0].name} would not load a separate copy of {untied[0].stored} under any name, so "
        "it stays tied; fold it without --untie"
    )


def _shared(model: Any) -> list[tuple[str, ...]]:
    """Names of one parameter, wherever there are several."""
    together: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        together.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in together.values() if len(names) > 1]


def _flags_off(
    config: Any, tied: Sequence[Candidate], checkpoint: Checkpoint | None
) -> tuple[tuple[Setting, ...], list[Any]]:
    """The fewest entries that have to become false, and the classes built with them."""
    names = [name for name, part in _parts(config) if getattr(part, FLAG, None)]
    models = _built(config, names, tied)
    left = [_shared(model) for model in models]
    together = next(iter([names for found in tied for names in _shared(found.model)]))
    if left == [_shared(found.model) for found in tied]:
        raise UnsupportedModel(
            f"{tied[0].name} ties {together[1]} to {together[0]} whatever {FLAG} of its config "
            "says, so a checkpoint cannot untie them; fold it without --untie"
        )
    for name in tuple(names) if len(names) > 1 else ():
        fewer = [other for other in names if other != name]
        built = _built(config, fewer, tied)
        if [_shared(model) for model in built] == left and not _comes_back(
            config, fewer, checkpoint
        ):
            names, models = fewer, built
    if back := _comes_back(config, names, checkpoint):
        raise UnsupportedModel(
            f"{back} of {type(config).__name__} is true again when it is loaded, whatever "
            f"config.json says, so a checkpoint cannot untie {together[1]}; fold it without --untie"
        )
    return tuple(Setting(name, False) for name in names), models


def _built(config: Any, names: Iterable[str], tied: Sequence[Candidate]) -> list[Any]:
    off = copy.deepcopy(config)
    for name in names:
        set_entry(off, name, False)
    return [classes.build(type(found.model), off) for found in tied]


def _comes_back(config: Any, names: Iterable[str], checkpoint: Checkpoint | None) -> str:
    """The first of these entries that is true when a ``config.json`` with false is loaded."""
    raw = raw_config(checkpoint.source) if checkpoint else config.to_dict()
    loaded = type(config).from_dict(with_entries(raw, dict.fromkeys(names, False)))
    on = [name for name, part in _parts(loaded) if getattr(part, FLAG, None)]
    return next((name for name in names if name in on), "")


def _parts(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """The config and those nested in it, each with the name of its entry that ties."""
    found = [(prefix + FLAG, config)]
    for name in getattr(config, "sub_configs", ()):
        inner = getattr(config, name, None)
        if hasattr(inner, "to_dict"):
            found += _parts(inner, f"{prefix}{name}.")
    return found


def _names(found: Candidate, model: Any) -> dict[str, str]:
    """Every parameter that ``model`` holds for itself, to a stored one that it was tied to.

    Raises ``UnsupportedModel`` where that is stored in another layout.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names: dict[str, str] = {}
    for together in _shared(found.model):
        own = next((name for name in together if name in found.stored), None)
        if own is None and any(name in found.converted for name in together):
            raise UnsupportedModel(
                f"{together[0]} is tied to {together[1]} and stored in another layout, so no copy "
                "of it can be stored; fold it without --untie"
            )
        if own is None:
            continue
        known = {id(parameters[own])}
        for name in together:
            if id(parameters[name]) not in known:
                names[name] = own
            known.add(id(parameters[name]))
    return names


def _copies(
    tied: Sequence[Candidate], wanted: Sequence[dict[str, str]], *, own: bool
) -> tuple[UntiedParameter, ...]:
    """A copy for each name, stored under the name in the first class or in its own class."""
    copies: dict[str, UntiedParameter] = {}
    for found, names in zip(tied, wanted, strict=True):
        naming = classes.naming_between(found.model, tied[0].model)
        for name, source in names.items():
            parameter, held = naming(name), found.stored.get(name, ())
            tensor = next(iter(held), name if own else parameter)
            stored = tensor if held else found.stored[source][0]
            shape = tuple(found.model.get_parameter(source).shape)
            copies.setdefault(
                tensor, UntiedParameter(parameter, tensor, naming(source), stored, shape)
            )
    return tuple(copies.values())


def _with_copies(checkpoint: Checkpoint, untied: Iterable[UntiedParameter]) -> Checkpoint:
    copies = {one.tensor: checkpoint.tensors[one.stored] for one in untied}
    return replace(checkpoint, tensors=copies | checkpoint.tensors)


def _loads(before: Candidate, after: Candidate, names: Iterable[str]) -> bool:
    """Whether nothing is missing that was not before, and every copy is found."""
    return {*after.missing} <= {*before.missing} and all(name in after.stored for name in names)


def untie(plan: Plan, apart: Apart) -> Plan:
    """The plan with its copies; without any where it changes nothing that was tied.

    A name that nobody reads any more, since all read the other one, is nothing that is unproven.
    """
    concerned = {name for one in apart.untied for name in (one.parameter, one.source)}
    left = tuple(name for name in plan.unproven if name not in concerned)
    plan = replace(plan, unproven=left)
    edited = {writer.parameter for writer in plan.writers}
    edited |= {part.parameter for mlp in plan.widened for part in mlp.parts}
    edited |= {named.parameter for merge in plan.merged for named in merge.names}
    edited |= {reader.weight.parameter for merge in plan.merged for reader in merge.readers}
    if concerned.isdisjoint(edited):
        return plan
    return replace(plan, untied=apart.untied, settings=(*plan.settings, *apart.settings))
