"""Load a converted checkpoint as a model that runs RMSNorm.

Decides whether a loaded model may run RMSNorm. It may if its config contains the ``enjoyln``
marker, the fold was proven for its class, and the centred weights still have zero mean. Then
RMSNorms and explicit centrings are installed in place. Nothing else about the model changes, and
``save_pretrained`` writes a checkpoint of the stock class.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from enjoyln_cli.checkpoint.config import raw_config
from enjoyln_cli.checkpoint.marker import Marker, read_marker
from enjoyln_cli.checkpoint.model_name import local_folder
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.finite import require_finite
from enjoyln_cli.edits.linear_steps import CentreAxis, LayerScale
from enjoyln_cli.errors import NotCentred, UnsupportedModel
from enjoyln_cli.models.classes import locate
from enjoyln_cli.models.extents import identity_of
from enjoyln_cli.models.holders import models_in
from enjoyln_cli.models.load import class_in
from enjoyln_cli.models.norm_modules import stock_class
from enjoyln_cli.plan.mean_units import copy_units, intact, set_units, spare_units
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.editable import require_editable
from enjoyln_cli.rewrite.opened_model import OpenedModel
from enjoyln_cli.runtime.install import require_installable, run_folded
from enjoyln_cli.runtime.structure import KeepStructure
from enjoyln_cli.runtime.weight_check import (
    FLOATS,
    WatchList,
    centre_watched,
    check_centred,
    layers_of,
    locate_watched,
    require_unquantised,
    tensor_at,
    with_adapters,
)
from enjoyln_cli.runtime.weight_watch import unedited

Holder = TypeVar("Holder")
"""A model or an object that contains one: a pipeline, a PEFT or sentence-transformers model."""

NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")
"""Block numbers in the path of a module."""
HUB = ("revision", "token", "cache_dir", "trust_remote_code", "local_files_only", "code_revision")
"""Arguments of ``from_pretrained`` that loading the config needs too."""


def from_pretrained(model: str | Path, cls: Any = None, **kwargs: Any) -> Any:
    """Load the converted checkpoint ``model`` (a directory or a Hub id) so that it runs RMSNorm.

    ``cls`` is an auto class or a model class. By default it is the class that the checkpoint was
    saved as, or, if the fold is proven for a single class (``fold --model-class``), that class.
    ``kwargs`` go to its ``from_pretrained``. Raises ``UnsupportedModel`` if the fold is not
    proven for the class, ``BadCheckpoint`` if the config has no marker, ``NotCentred`` if weights
    have changed since the fold, and ``ModelNotFound`` if there is no such directory and ``model``
    is no Hub id.
    """
    folder = str(model)
    if local_folder(folder):
        source = open_source(folder)
        raw_config(source)  # refuses a config that transformers must not be given
        folder = str(source.path)
    loaded = (cls or saved_class(folder, **kwargs)).from_pretrained(folder, **kwargs)
    optimize(loaded[0] if isinstance(loaded, tuple) else loaded)
    return loaded


def saved_class(folder: str, **kwargs: Any) -> Any:
    """The class that the config names; if the fold is proven for a single class, that class.

    ``kwargs`` are for ``from_pretrained``. Raises ``UnsupportedModel`` if the fold is proven for
    several classes, and the named class is not among them.
    """
    from transformers import AutoConfig

    hub = {key: value for key, value in kwargs.items() if key in HUB}
    config = kwargs.get("config") or AutoConfig.from_pretrained(folder, **hub)
    marker = read_marker(config.to_dict(), folder)
    name = next(iter(config.architectures or ()), marker.plan.model_class)
    if len(marker.plan.classes) == 1:
        (name,) = marker.plan.classes
    _require_proven(marker, name)
    trusted = bool(hub.pop("trust_remote_code", False))
    return class_in(folder, name, config, trusted, **hub)


def saved_class_of(opened: OpenedModel) -> Any:
    """``saved_class`` of a model that is opened already."""
    folder, trusted = str(opened.source.path), opened.trust_remote_code
    return saved_class(folder, config=opened.config, trust_remote_code=trusted)


def optimize(model: Holder) -> Holder:
    """Make a loaded converted model compute with RMSNorm, in place; returns it.

    For a pipeline, or a module that contains transformers models, converts the models inside. The
    model can be used as before: saving, copying, ``.to(...)``, ``generate``. In training mode it
    computes LayerNorm. After training it does so until ``refold``, unless its weights have not
    changed.

    Raises ``BadCheckpoint`` if the config has no marker, ``UnsupportedModel`` if the fold is not
    proven for the class, ``NotCentred`` if a weight has changed or cannot be checked; then nothing
    is changed.
    """
    proven = [(inner, plan_of(inner)) for inner in models_in(model)]
    for inner, plan in proven:
        check_centred(inner, watched_weights(inner, plan))
        require_installable(inner, plan)
    for inner, plan in proven:
        run_folded(inner, plan, unedited(inner))
    return model


def watched_weights(model: nn.Module, plan: Plan) -> WatchList:
    """The weights of ``model`` that were centred; raises ``NotCentred`` if any is missing."""
    watch = replace(WatchList.of(plan), ops=())
    return with_adapters(model, locate_watched(model, watch))


def refold(model: Holder) -> Holder:
    """Centre the weights of a converted model again after training, and ``optimize`` it.

    For a pipeline, or a module that contains transformers models, treats the models inside.

    The function that the model computes with LayerNorm stays the same: the proof that these weights
    may be centred depends on the model's structure, not on their values. If training has changed
    the hidden units that subtract a mean (``--widen-mlp``), their trained values move to unused
    hidden units, and the mean-subtracting values are restored.

    Raises as ``optimize`` does. Raises ``NotCentred`` too if the model was edited (a hook, a layer
    that is quantised or replaced; a LoRA adapter is centred), or if no unused hidden units are
    left; ``UnsupportedModel`` if weights are offloaded, cannot be written, or share memory with
    others (see ``rewrite.editable``); and ``BadCheckpoint`` if a weight would not be finite.
    Nothing is changed then.
    """
    for inner in models_in(model):
        _refold(inner)
    return model


def _refold(model: nn.Module) -> None:
    plan, reference = plan_of(model), unedited(model)
    watch = watched_weights(model, plan)
    require_unquantised(model, watch.tensors)
    KeepStructure(model, reference).require_structure(model)
    edits: dict[str, object] = dict.fromkeys(watch.tensors, "its own")
    for weight in watch.weights:
        edits[weight.parameter] = edits.get(weight.parameter), weight.axis, weight.scale
    require_editable(model, edits)
    require_installable(model, plan)
    _require_finite(model, watch)
    mlps = [(layers_of(model, mlp), mlp) for mlp in watch.mlps]
    trained = []
    for layers, mlp in mlps:
        if intact(layers, mlp, FLOATS):
            continue
        if (after := spare_units(layers, mlp)) is None:
            raise NotCentred(
                f"{mlp.second.parameter}: training has changed its hidden units from {mlp.size} "
                "on, which subtract a mean, and no unused units are left to hold the trained "
                "values; save the model, delete the `enjoyln` entry of its config.json, and fold "
                "it again with --widen-mlp"
            )
        trained.append((layers, mlp, after))
    for layers, mlp, after in trained:
        copy_units(layers, mlp, after)
    centre_watched(model, watch)
    for layers, mlp in mlps:
        set_units(layers, mlp)
    check_centred(model, watch)
    run_folded(model, plan, reference)


def plan_of(model: nn.Module) -> Plan:
    """The plan in a model's config, checked against the model. Raises as ``optimize`` does."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise UnsupportedModel(
            f"{type(model).__name__} has no transformers config; use enjoyln_cli.fold_in_memory "
            "for a model of your own"
        )
    marker = read_marker(config.to_dict(), type(model).__name__)
    _require_proven(marker, type(model).__name__)
    _require_untied(model, marker.plan)
    _require_same_blocks(model, marker.plan)
    return marker.plan


