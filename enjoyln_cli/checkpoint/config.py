"""Read ``config.json``, and refuse models that cannot be converted.

Before anything is computed, the functions here refuse: a missing config, a config that is not a
JSON object, an architecture that transformers does not know, custom code without
``trust_remote_code``, implausible sizes, quantised weights, and models that are already folded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enjoyln_cli.checkpoint.file_roles import CONFIG, read_json
from enjoyln_cli.checkpoint.foreign_formats import foreign_format
from enjoyln_cli.checkpoint.sentence_transformers import MODULES, reads_hidden_states
from enjoyln_cli.errors import AlreadyFolded, BadCheckpoint, UnsupportedModel
from enjoyln_cli.text import did_you_mean, first_line, size

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from enjoyln_cli.checkpoint.source import Source

MARKER = "enjoyln"

MAX_CONFIG_BYTES = 4_000_000
"""A larger ``config.json`` is damaged or hostile: 20,000 labels take less than half of this."""
MOST_LAYERS = 10_000
"""A config that asks for more layers, or for more experts in a layer, is damaged or hostile."""
_REDIRECTING_KEYS = {"configuration_files", "attribute_map"}
"""Keys that make transformers read another file, or another attribute, than the given file has."""
_COUNTS = re.compile(r"(.*_)?(layers?|depths?|blocks|experts)")
"""Attributes that say how often a part of the model is repeated."""


def raw_config(source: Source) -> dict[str, Any]:
    """The content of ``config.json``, parsed but not interpreted.

    Raises ``UnsupportedModel`` if there is none, and ``BadCheckpoint`` if it is not a JSON object,
    or so large that transformers would take minutes to read it.
    """
    path = source.path / CONFIG
    if not path.is_file():
        raise UnsupportedModel(f"{source.model} {_without_config(source.root)}")
    if (nbytes := path.stat().st_size) > MAX_CONFIG_BYTES:
        raise BadCheckpoint(
            f"{path} has {size(nbytes)}, and no config has more than {size(MAX_CONFIG_BYTES)}; do "
            "not use it"
        )
    config = read_json(path)
    if not isinstance(config, dict):
        raise BadCheckpoint(
            f"{path} holds a JSON {type(config).__name__}, not an object; fetch it again"
        )
    return config


def _without_config(path: Path) -> str:
    """The content of a directory without a config in words, with advice."""
    if description := foreign_format(_files_in(path)):
        return description
    missing = f"has no {CONFIG};"
    if (path / MODULES).is_file():
        return f"{missing} the first module of its {MODULES} is no transformer"
    if inner := sorted(nested.parent.name for nested in path.glob(f"*/{CONFIG}")):
        return f"{missing} there is one in its folder {inner[0]}, pass that"
    return f"{missing} pass the directory that save_pretrained wrote"


def _files_in(folder: Path) -> list[str]:
    return [entry.name for entry in os.scandir(folder)]


def load_config(source: Source, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration object of transformers; custom code runs with ``trust_remote_code`` only.

    If a sentence-transformers pipeline around the model reads hidden states, the configuration sets
    ``output_hidden_states``, so that they count as outputs. Raises ``UnsupportedModel``, and
    ``BadCheckpoint`` as ``raw_config`` does.
    """
    raw = raw_config(source)
    require_plausible(raw, source.model)
    require_unquantised(raw, source.model)
    if not trust_remote_code:
        require_no_code(raw, source.model)
    if not (trust_remote_code and "AutoConfig" in _code_of(raw)):
        require_known_type(raw, source.model, _files_in(source.path))
    from transformers import AutoConfig

    states = {"output_hidden_states": True} if reads_hidden_states(source.path) else {}
    try:
        config = AutoConfig.from_pretrained(
            source.path, trust_remote_code=trust_remote_code, **states
        )
    except Exception as error:  # a config class may raise any exception
        first = first_line(error)
        raise UnsupportedModel(
            f"transformers rejects the {CONFIG} of {source.model}: {type(error).__name__}: {first}"
        ) from error
    if not trust_remote_code:
        require_no_code(config, source.model)
    return config


