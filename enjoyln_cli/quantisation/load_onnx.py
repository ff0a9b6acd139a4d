"""ONNX programs as the transformers model that they were made from: it generates, in pipelines too.

The model has its own class and no weights. Its ``forward``, and its encoder's, run the programs;
all else is transformers' code: ``generate``, the preparation of inputs, the checks of pipelines.
The cache that ``generate`` hands around holds what the programs return.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enjoyln_cli.calls.generation import generated_positions, suppressed_by_index
from enjoyln_cli.checkpoint.config import load_config
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.classes import classes_for
from enjoyln_cli.models.load import silent
from enjoyln_cli.onnx_export.cached_calls import (
    ENCODED,
    ENCODED_MASK,
    ENCODER,
    LOGITS,
    MERGED,
    MODEL,
    POSITIONS,
    STATES,
    TYPES,
)
from enjoyln_cli.onnx_export.cached_run import (
    computed_values,
    embedded,
    have_cache,
    is_cached,
    load_programs,
    picture_features,
    require_read,
    suffix_of,
)
from enjoyln_cli.onnx_export.call import DECODER, IDS, MASK
from enjoyln_cli.onnx_export.cross_cache import PRESENT
from enjoyln_cli.onnx_export.image_parts import EMBED, EMBEDS, PIXELS
from enjoyln_cli.onnx_export.runtimes import LoadedProgram
from enjoyln_cli.plan.cache_argument import CACHE, cache_argument

LoadedPrograms = Mapping[str, LoadedProgram]


def load_onnx(
    folder: str | Path,
    precision: str | None = None,
    *,
    threads: int = 0,
    trust_remote_code: bool = False,
) -> Any:
    """The model that ``enjoyln export`` or ``quantize`` has written to ``folder``, on the CPU.

    It is used like the original: called, in ``pipeline``, and with ``generate`` if it generates.
    ``precision`` is what the names of its files in ``folder/onnx`` end with (``quantized``, ``q4``,
    ``fp16``, and nothing for float32), by default the ending of the only files there. With 0
    ``threads``, onnxruntime chooses. ``trust_remote_code`` runs the code that ``folder`` has.

    Raises ``ModelNotFound`` if there are no such files, and ``UnsupportedModel`` if there are
    several and ``precision`` is not given, or if the model needs code that is not trusted.
    """
    import transformers

    folder = Path(folder)
    suffix = suffix_of(folder, precision)
    programs = load_programs(folder, suffix, threads=threads, spin=True)
    config = load_config(Source(str(folder), folder, None), trust_remote_code)
    kind: Any = classes_for(config)[0]
    with torch.device("meta"), silent():
        model = kind._from_config(config)
    model.eval()
    model.name_or_path = str(folder)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    dtype = torch.float16 if suffix == "_fp16" else torch.float32
    model.__class__ = _class_of_programs(kind, dtype, have_cache(programs))
    cache = cache_argument(kind.forward) or CACHE
    _run_in(model, functools.partial(_forward, model, programs, cache))
    if ENCODER in programs:
        encoder = model.get_encoder()
        _run_in(encoder, functools.partial(_encode, programs[ENCODER], encoder.main_input_name))
    if EMBED in programs:
        _run_in(model.base_model, functools.partial(_features, programs), "get_image_features")
    return model


def _class_of_programs(kind: Any, dtype: torch.dtype, has_cache: bool) -> Any:
    """The class ``kind`` for a model without weights: it is on the CPU, and stays there."""

    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise UnsupportedModel(f"the program of this {kind.__name__} has no cache to generate with")

    cpu = torch.device("cpu")
    changes: dict[str, Any] = {
        "has_cache": has_cache,
        "device": property(lambda self: cpu),
        "dtype": property(lambda self: dtype),
        "to": lambda self, *_, **__: self,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    if not has_cache and hasattr(kind, "generate"):
        changes["generate"] = refuse
    elif hasattr(kind, "_get_logits_processor"):
        changes["_get_logits_processor"] = lambda self, *args, **inputs: suppressed_by_index(
            kind._get_logits_processor(self, *args, **inputs)
        )
    return type(kind.__name__, (kind,), changes)


def _run_in(module: nn.Module, run: Any, method: str = "forward") -> None:
    """Let ``module`` compute by ``run``, which transformers takes for its own ``method``."""
    functools.update_wrapper(run, getattr(type(module), method))
    setattr(module, method, run)


def _encode(program: LoadedProgram, main: str, *args: Any, **inputs: Any) -> Any:
    """The states that an encoder returns."""
    from transformers.modeling_outputs import BaseModelOutput

    given = {**dict(zip((main,), args, strict=False)), **inputs}
    return BaseModelOutput(last_hidden_state=program(_ready(program, given))[STATES])


def _features(programs: LoadedPrograms, *args: Any, **inputs: Any) -> Any:
    """The features of pictures; each is apart, so that rows can be repeated for several beams."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    given = {**dict(zip((PIXELS,), args, strict=False)), **inputs}
    features: Any = picture_features(programs, given)
    apart: Any = list(features.split(1))
    return BaseModelOutputWithPooling(pooler_output=apart)


