"""A model that generates, as programs with a cache: what they take, and how they run in turn.

A decoder is one program, ``model``: it reads any number of new tokens after those in its cache,
which is empty at first. An encoder with its decoder is two: ``prefill`` reads the inputs of the
encoder and the first tokens of the decoder, and ``decode`` goes on from the cache that it returns.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enjoyln_cli.checkpoint.config import MARKER
from enjoyln_cli.comparison.batches import (
    LONGEST_ROW,
    ROWS_AT_ONCE,
    Batch,
    positions,
    seeded_batches,
)
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.load import silent
from enjoyln_cli.onnx_export.call import (
    DECODER,
    MASK,
    ROWS,
    SHORTER,
    TOKENS,
    ExportedCall,
    batch_of,
)
from enjoyln_cli.onnx_export.form import ExportForm
from enjoyln_cli.onnx_export.onnx_program import simplify
from enjoyln_cli.onnx_export.runtimes import RUNTIMES, Run
from enjoyln_cli.onnx_export.transformers_exporter import exported, save
from enjoyln_cli.plan.cache_argument import NAMES
from enjoyln_cli.text import first_line

IDS, POSITIONS = "input_ids", "position_ids"
LOGITS, LAST = "logits", "last_hidden_state"
ENCODED = f"encoder_{LAST}"
MODEL, PREFILL, DECODE = "model", "prefill", "decode"
"""The names of programs."""
STEPS = {MODEL: (2, 1, 1, 1), DECODE: (1, 1, 1, 1)}
"""In a check, the last tokens of a row are read in steps of so many tokens.

The exporter traces a decoder behind an encoder with one new token."""
READ, WRITTEN = "input.", "output."
"""What the exporter puts before the name of a tensor of the cache."""


@dataclass(frozen=True)
class Generation:
    """The calls of a model that generates."""

    calls: dict[str, dict[str, Any]]
    """For each program, the arguments of ``forward`` that are traced, with a cache."""
    prefix: str
    """What the names of the decoder's inputs begin with: nothing, or ``decoder_``."""


