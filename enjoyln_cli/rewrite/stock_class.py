"""A folded model as another stock class, which computes RMSNorm itself (``fold --as``).

Every engine then takes its own path of RMSNorm. Which classes fit is data
(``templates/stock_rms_norm.yaml``). The target gets the tensors of the folded model. Refused is any
tensor that only one class has, and a config entry that the target might not follow.

``--compress`` leaves out the last feature of a stream, which a rotation has made its mean, so zero.
``x / sqrt(|x|^2 / d + eps)`` of ``d`` features is ``sqrt(d / (d-1))`` times the RMSNorm of the
``d - 1`` others with ``eps d / (d-1)``: the weights of the norms and the config have both factors.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.checkpoint.config import MARKER, set_entry
from enjoyln_cli.checkpoint.file_roles import CONFIG
from enjoyln_cli.checkpoint.marker import marker
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.classes import class_named
from enjoyln_cli.models.load import refusing
from enjoyln_cli.plan.fold_options import WriteOptions
from enjoyln_cli.plan.plan import Plan, RotationGroup, size_settings
from enjoyln_cli.recipe.stock_targets import StockTarget
from enjoyln_cli.rewrite.opened_model import OpenedModel
from enjoyln_cli.text import listed_briefly, matches, number

_IN_EVERY_CONFIG = {"architectures", "model_type", "dtype", "transformers_version", "_name_or_path"}


def require_all_folded(plan: Plan) -> None:
    """Raise ``UnsupportedModel`` unless every norm becomes RMSNorm by its weights alone."""
    for verdict in plan.norms:
        if verdict.status != "in_weights":
            why = verdict.reason or "its mean can only be subtracted by an added operation; --untie"
            raise UnsupportedModel(f"{verdict.norm} would stay LayerNorm: {why}")


def compressed_plan(plan: Plan) -> Plan:
    """``plan``, which rotates, with a residual stream of one feature less.

    Raises ``UnsupportedModel`` if there are several streams, or the stream needs all its features.
    """
    streams = [g for g in plan.rotation_groups if g.kind == "residual" and g.fixes_ones]
    heads = [g.name for g in plan.rotation_groups if g.kind == "heads"]
    if len(streams) != 1 or heads:
        what = f"{len(streams)} streams" if not heads else f"norms of heads ({heads[0]})"
        raise UnsupportedModel(
            f"{plan.model_class} has {what}, but one width and eps in its config"
        )
    (stream,) = streams
    if stream.why_not_compressed:
        raise UnsupportedModel(stream.why_not_compressed)
    groups = (replace(g, compressed=g is stream) for g in plan.rotation_groups)
    return replace(plan, rotation_groups=tuple(groups))


def target_plan(target: StockTarget, plan: Plan) -> Plan:
    """What remains to be done with the result, which is of the class ``target``: nothing."""
    return Plan(
        model_type=class_named(target.target).config_class.model_type,  # type: ignore[attr-defined]
        model_class=target.target,
        classes=(target.target,),
        norms=(),
        centred_weights=(),
        subtractions=(),
        unproven=plan.unproven,
        outputs=plan.outputs,
    )


def target_config(target: StockTarget, config: Any, plan: Plan) -> Any:
    """The config of the target for a model with ``config`` that was folded by ``plan``.

    An entry with its default value is passed over, since the class may not read it. Raises
    ``UnsupportedModel`` for any other entry that the target has no place for.
    """
    config = copy.deepcopy(config)
    for setting in (*size_settings(plan.widened), *plan.settings):
        set_entry(config, setting.name, setting.value)
    held = config.to_dict()
    for name, wanted in target.require.items():
        value = _entry(held, name)
        if value != wanted:
            raise UnsupportedModel(
                f"{target.target} cannot compute {name} = {value!r:.60} of {target.source}, only "
                f"{wanted!r}"
            )
    default = type(config)().to_dict()
    known = {*target.same, *target.given, *target.unused, *target.copied.values()}
    known |= {name.partition(".")[0] for name in target.require} | _IN_EVERY_CONFIG
    known |= {name for names in target.products.values() for name in names}
    unknown = [
        name for name, value in held.items() if name not in known and value != default.get(name)
    ]
    if unknown:
        raise UnsupportedModel(
            f"{target.source} has {listed_briefly(unknown)} in its config, which {target.target} "
            "is not known to follow"
        )
    entries = {name: held[one] // held[by] for name, (one, by) in target.quotients.items()}
    entries |= {name: held[name] for name in target.same if name in held}
    entries |= {name: held[other] for name, other in target.copied.items()}
    for name, factors in target.products.items():
        product = 1
        for factor in factors:
            product *= held[factor]
        entries[name] = int(product)
    if target.square:
        _require_square(target, *(held[name] for name in target.square))
    layers = int(held["num_hidden_layers"])
    entries |= {name: [value] * layers for name, value in target.per_layer.items()}
    entries |= target.given
    entries |= {entry.name: entry.value for entry in plan.settings if entry.name in target.given}
    if stream := _compressed(plan):
        entries["hidden_size"] = stream.size - 1
        entries[target.eps] *= stream.size / (stream.size - 1)
    cls: Any = class_named(target.target)
    with refusing(UnsupportedModel, f"{target.target} of {entries['hidden_size']} features"):
        made = cls.config_class(**entries)
    made.architectures = [target.target]
    return made


def _require_square(target: StockTarget, image: Any, patch: Any) -> None:
    """Raise ``UnsupportedModel`` if images and their grids of patches have unequal sides."""
    height, width = image if isinstance(image, (list, tuple)) else (image, image)
    rows, columns = patch if isinstance(patch, (list, tuple)) else (patch, patch)
    rows, columns = height // rows, width // columns
    if height != width and rows != columns:
        raise UnsupportedModel(
            f"{target.target} takes the {rows} x {columns} positions of {target.source} for a "
            "square; only square images or grids of patches can be stored"
        )


def _entry(config: Any, name: str) -> Any:
    """An entry of a config, nested with dots; an entry that is missing is ``None``."""
    for key in name.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _compressed(plan: Plan) -> RotationGroup | None:
    """The stream that has one feature less, if any."""
    return next((group for group in plan.rotated if group.compressed), None)


def _smaller(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The tensors of a model that was folded by ``plan``, without the feature that is left out.

    A bias of a norm keeps its size: it has no place in any target unless it is zero.
    """
    stream = _compressed(plan)
    if stream is None:
        return tensors
    norms, smaller = {verdict.norm for verdict in plan.norms}, dict(tensors)
    for tensor in stream.tensors:
        name, dim = tensor.parameter, (tensor.module_axis or tensor.axis).dim
        if name.rpartition(".")[0] not in norms:
            smaller[name] = smaller[name].narrow(dim, 0, stream.size - 1)
    for name in {f"{norm}.weight" for norm in norms} & smaller.keys():
        smaller[name] = smaller[name][:-1]
    return smaller