def _forward(model: Any, programs: LoadedPrograms, name: str, *args: Any, **inputs: Any) -> Any:
    """What the model returns for one call of ``forward``; its cache is the argument ``name``."""
    from transformers import DynamicCache, EncoderDecoderCache
    from transformers.utils import ModelOutput

    given = {**dict(zip((model.main_input_name,), args, strict=False)), **inputs}
    require_read(programs, given, model.config)
    decoder, feed, encoded = programs.get(MERGED) or programs[MODEL], given, None
    if not any(map(is_cached, decoder.inputs)):
        return ModelOutput(decoder(_ready(decoder, given)))
    if EMBED in programs:
        feed = {name: given.get(name) for name in (EMBEDS, MASK, POSITIONS)}
        if feed[EMBEDS] is None:
            encoded = (given.get("mm_encoder_outputs") or {}).get("image")
            features = torch.cat(encoded.pooler_output) if encoded else None
            if given.get(PIXELS) is not None:
                features = picture_features(programs, given)
            feed[EMBEDS], encoded = embedded(programs, given[IDS], features), None
            feed[POSITIONS] = _positions(model, decoder, given)
    elif ENCODER in programs:
        encoded = given.get("encoder_outputs")
        if encoded is None:
            read = {name: given[name] for name in programs[ENCODER].inputs if name in given}
            encoded = model.get_encoder()(**read)
        feed = {IDS: given[f"{DECODER}{IDS}"], ENCODED: encoded[0]}
        if given.get(MASK) is not None:
            feed[ENCODED_MASK] = given[MASK]
    cache = given.get(name, given.get(CACHE))  # transformers takes its older name, too
    if cache is None:
        cache = DynamicCache()
        cache = EncoderDecoderCache(cache, DynamicCache()) if encoded is not None else cache
    rows = len(feed[EMBEDS] if EMBED in programs else feed[IDS])
    found = decoder(_ready(decoder, {**feed, **_read(cache, decoder, rows)}))
    logits = found.pop(LOGITS)
    _write(cache, computed_values(found))
    values = {LOGITS: logits, name: cache}
    if encoded is not None:
        values["encoder_last_hidden_state"] = encoded[0]
    return ModelOutput(values)


def _positions(model: Any, decoder: LoadedProgram, given: Mapping[str, Any]) -> Any:
    """The positions of tokens, in as many rows as the program reads; ``None`` for their numbers."""
    rank = len(decoder.inputs.get(POSITIONS, ((), ""))[0])
    found = given.get(POSITIONS)
    if found is None and rank > 2:
        inputs = {name: value for name, value in given.items() if value is not None}
        found = generated_positions(model, inputs)
    return found[-3:] if found is not None and found.ndim > 2 else found


def _ready(program: LoadedProgram, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs of a program. What is not given is made as transformers makes it."""
    found = {name: given[name] for name in program.inputs if given.get(name) is not None}
    past = next((held.shape[2] for name, held in found.items() if is_cached(name)), 0)
    read = next((name for name in (IDS, EMBEDS) if name in found), None)
    for name in (name for name in program.inputs if name not in found):
        if name == ENCODED_MASK:
            found[name] = torch.ones(given[ENCODED].shape[:2], dtype=torch.int64)
        elif name in (MASK, POSITIONS, TYPES) and read is not None:
            rows, size = found[read].shape[:2]
            whole = torch.ones(rows, past + size, dtype=torch.int64)
            counted = whole.cumsum(1)[:, past:] - 1
            found[name] = {MASK: whole, POSITIONS: counted, TYPES: torch.zeros_like(counted)}[name]
        else:
            raise UnsupportedModel(f"the program needs the input {name}")
    return found


def _parts(cache: Any) -> dict[str, Any]:
    """The caches of a decoder's attentions, by what stands before the key in a name."""
    if not hasattr(cache, "self_attention_cache"):
        return {"": cache}
    return {"decoder.": cache.self_attention_cache, "encoder.": cache.cross_attention_cache}


def _read(cache: Any, decoder: LoadedProgram, rows: int) -> dict[str, torch.Tensor]:
    """The cache as inputs of a program, empty where no tokens are in it."""
    found: dict[str, torch.Tensor] = {}
    for part, held in _parts(cache).items():
        for at, layer in enumerate(held.layers):
            if layer.is_initialized and layer.keys.numel():
                found[f"{CACHE}.{at}.{part}key"] = layer.keys
                found[f"{CACHE}.{at}.{part}value"] = layer.values
    missing = (name for name in decoder.inputs if is_cached(name) and name not in found)
    return found | {name: decoder.empty(name, rows) for name in missing}


def _write(cache: Any, found: Mapping[str, torch.Tensor]) -> None:
    """Let the cache hold the keys and values that a program has returned."""
    from transformers.cache_utils import DynamicLayer

    for part, held in _parts(cache).items():
        at = 0
        while (key := f"{PRESENT}.{at}.{part}key") in found:
            if at == len(held.layers):
                held.layers.append(DynamicLayer())
            layer = held.layers[at]
            if not layer.is_initialized:
                layer.lazy_initialization(found[key], found[key])
            layer.keys, layer.values = found[key], found[f"{PRESENT}.{at}.{part}value"]
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = layer.keys.shape[2]
            if part == "encoder.":
                cache.is_updated[at] = True
            at += 1