def generation_of(model: Any, dtype: torch.dtype) -> Generation:
    """The calls to trace, taken from ``generate`` on two rows, one of which is padded.

    Raises ``UnsupportedModel`` if the model does not generate with a cache of keys and values.
    """
    from transformers.exporters.utils import decompose_prefill_decode

    name = type(model).__name__
    if not model.can_generate():
        raise UnsupportedModel(
            f"{name} does not generate text, so it has no cache; export it without --with-cache"
        )
    batch = batch_of(model, ROWS, TOKENS, dtype)
    if MASK in batch:
        batch[MASK][-1, : TOKENS // 2] = 0
    try:
        with torch.no_grad(), silent():
            calls = decompose_prefill_decode(copy.copy(model), batch, multi_token_decode=True)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # any error of the model's code
        raise UnsupportedModel(
            f"{name} cannot be exported with a cache: {first_line(error.__cause__ or error)}"
        ) from error
    first, more = ({**inputs} for _, inputs in calls.values())
    cached = [leaf for leaf in leaves(more) if leaf.split(".")[0] in NAMES]
    if not cached or not all(map(is_cache, cached)):
        others = [leaf for leaf in cached if not is_cache(leaf)]
        what = f"holds {others[0]}, besides keys and values" if others else "is empty"
        raise UnsupportedModel(
            f"{name} cannot be exported with its cache, which {what}; leave out --with-cache"
        )
    if not model.config.is_encoder_decoder:
        return Generation({MODEL: more}, "")
    first = {key: value for key, value in first.items() if key != "encoder_outputs"}
    return Generation({PREFILL: {**batch, **first}, DECODE: more}, DECODER)


def with_a_cache(model: Any, call: ExportedCall, dtype: torch.dtype, seed: int) -> ExportForm:
    """A model that generates with its cache, as a directory of one or two programs.

    ``call`` is its call without a cache, by whose outputs the programs are checked. Raises
    ``UnsupportedModel`` if the model does not generate with a cache, or if the conversion does not
    keep its logits.
    """
    generation = generation_of(model, dtype)
    if LOGITS not in call.outputs:
        raise UnsupportedModel(
            f"{type(model).__name__} was converted for {', '.join(call.outputs)} alone, and "
            "generating needs its logits; fold without --outputs"
        )
    outputs = tuple(name for name in call.outputs if name in (LOGITS, ENCODED))
    config = without_marker(model.config)

    def load(runtime: str, folder: Path) -> Run:
        runs = {name: RUNTIMES[runtime](folder / f"{name}.onnx") for name in generation.calls}
        return in_turn(runs, generation)

    return ExportForm(
        call=replace(call, outputs=outputs),
        traced={
            name: partial(lambda inputs, traced: traced(**copy.deepcopy(inputs)), inputs)
            for name, inputs in generation.calls.items()
        },
        export=lambda exported, opset: programs_of(exported, generation, opset),
        graphs=lambda made: {name: one.program.graph for name, one in made.components.items()},
        save=lambda made, folder: save(made, folder, config),
        batches=lambda original: batches_to_generate(original, generation, dtype, seed),
        load=load,
    )


def without_marker(config: Any) -> Any:
    """A copy of a config that does not say that its weights were converted."""
    config = copy.deepcopy(config)
    vars(config).pop(MARKER, None)
    return config


def leaves(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors in the arguments of a call, by the names of their places."""
    from transformers.exporters.utils import get_leaf_tensors

    found: dict[str, torch.Tensor] = get_leaf_tensors(inputs)
    return found


def is_cache(name: str) -> bool:
    """Whether an input or output of a program holds keys or values of a cache."""
    path = name.removeprefix(READ).removeprefix(WRITTEN).split(".")
    return path[0] in NAMES and path[-1] in ("keys", "values")


class Called(nn.Module):
    """A model around which the exporter may put code: a folded one has to stay as it is."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.eval()

    def forward(self, **inputs: Any) -> Any:
        """What the model returns."""
        return self.model(**inputs)


def programs_of(model: Any, generation: Generation, opset: int) -> Any:
    """The ``transformers.exporters.ExportedModel`` with one ONNX program for each call.

    Attention is written as its products and its softmax, which quantisers accept. Raises
    ``UnsupportedModel`` if the model cannot be exported, or if a program would read only so many
    rows or tokens as were traced.
    """
    from transformers.exporters import ExportedModel, OnnxConfig, OnnxExporter

    model.set_attn_implementation("eager")
    # One step of the exporter's own optimiser writes rotary embeddings that take no batch.
    config = OnnxConfig(dynamic=True, opset_version=opset, optimize=False)
    parts = {}
    for name, inputs in generation.calls.items():
        made = exported(OnnxExporter(), Called(model), copy.deepcopy(inputs), config)
        simplify(made.program)
        name_axes(made.program.graph, generation.prefix)
        require_dynamic(made.program.graph, f"{generation.prefix}{IDS}", name != DECODE)
        (parts[name],) = made.components.values()
    return ExportedModel(parts, made.export_format, generation_config=model.generation_config)


def require_dynamic(graph: Any, name: str, several: bool) -> None:
    """Raise ``UnsupportedModel`` if a graph takes only so many rows of tokens as were traced.

    ``name`` is the input of token ids; ``several`` says whether it takes any number of tokens.
    """
    (shape,) = (value.shape for value in graph.inputs if value.name == name)
    if any(isinstance(size, int) for size in shape[: 1 + several]):
        raise UnsupportedModel(f"torch would fix the shape of {name} to {shape}")


def name_axes(graph: Any, prefix: str) -> None:
    """Name the dynamic axes of a graph for what they count; a fixed one gets its number."""
    import onnx_ir

    known = {
        f"{prefix}{IDS}": ("batch", f"{prefix}sequence"),
        MASK: ("batch", "sequence" if prefix else "total_sequence"),
        f"{prefix}{MASK}": ("batch", f"total_{prefix}sequence"),
    }
    names: dict[str, str] = {}
    for value in graph.inputs:
        axes: tuple[str, ...] = known.get(value.name, ())
        if is_cache(value.name):
            is_cross = "cross_attention" in value.name
            axes = ("batch", "", "encoder_sequence" if is_cross else f"past_{prefix}sequence", "")
        for axis, size in zip(axes, value.shape, strict=False):
            if axis and not isinstance(size, int):
                names.setdefault(str(size.value), axis)
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    for value in values:
        for at, size in enumerate(value.shape or ()):
            if not isinstance(size, int) and size.value is not None:
                named = re.sub(r"\bs\d+\b", lambda m: names.get(m[0], m[0]), str(size.value))
                value.shape[at] = int(named) if named.isdigit() else onnx_ir.SymbolicDim(named)


def batches_to_generate(
    model: Any, generation: Generation, dtype: torch.dtype, seed: int
) -> list[Batch]:
    """Whole rows of tokens to check the programs on: pairs, one of them padded, and a long row.

    They have the position of each token if the programs take it.
    """
    longest = min(LONGEST_ROW, positions(model.config.get_text_config()))
    pairs = seeded_batches(model, ROWS_AT_ONCE, seed, dtype, ROWS)
    batches = []
    for batch in (*pairs, batch_of(model, 1, longest, dtype)):
        batch = {n: v.flip(1) if n in (IDS, MASK) else v for n, v in batch.items()}
        if generation.prefix:  # a length of its own
            batch[f"{DECODER}{IDS}"] = batch[f"{DECODER}{IDS}"][:, :-SHORTER]
        elif MASK in batch and any(POSITIONS in call for call in generation.calls.values()):
            batch[POSITIONS] = (batch[MASK].cumsum(1) - 1).clamp(min=0)
        batches.append(batch)
    return batches


def in_turn(runs: Mapping[str, Run], generation: Generation) -> Run:
    """The programs as a function of whole rows: some tokens at once, then a few at a time.

    ``runs`` computes each program. The logits of all tokens are returned together, and the other
    outputs of the first call as they are.
    """
    prefix, (first, *_), (*_, more) = generation.prefix, runs, runs
    ids_name, mask_name = f"{prefix}{IDS}", f"{prefix}{MASK}"

    def compute(batch: Batch) -> Batch:
        ids = batch[ids_name]
        mask = batch.get(mask_name, torch.ones_like(ids))
        known = {**batch, **empty_cache(generation, len(ids))}
        outputs: list[Batch] = []
        done = 0
        for size in (max(1, ids.shape[1] - sum(STEPS[more])), *STEPS[more]):
            new = slice(done, done + size)
            known |= {name: batch[name][:, new] for name in (ids_name, POSITIONS) if name in batch}
            known[mask_name] = mask[:, : done + size]
            found = runs[more if outputs else first](known)
            for name, value in found.items():
                if is_cache(name):
                    known[f"{READ}{name.removeprefix(WRITTEN)}"] = value
            if ENCODED in found:
                known[f"encoder_outputs.{LAST}"] = found[ENCODED]
            outputs.append(found)
            done += size
        return {**outputs[0], LOGITS: torch.cat([found[LOGITS] for found in outputs], 1)}

    return compute


def empty_cache(generation: Generation, rows: int) -> Batch:
    """The cache of a decoder that has read no tokens, for a batch of ``rows``, by input name."""
    traced = leaves(generation.calls.get(MODEL, {}))
    return {
        f"{READ}{name}": value.new_zeros(rows, *value.shape[1:-2], 0, value.shape[-1])
        for name, value in traced.items()
        if is_cache(name)
    }
