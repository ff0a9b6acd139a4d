"""Does an ONNX file compute the original's function, as closely as the original does?

The reference is the original in float64, as in ``verification``. The file is run on inputs of
several sizes, some with padding, and its error is compared with the rounding error of the original
in the dtype of the file: in torch, or in the same program. A file with a cache reads rows in
several steps; the original generates their last tokens. The bounds are the same as in
``verification.verify``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.calls.generation import generated_positions
from enjoyln_cli.calls.input_sets import accepted_by
from enjoyln_cli.calls.processed_inputs import image_token
from enjoyln_cli.clock import Clock
from enjoyln_cli.comparison.batches import (
    LONGEST_ROW,
    ROWS_AT_ONCE,
    Batch,
    length,
    positions,
    seeded_batches,
)
from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.comparison.metrics import (
    COARSE,
    Distance,
    distances,
    largest,
    ratios,
    relative,
    worst,
)
from enjoyln_cli.comparison.pace import Pace
from enjoyln_cli.comparison.run import Outputs, run
from enjoyln_cli.comparison.sampling import Runner, choose
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.load import refusing
from enjoyln_cli.onnx_export.cached_calls import LOGITS, POSITIONS, TYPES
from enjoyln_cli.onnx_export.cached_run import ENCODED_OUTPUT, STEPS
from enjoyln_cli.onnx_export.call import (
    DECODER,
    IDS,
    MASK,
    ROWS,
    SHORTER,
    ExportedCall,
    batches_of,
    batches_of_other_sizes,
)
from enjoyln_cli.onnx_export.runtimes import RunProgram
from enjoyln_cli.text import dtype_name
from enjoyln_cli.verification.model_to_export import PROGRAM_RATIO

CONTINUED = 2
"""Batches whose last tokens are generated. Each token takes a call of the original in float64."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The error of a file beside the original's own. Both are relative, of the worst output."""

    error: float
    original_error: float
    """The original's own rounding error in the dtype of the file."""
    ratio: float
    """Their ratio for the worst output."""
    chance: float
    """By chance, ``ratio`` may be this many times the true ratio (see ``comparison.metrics``)."""
    failure: str
    """Why the file does not pass; empty if it does."""


@dataclass(frozen=True, kw_only=True)
class RuntimeCheck(Judgement):
    """What running the file in one program showed."""

    runtime: str
    """``onnxruntime`` or ``openvino``, with its version."""
    original_ran_in: str
    """``torch``, or the program itself if that rounds more than torch."""
    rows: int
    """Number of inputs that were run."""
    dtype: str
    generated: int = 0
    """Number of tokens that the original generated."""
    same_tokens: int = 0
    """Number of these that the file generates as well, after the same tokens."""

    @property
    def summary(self) -> str:
        """The result, for a file that passes."""
        tokens = f", {self.same_tokens} of {self.generated} generated tokens the same"
        tokens = tokens if self.generated else ""
        if self.chance > COARSE:
            return f"same outputs (error {self.error:.1e}), too few to judge their rounding{tokens}"
        error = f"error {self.ratio:.2f} x the original's own"
        where = "" if self.original_ran_in == "torch" else f" in {self.original_ran_in}"
        return f"same outputs up to {self.dtype} rounding ({error}{where}){tokens}"


@dataclass(frozen=True)
class CheckedBatches:
    """Inputs, and the outputs to compare."""

    batches: list[Batch]
    outputs: tuple[str, ...]
    generated: int = 0
    """How many last tokens of the first ``CONTINUED`` batches the exact model has generated."""


@dataclass(frozen=True)
class Reference:
    """Inputs, the exact outputs, and the distances of the original's own outputs from them."""

    inputs: CheckedBatches
    exact: list[Outputs]
    own: dict[str, Distance]