def stock_model(target: StockTarget, config: Any, folded: Any, plan: Plan) -> Any:
    """The target with the tensors of a model that was ``folded`` by ``plan``, in the same dtype.

    Raises ``UnsupportedModel`` if only one class has a tensor, unless it is a bias of zeros or
    listed in the data.
    """
    cls: Any = class_named(target.target)
    made = cls(config).to(next(folded.parameters()).dtype).eval()
    state = _named_as_in(target, _smaller(plan, folded.state_dict()))
    wanted = made.state_dict()
    for name in wanted.keys() - state.keys():
        if not matches(name, target.ones):
            raise UnsupportedModel(
                f"{target.target} needs {name}, which {target.source} does not have"
            )
        state[name] = torch.ones_like(wanted[name])
    for name in sorted(state.keys() - wanted.keys()):
        size = float(state.pop(name).abs().max())
        if size and not matches(name, target.omitted):
            raise UnsupportedModel(
                f"{target.target} has no place for {name} of {target.source}, which is not zero "
                f"(up to {number(size)})"
            )
    for name, tensor in state.items():  # a row may have further dimensions of one element
        if tensor.squeeze().shape == wanted[name].squeeze().shape:
            state[name] = tensor.view_as(wanted[name])
    for pattern, constant in target.added.items():
        for name in state:
            if fnmatchcase(name, pattern):
                state[name] = (state[name].double() + constant).to(state[name].dtype)
    if stream := _compressed(plan):
        factor = math.sqrt(stream.size / (stream.size - 1))
        norms = {f"{verdict.norm}.weight": torch.tensor(0.0) for verdict in plan.norms}
        for name in _named_as_in(target, norms):
            state[name] = (state[name].double() * factor).to(state[name].dtype)
    made.load_state_dict(state)
    if folded.can_generate():
        made.generation_config = folded.generation_config
    return made


def write_stock_class(
    target: StockTarget,
    opened: OpenedModel,
    plan: Plan,
    out: Path,
    dtype: torch.dtype,
    options: WriteOptions,
) -> dict[str, Any]:
    """Write the weights of ``opened`` to ``out``, folded by ``plan`` and stored as the target.

    Returns the result's config with the marker. The model is in memory as a whole.
    """
    config = target_config(target, opened.config, plan)
    made = stock_model(target, config, opened.load(dtype, plan), plan)
    limit = {"max_shard_size": options.max_shard_size} if options.max_shard_size else {}
    made.save_pretrained(out, **limit)
    saved: dict[str, Any] = json.loads((out / CONFIG).read_text(encoding="utf-8"))
    left, nonfinite = target_plan(target, plan), options.allow_nonfinite
    return {**saved, MARKER: marker(left, opened.source, nonfinite, plan.model_class)}


def _named_as_in(
    target: StockTarget, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors under their names in the target."""
    named = {}
    for name, tensor in tensors.items():
        for old, new in target.renamed:
            name = name.replace(old, new)
        named[name] = tensor
    return named
