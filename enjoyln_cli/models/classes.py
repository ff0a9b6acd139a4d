"""Find the model classes of a checkpoint, and build a model without weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.meta_device import KeepWhole, forget_buffers
from enjoyln_cli.text import did_you_mean, first_line

MAX_MODULES = 500_000
"""Building a larger model is refused: a small config file can ask for any number of modules."""


def build(model_class: type, config: Any) -> nn.Module:
    """An instance on the meta device, in eval mode; ``UnsupportedModel`` if it cannot be built."""
    try:
        with torch.device("meta"), KeepWhole(), _limited_modules():
            model: Any = model_class(copy.deepcopy(config)).eval()
    except Exception as error:  # for a wrong config, a model class may raise any exception
        wanted = getattr(model_class, "config_class", None) or object
        why = f"{type(error).__name__}: {first_line(error)}"
        if not isinstance(config, wanted):
            why = f"it takes a {wanted.__name__}, and this is a {type(config).__name__}"
        raise UnsupportedModel(
            f"{model_class.__name__} cannot be built from this config: {why}"
        ) from error
    forget_buffers(model, keep_integers=True)
    apply_experts(model)
    return model


@contextmanager
def _limited_modules() -> Iterator[None]:
    """Raise ``ValueError`` if the block builds more than ``MAX_MODULES`` modules."""
    built = 0

    def count(*_: Any) -> None:
        nonlocal built
        built += 1
        if built > MAX_MODULES:
            raise ValueError(f"it has more than {MAX_MODULES} modules")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def apply_experts(model: nn.Module, way: str = "batched_mm") -> None:
    """Set how mixture-of-experts layers of ``model`` and its submodels are computed.

    With the default ``way``, shapes do not depend on values, and float64 works.
    """
    for part in model.modules():
        if getattr(part, "_can_set_experts_implementation", bool)():
            cast(Any, part).set_experts_implementation(way)


def leave_out_cache(model: Any) -> None:
    """Let calls of ``model`` that do not ask for a cache return none."""
    for part in (model.config, model.config.get_text_config()):
        if getattr(part, "use_cache", None):
            part.use_cache = False


def nested_configs(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A config and all configs inside it, each with the dotted prefix of the names of its entries.

    The names of ``text_config`` begin with ``text_config.``.
    """
    yield prefix, config
    for name, part in list(vars(config).items()):
        if hasattr(part, "model_type"):
            yield from nested_configs(part, f"{prefix}{name}.")


def class_named(name: str) -> type:
    """The transformers model class ``name``. Raises ``UnsupportedModel`` with similar names."""
    import transformers

    cls = getattr(transformers, name, None)
    if isinstance(cls, type) and issubclass(cls, nn.Module):
        return cls
    hint = did_you_mean(name, [n for n in dir(transformers) if "For" in n or "Mo" in n])
    unknown = f"transformers has no model class {name}"
    raise UnsupportedModel(f"{unknown}; {hint}" if hint else unknown)


def unknown_class(config: Any) -> str | None:
    """The first class that ``architectures`` names and nobody defines; ``None`` if none."""
    import transformers

    is_custom = bool(getattr(config, "auto_map", None))
    named = () if is_custom else config.architectures or ()
    return next((name for name in named if not hasattr(transformers, name)), None)


def classes_for(config: Any) -> list[type]:
    """All classes that transformers' auto classes list for this config.

    The class that the config names comes first, if transformers has it. Raises
    ``UnsupportedModel`` if there is no class.
    """
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto import modeling_auto

    custom = getattr(config, "auto_map", None) or {}
    if codes := [code for auto, code in custom.items() if auto.startswith("AutoModel")]:
        return [get_class_from_dynamic_module(code, config._name_or_path) for code in codes]
    named = config.architectures or ()
    names = dict.fromkeys(name for name in named if hasattr(transformers, name))
    tables = [n for n in dir(modeling_auto) if n.startswith("MODEL") and n.endswith("_NAMES")]
    for table in sorted(tables, key=lambda n: n != "MODEL_MAPPING_NAMES"):
        entry = getattr(modeling_auto, table).get(config.model_type, ())
        names.update(dict.fromkeys((entry,) if isinstance(entry, str) else entry))
    if not names:
        raise UnsupportedModel(f"no model class is known for the model type {config.model_type}")
    return [class_named(name) for name in names]


def naming_between(model: Any, reference: Any) -> Callable[[str], str]:
    """A function that converts a path in ``model`` to the path of the same part in ``reference``.

    Classes of one family share a base model: one class is the base model itself, another holds it
    under a prefix such as ``transformer.``. Paths outside of the base model do not change.
    """
    before, target = (f"{base_path(m)}." if base_path(m) else "" for m in (model, reference))

    def naming(path: str) -> str:
        return target + path.removeprefix(before) if path.startswith(before) else path

    return naming if before != target else str


def base_path(model: Any) -> str:
    """The path of the base model in a model with a head; empty for a base model itself."""
    prefix = getattr(model, "base_model_prefix", "")
    return prefix if prefix and hasattr(model, prefix) else ""


def locate(
    model: nn.Module,
    name: str,
    names: tuple[str, ...] = (),
    get: Callable[[nn.Module, str], Any] = nn.Module.get_submodule,
) -> str | None:
    """Path in ``model`` of the module ``name``, with the base model's prefix added or removed.

    ``None`` for a module of a head that ``model`` does not have: ``model`` is the base class, and
    others of ``names`` have the base model's prefix. ``get(model, path)`` may look up something
    else than modules; it raises ``AttributeError`` if there is nothing at ``path``. Raises
    ``UnsupportedModel`` if ``model`` has no such module.
    """
    prefix = getattr(model, "base_model_prefix", "") or ""
    head = f"{prefix}."
    for path in (name, name.removeprefix(head), head + name):
        try:
            get(model, path)
        except AttributeError:
            continue
        return path
    inside = prefix and not hasattr(model, prefix) and not name.startswith(head)
    if inside and any(other.startswith(head) for other in names):
        return None
    raise UnsupportedModel(
        f"{type(model).__name__} has no {name!r}: the plan was made for another class"
    )


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of the first floating-point parameter of a model."""
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(dtypes, torch.get_default_dtype())