def reference_of(
    load: Callable[[torch.dtype], Any],
    inputs_for: Callable[[Any], CheckedBatches],
    dtype: torch.dtype,
) -> Reference:
    """Run the original on its inputs, in float64 and in ``dtype``.

    ``load`` loads it in a dtype, ``inputs_for`` makes the inputs for the model in float64. Raises
    ``UnsupportedModel`` if the original does not run in float64.
    """
    words = (
        "the original does not run in float64, so there is no exact result to compare with; "
        "--no-verify exports it unverified"
    )
    with refusing(UnsupportedModel, words):
        model = load(torch.float64)
        inputs = inputs_for(model)
        exact = [outputs_of(model, inputs.outputs, batch) for batch in inputs.batches]
    del model
    rounded = load(dtype)
    own = (outputs_of(rounded, inputs.outputs, batch) for batch in inputs.batches)
    return Reference(inputs, exact, distances(own, exact))


def outputs_of(model: Any, names: Sequence[str], batch: Batch) -> Outputs:
    """The outputs ``names`` that a model returns for one batch."""
    return _compared(run(model, [batch])[0], batch, names)


def _compared(found: Outputs, batch: Batch, names: Sequence[str]) -> Outputs:
    """The outputs ``names``, with zeros where a row is padded on the left.

    A padded query there has nothing to attend to, and programs differ in what they return for it.
    """
    chosen = {name: found[name] for name in names}
    mask = batch.get(MASK)
    if mask is None or bool(mask[:, :1].all()):
        return chosen
    for name, value in chosen.items():
        if value.shape[:2] == mask.shape:
            padding = (mask == 0).reshape(*mask.shape, *[1] * (value.ndim - 2))
            chosen[name] = value.masked_fill(padding, 0.0)
    return chosen


def check_in(
    runtime: str,
    programs: RunProgram,
    original: Callable[[], RunProgram] | None,
    reference: Reference,
    dtype: torch.dtype,
    max_ratio: float,
) -> RuntimeCheck:
    """Compare what ``programs`` compute in ``runtime`` with the exact outputs.

    If it is further from them than torch's rounding allows, the program itself may round more than
    torch. Then ``original`` gives the original as programs, and their error is the measure; it is
    ``None`` if ``programs`` are the original. Raises what the runtime raises if it cannot run a
    program.
    """
    inputs = reference.inputs

    def computed(run: RunProgram) -> list[Outputs]:
        return [_compared(run(batch), batch, inputs.outputs) for batch in inputs.batches]

    outputs = computed(programs)
    found = distances(outputs, reference.exact)
    judged = _judge(found, reference.own, dtype, max_ratio)
    measure = "torch"
    if judged.failure and original is not None:
        own = distances(computed(original()), reference.exact)
        if not _judge(own, reference.own, dtype, PROGRAM_RATIO).failure:
            judged = _judge(found, own, dtype, max_ratio)
            measure = runtime
    generated, same_tokens = _generated(outputs, reference)
    return RuntimeCheck(
        **vars(judged),
        runtime=f"{runtime} {version(runtime)}",
        original_ran_in=measure,
        rows=sum(map(length, inputs.batches)),
        dtype=dtype_name(dtype),
        generated=generated,
        same_tokens=same_tokens,
    )


def _generated(outputs: Sequence[Outputs], reference: Reference) -> tuple[int, int]:
    """How many tokens the original generated, and how many are the most probable in ``outputs``."""
    last = reference.inputs.generated
    if not last:
        return 0, 0
    pairs = [
        tuple(one[LOGITS][:, -last - 1 : -1].argmax(-1) for one in both)
        for both in zip(outputs[:CONTINUED], reference.exact[:CONTINUED], strict=True)
    ]
    same = sum(int((got == exact).sum()) for got, exact in pairs)
    return sum(exact.numel() for _, exact in pairs), same


def _judge(
    found: dict[str, Distance], own: dict[str, Distance], dtype: torch.dtype, max_ratio: float
) -> Judgement:
    """Compare ``found``, the distances of the file's outputs, with the original's ``own``."""
    ratio = worst(ratios(found, own, dtype))
    failure = ""
    if not math.isfinite(largest(relative(own))):
        failure = "the original itself overflows in this dtype; choose another --dtype"
    elif not ratio.least <= max_ratio:
        allowed = f"{max_ratio * ratio.chance:.3g} x for so few inputs"
        limits = f"limit {max_ratio:g} x, or {allowed}"
        failure = f"error {ratio.value:.2f} x the original's own ({limits})"
    return Judgement(
        error=largest(relative(found)),
        original_error=largest(relative(own)),
        ratio=ratio.value,
        chance=ratio.chance,
        failure=failure,
    )