def _require_proven(marker: Marker, name: str) -> None:
    if name not in marker.plan.classes:
        raise UnsupportedModel(
            f"the conversion is proven for {', '.join(marker.plan.classes)}, and not for {name}; "
            f"load one of these classes, or convert {marker.source} with --model-class {name}"
        )


def _require_same_blocks(model: nn.Module, plan: Plan) -> None:
    """Raise ``NotCentred`` for a norm in a block that was added after the conversion.

    Such a norm is of the same class as the norm at its place in another block. Blocks of a stock
    model may differ: the first block of ModernBERT has an ``nn.Identity`` there.
    """
    names = tuple(verdict.norm for verdict in plan.norms)
    recorded: dict[str, nn.Module] = {}
    for name in names:
        with suppress(UnsupportedModel):  # a layer that was replaced
            path = locate(model, name, names)
            if path is not None:
                recorded[path] = model.get_submodule(path)
    classes = {(NUMBERS.sub("#", path), stock_class(type(m))) for path, m in recorded.items()}
    for path, module in model.named_modules():
        is_norm = (NUMBERS.sub("#", path), stock_class(type(module))) in classes
        if is_norm and path not in recorded:
            raise NotCentred(
                f"{path}: was not there when the model was converted; convert the model as it is "
                "now, or keep LayerNorm"
            )


def _require_untied(model: nn.Module, plan: Plan) -> None:
    """Raise ``NotCentred`` if two parameters that the fold untied are tied again."""
    pairs = [(copy.parameter, copy.source) for copy in plan.untied]
    names = tuple(name for pair in pairs for name in pair)
    for pair in pairs:
        try:
            paths = [locate(model, name, names, tensor_at) for name in pair]
        except UnsupportedModel:
            continue  # a replaced layer; ``check_centred`` reports it if it was centred
        tensors = [tensor_at(model, path) for path in paths if path is not None]
        if len(tensors) == 2 and len({*map(identity_of, tensors)}) == 1:
            raise NotCentred(
                f"{pair[0]} and {pair[1]} are tied again, so the model computes another function; "
                "load it with the config that the conversion wrote"
            )


def _require_finite(model: nn.Module, watch: WatchList) -> None:
    """Raise ``BadCheckpoint`` if centring a weight of ``watch`` would not leave it finite."""
    read = partial(tensor_at, model)
    for weight in with_adapters(model, watch).weights:
        edit = Edit((CentreAxis(weight.axis),))
        if weight.scale:
            edit = edit.adding(LayerScale(weight.scale.parameter, weight.axis.dim))
        require_finite(weight.parameter, read(weight.parameter), edit.loaded(read), read)