def require_plausible(config: Mapping[str, Any], model: str) -> None:
    """Raise ``BadCheckpoint`` for a config that transformers must not be given.

    Three kinds of configs are refused: with such a config, transformers would take hours to build
    the model; it would read other values than the values checked here; or ``architectures`` is
    malformed. ``model`` is a name for messages.
    """
    for name in _REDIRECTING_KEYS & config.keys():
        raise BadCheckpoint(
            f"the {CONFIG} of {model} has {name}, which makes transformers read another config "
            "than this file; remove it"
        )
    named = config.get("architectures")
    if not (named is None or isinstance(named, list) and all(isinstance(n, str) for n in named)):
        raise BadCheckpoint(
            f"the {CONFIG} of {model} has {named!r:.60} as architectures, where a list of class "
            "names belongs; fetch it again"
        )
    for name, value in _numbers(config):
        if _COUNTS.fullmatch(name) and value > MOST_LAYERS:
            raise BadCheckpoint(
                f"the {CONFIG} of {model} asks for {value!s:.20} {name}, and no model has more "
                f"than {MOST_LAYERS}; do not use it"
            )


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number of a nested config, with its key; a number in a list has the key of the list."""
    waiting: list[tuple[str, Any]] = list(config.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(name, item) for item in value]
        elif isinstance(value, (int, float)):
            yield name, value


def require_unquantised(config: Mapping[str, Any], model: str) -> None:
    """Raise ``UnsupportedModel`` if the config, or a part of it, has a quantisation config.

    A checkpoint that was converted before it was quantised cannot be verified or edited either.
    """
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    advice = "convert the original checkpoint, then quantise the result"
    if MARKER in config:
        advice = "use the converted checkpoint that it was quantised from"
    for part in parts:
        quantisation = part.get("quantization_config") or part.get("compression_config")
        if quantisation:
            method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
            raise UnsupportedModel(
                f"{model} is quantised ({method or 'so its config says'}), and rounded weights "
                f"cannot be compared or edited exactly; {advice}"
            )


def require_no_code(config: Mapping[str, Any] | PretrainedConfig, model: str) -> None:
    """Raise ``UnsupportedModel`` if the config names custom code (``auto_map``).

    ``config`` is parsed JSON or a configuration object; ``model`` is a name for messages.
    """
    named = _code_of(config)
    if named:
        raise UnsupportedModel(
            f"{model} comes with custom code ({next(iter(named.values()))}), which is not run by "
            "default; review it, then pass --trust-remote-code"
        )


def _code_of(config: Mapping[str, Any] | PretrainedConfig) -> dict[str, Any]:
    is_raw = isinstance(config, Mapping)
    named = (config.get("auto_map") if is_raw else getattr(config, "auto_map", None)) or {}
    return named if isinstance(named, dict) else {"auto_map": named}


def require_known_type(config: Mapping[str, Any], model: str, files: Iterable[str] = ()) -> None:
    """Raise ``UnsupportedModel`` for a model type that transformers lacks; suggest similar types.

    A config without a type may belong to another program, as the ``files`` beside it show.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        if "pretrained_cfg" in config:
            raise UnsupportedModel(
                f"{model} holds a timm model; create it with timm, and pass the module to "
                "enjoyln_cli.analyze in Python"
            )
        if description := foreign_format(files):
            raise UnsupportedModel(f"{model} {description}")
        raise UnsupportedModel(
            f'the {CONFIG} of {model} names no model_type; add it, for example "model_type": "gpt2"'
        )
    require_in_transformers(model_type, f"{model}: ")


def require_in_transformers(model_type: str, prefix: str = "") -> None:
    """Raise ``UnsupportedModel`` unless transformers knows the type; suggest similar types.

    The message begins with ``prefix``.
    """
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        near = did_you_mean(model_type, CONFIG_MAPPING.keys())
        hint = near or "if it is new, upgrade transformers"
        raise UnsupportedModel(f"{prefix}transformers has no model type {model_type!r}; {hint}")


def require_folded(config: Mapping[str, Any], model: str) -> None:
    """Raise ``BadCheckpoint`` if a parsed ``config.json`` has no ``enjoyln`` marker.

    ``model`` is a name for messages.
    """
    if not isinstance(config.get(MARKER), dict):
        raise BadCheckpoint(
            f"{model} was not folded: its {CONFIG} has no enjoyln entry; run `enjoyln fold`"
        )


def require_unfolded(
    config: Mapping[str, Any] | PretrainedConfig,
    model: str = "the model",
    *,
    may_be_rotated: bool = False,
) -> None:
    """Raise ``AlreadyFolded`` if the config has the ``enjoyln`` marker.

    ``config`` is parsed JSON or a configuration object; ``model`` is a name for messages. With
    ``may_be_rotated``, the result of a rotation is accepted: its norms are as they were.
    """
    raw = config if isinstance(config, Mapping) else vars(config)
    if MARKER in raw:
        entry = raw[MARKER]
        origin = entry.get("source") if isinstance(entry, dict) else None
        only_rotated = _plan_in(entry).get("rotation_groups") and not names_folded_norms(entry)
        if only_rotated and may_be_rotated:
            return
        job, verb = ("rotation", "convert") if only_rotated else ("fold", "fold")
        raise AlreadyFolded(
            f"{model} is the result of an earlier {job}; {verb} its source "
            f"({origin or 'unknown'}) instead"
        )


def names_folded_norms(entry: Any) -> bool:
    """Whether an ``enjoyln`` entry, which may hold anything, names norms that become RMSNorm."""
    norms = _plan_in(entry).get("norms")
    listed = norms if isinstance(norms, list) else []
    statuses = [norm.get("status") for norm in listed if isinstance(norm, dict)]
    return any(status != "stays_layernorm" for status in statuses)


def _plan_in(entry: Any) -> dict[str, Any]:
    plan = entry.get("plan") if isinstance(entry, dict) else None
    return plan if isinstance(plan, dict) else {}


def set_entry(config: Any, name: str, value: Any) -> None:
    """Set an entry of a configuration in memory; nothing happens if its nested config is missing.

    A nested entry is named with dots, as in ``with_entries``.
    """
    *path, last = name.split(".")
    for part in path:
        config = config.get(part) if isinstance(config, Mapping) else getattr(config, part, None)
    if isinstance(config, dict):
        config[last] = value
    elif config is not None:
        setattr(config, last, value)


def with_entries(config: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a parsed ``config.json`` in which ``entries`` are set.

    A nested entry is named with dots: ``text_config.hidden_size``.
    """
    changed = dict(config)
    for name, value in entries.items():
        first, _, inner_name = name.partition(".")
        inner = changed.get(first)
        changed[first] = with_entries(inner or {}, {inner_name: value}) if inner_name else value
    return changed