def batches_of_one_call(
    model: Any,
    call: ExportedCall,
    dtype: torch.dtype,
    unproven: Sequence[str],
    folder: Path,
    seed: int,
) -> CheckedBatches:
    """Inputs for a program without a cache, as ``verify`` chooses them, and of several sizes.

    ``folder`` is the directory of the result, ``unproven`` are the inputs that its proof does not
    cover.
    """
    pace = Pace(Clock(time.perf_counter, math.inf))
    one = partial(outputs_of, model, call.outputs)
    seeded = choose(Runner(model, folder, dtype, unproven, False, one), UserData(), seed, pace)
    of_call = [batch for batch in seeded.batches if batch.keys() == call.batch.keys()]
    others = batches_of_other_sizes(model, call, dtype)
    return CheckedBatches([*of_call, *others], call.outputs)


def batches_to_generate(
    model: Any, call: ExportedCall, dtype: torch.dtype, seed: int
) -> CheckedBatches:
    """Inputs for programs with a cache: pairs of rows, one of them padded, and a long row.

    ``model`` is the original in float64. It generates the last tokens of some pairs.
    """
    prefix = DECODER if model.config.is_encoder_decoder else ""
    token = image_token(model.config)
    pictured = int((call.batch[IDS][0] == token).sum()) if IDS in call.batch and token else 0
    longest = min(LONGEST_ROW, positions(model.config.get_text_config())) - pictured
    padding = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    pairs = seeded_batches(model, ROWS_AT_ONCE, seed, dtype, ROWS)
    batches = []
    for batch in (*pairs, *batches_of(model, ((1, longest),), dtype)):
        batch = _padded_on_the_left(batch)
        if prefix:  # a length of its own, and no padding: some decoders count positions by it
            ids = batch[f"{DECODER}{IDS}"][:, :-SHORTER]
            batch[f"{DECODER}{IDS}"] = torch.where(ids == (padding or 0), ids[:, -1:], ids)
        else:
            batch.pop(TYPES, None)  # a program of text takes none
            if {MASK, POSITIONS} <= {*batch, *accepted_by(model)}:
                batch[POSITIONS] = generated_positions(model, batch)
        batches.append(batch)
    generated = sum(STEPS)
    if batches[0][f"{prefix}{IDS}"].shape[1] > generated:
        few = slice(0, CONTINUED)
        batches[few] = [
            _continued(model, batch, f"{prefix}{IDS}", (padding, token)) for batch in batches[few]
        ]
    else:
        generated = 0
    outputs = tuple(name for name in call.outputs if name in (LOGITS, ENCODED_OUTPUT))
    return CheckedBatches(batches, outputs, generated)


def _padded_on_the_left(batch: Batch) -> Batch:
    """A copy of the batch with the padding of each row before its tokens."""
    if MASK not in batch:
        return dict(batch)
    counts = (batch[MASK] == 0).sum(1).tolist()
    return {
        name: torch.stack([row.roll(count) for row, count in zip(value, counts, strict=True)])
        if value.shape == batch[MASK].shape
        else value
        for name, value in batch.items()
    }


def _continued(model: Any, batch: Batch, name: str, others: Sequence[int | None]) -> Batch:
    """The batch with the most probable tokens but ``others`` in place of the last of its rows."""
    ids = batch[name].clone()
    beside = {n for n, v in batch.items() if v.shape[-2:] == ids.shape and name == IDS}
    for at in range(ids.shape[1] - sum(STEPS), ids.shape[1]):
        known = {n: v[..., :at] if n in beside else v for n, v in batch.items()}
        logits = run(model, [{**known, name: ids[:, :at]}])[0][LOGITS][:, -1]
        logits[:, [token for token in others if token is not None]] = -math.inf
        ids[:, at] = logits.argmax(-1)
    return {**batch, name: ids}
