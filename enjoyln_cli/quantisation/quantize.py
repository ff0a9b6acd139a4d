"""``enjoyln quantize``: choose a candidate, quantise it, and measure what was written.

The order of the steps: read the data and run the original on it; write each candidate in the chosen
format and scheme, and run it in the program that the format is for, on the calibration data; take
the best candidate, and give more bits to some of its layers if its error is too large; measure the
result on the held-out data, beside the original quantised as the scheme says.
What is compared is what users would run; only the order in which layers get more bits is simulated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from enjoyln_cli.checkpoint.config import MARKER
from enjoyln_cli.checkpoint.open_options import OpenOptions
from enjoyln_cli.checkpoint.reader import other_files
from enjoyln_cli.checkpoint.result_files import require_float
from enjoyln_cli.clock import Progress, no_progress
from enjoyln_cli.comparison.data_files import UserData, require_halves
from enjoyln_cli.errors import UnsupportedModel, VerificationFailed
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.fs.staging import check_place, staged_output
from enjoyln_cli.garbage import collections_of_new_objects
from enjoyln_cli.plan.option_field import keywords_of
from enjoyln_cli.proof.layer_norms import layer_norms, rms_norms
from enjoyln_cli.publish.precisions import (
    MadeFrom,
    can_add,
    keep_files,
    record,
    require_addition,
    write_config,
)
from enjoyln_cli.publish.written_card import write_quantised_card
from enjoyln_cli.quantisation.candidates import (
    Candidate,
    candidates,
    rotation_plan,
)
from enjoyln_cli.quantisation.choice import Comparison
from enjoyln_cli.quantisation.examples import Example, require_every_input
from enjoyln_cli.quantisation.layer_bits import in_words
from enjoyln_cli.quantisation.load_onnx import load_onnx
from enjoyln_cli.quantisation.measure import ExactOutputs, exact_halves, perplexity_in
from enjoyln_cli.quantisation.quantised import Quantised
from enjoyln_cli.quantisation.workshop import FLOAT, Measured, Workshop, measure
from enjoyln_cli.quantisers.onnxruntime_quantiser import sums_saturate
from enjoyln_cli.quantisers.openvino_programs import write_tokenizer
from enjoyln_cli.quantisers.schemes import (
    FORMATS,
    ONNX,
    OPENVINO,
    SCHEMES,
    QuantizeOptions,
    for_target,
    require_scheme,
    require_target,
)
from enjoyln_cli.rewrite.directory import copy_files
from enjoyln_cli.rewrite.opened_model import open_model
from enjoyln_cli.scaling.ranges import norm_ranges, shifts_of
from enjoyln_cli.text import counted, number, size
from enjoyln_cli.verification.generated_tokens import Prompts, agreement, continued


@keywords_of(options=QuantizeOptions, opening=OpenOptions)
@collections_of_new_objects()  # it frees models, and need not pass over all of torch
def quantize(
    model: str | Path,
    out: str | Path,
    data: UserData,
    *,
    options: QuantizeOptions,
    opening: OpenOptions,
    on_event: Event | None = None,
    on_progress: Progress = no_progress,
) -> Quantised:
    """Quantise ``model`` (a Hub id or a directory) into the new directory ``out``.

    ``data`` are at least eight inputs. The original, the model with rotated values, and rotations
    are compared on the calibration data; the result is measured on the held-out data. If the scheme
    costs more than ``max_error``, the layers that need it get 8 bits or stay in floating point.
    Without ``max_error``, layers get more bits as long as they fit into ``max_size`` bytes.
    ``keep`` are paths of layers, or patterns.

    ``on_event`` receives stages and warnings, and ``on_progress``, after each input and each
    candidate, the seconds that this stage has taken so far and should take in all.

    Raises ``UnsupportedModel`` for a model, a format or data that cannot be used, and
    ``VerificationFailed`` if no bits of single layers keep within the limits. ``out``
    appears only if everything has succeeded.
    """
    begin, event = time.perf_counter(), on_event or default_listener
    scheme, format_name = options.scheme, options.format
    require_halves(data)
    require_target(options.target, scheme, format_name)
    settings = for_target(require_scheme(scheme, format_name), options.target, sums_saturate())
    if options.fp16_safe and format_name != ONNX:
        raise UnsupportedModel(
            f"--fp16-safe works for {ONNX}, not for {format_name}: only its files take a "
            "multiplication in front of a norm"
        )
    require_float(str(model))
    opened = open_model(str(model), opening, unfolded=True, may_be_rotated=True)
    source = opened.source
    vars(opened.config).pop(MARKER, None)  # what is written is no rotation of its source
    adds = format_name == ONNX and can_add(Path(out), options.force)
    replaces = options.force or adds
    check_place(Path(out), source=source.root, force=replaces)
    if options.keep:
        require_layers(opened.stored_class.model, options.keep)
    event("stage", f"finding which features of {opened.config.model_type} can be rotated")
    online_rotations = format_name == ONNX and settings.is_static
    plan, norms = rotation_plan(opened, event, online_rotations)
    name = plan.model_class if plan else opened.stored_class.name
    original = opened.as_class(name)
    if adds:
        made_from = MadeFrom(source.origin, source.revision, name)
        copies = {name: source.path / name for name in other_files(opened.checkpoint)}
        require_addition(Path(out), scheme, made_from, copies)
    with (
        staged_output(Path(out), source=source.root, force=replaces) as staged,
        TemporaryDirectory(dir=staged.parent) as scratch,
    ):
        bits = dict.fromkeys(options.keep, settings.bits_to_keep(format_name))
        work = Workshop(Path(scratch), format_name, settings, bits, original, norms)
        event("stage", "running the original on the data")
        float_model = original.load(torch.float32)
        used = plan.outputs if plan else ()
        choosing, held_out = exact_halves(
            float_model, opened, data, options.inputs, used, work.folder, event, on_progress
        )
        shifts = _shifts(float_model, choosing.examples, event) if options.fp16_safe else {}
        prompts = None
        if format_name == ONNX and float_model.can_generate():
            rows = [example.batch for example in held_out.examples]
            prompts = continued(float_model, rows, is_decoded=True)
        if not FORMATS[format_name].is_checkpoint:
            require_every_input(float_model, source.path, choosing.examples[0])
            event("stage", f"exporting {name}")
            examples = [*choosing.examples, *held_out.examples]
            work.trace(float_model, examples, event, shifts)
        del float_model
        unties = FORMATS[format_name].rounds_untied_heads
        tried = candidates(plan, range(options.rotations), unties)
        max_size = options.max_size
        comparison = Comparison(work, choosing, event, on_progress, max_size, tried)
        limit = settings.max_error if options.max_error is None else options.max_error
        chosen = comparison.choose()
        if max_size is not None and options.max_error is None:
            chosen = comparison.filled(chosen, max_size)
        chosen, measured = within_limits(comparison, chosen, held_out, scheme, limit, max_size)
        written, float_size = comparison.measured(chosen).size, work.size(FLOAT)
        require_gain(measured, written, float_size)
        result = Quantised(
            out=str(out),
            source=source.origin,
            revision=source.revision,
            model_class=name,
            outputs=held_out.names,
            format=format_name,
            scheme=scheme,
            target=options.target,
            suffix=settings.suffix if format_name == ONNX else "",
            chosen=chosen.title,
            candidates=tuple(comparison.found.values()),
            held_out=measured.chosen,
            plain=measured.plain,
            inputs=len(held_out.examples),
            most_inputs=options.inputs,
            chosen_by=tuple(example.digest for example in choosing.examples),
            measured_on=tuple(example.digest for example in held_out.examples),
            perplexity=perplexity_in(held_out),
            size=written,
            float_size=float_size,
            speed=measured.speed,
            float_speed=measured.float_speed,
            threads=torch.get_num_threads(),
            max_error=limit,
            max_size=max_size,
            generated=None,
            kept=options.keep,
            finer=chosen.finer,
            scaled_norms=tuple(shifts),
            seconds=time.perf_counter() - begin,
        )
        return store(work, result, staged, adds, prompts, event)


def _shifts(model: Any, examples: Sequence[Example], event: Event) -> dict[str, int]:
    """The power of two for each norm of a float32 ``model`` that overflows in float16."""
    event("stage", "looking for norms that overflow in float16")
    norms = {**layer_norms(model)[0], **rms_norms(model)}
    return shifts_of(norm_ranges(model, norms, [example.batch for example in examples]))


def within_limits(
    comparison: Comparison,
    chosen: Candidate,
    held_out: ExactOutputs,
    scheme: str,
    max_error: float,
    max_size: int | None,
) -> tuple[Candidate, Measured]:
    """The candidate to write: ``chosen``, with as many finer layers as ``max_error`` needs.

    The held-out data choose no layers. If the error is too large on them, the limit for the
    calibration data becomes lower. Raises ``VerificationFailed`` if all finer layers are not
    enough, or if the candidate has more bytes than ``max_size``.
    """
    work, limit, error = comparison.work, max_error, comparison.error(chosen)
    while True:
        if not comparison.error(chosen) <= limit:
            finer = comparison.within(limit, chosen)
            if finer is None:
                raise _too_inexact(comparison, chosen, scheme, error, max_error)
            chosen = finer
        found = comparison.measured(chosen)
        if max_size is not None and found.size > max_size:
            has_fewer = work.scheme.weight_bits > min(one.weight_bits for one in SCHEMES.values())
            way_out = "choose a --scheme with fewer bits, or " if has_fewer else "pass "
            way_out += f"a larger {'--max-error' if chosen.finer else '--max-size'}"
            raise VerificationFailed(
                f"{scheme} takes {size(found.size)}, with an error of "
                f"{number(found.differences.error)} of the outputs, which is more than --max-size "
                f"{size(max_size)}, so nothing was written; {way_out}"
            )
        if chosen.finer:
            work.write(chosen, comparison.exact.examples)
        comparison.event("stage", f"measuring on the held-out data: {chosen.title}")
        measured = measure(work, chosen, held_out, max_error, comparison.event)
        error = measured.chosen.error
        if error <= max_error:
            return chosen, measured
        known = comparison.error(chosen)
        comparison.event(
            "stage",
            f"error {number(error)} on the held-out data, {number(known)} on the calibration data: "
            "more layers get more bits; with more --inputs, fewer layers may need them",
        )
        limit = known * max_error / error


def _too_inexact(
    comparison: Comparison, chosen: Candidate, scheme: str, error: float, limit: float
) -> VerificationFailed:
    """The refusal of a result that no finer layers bring within the limit."""
    reachable = ""
    if comparison.steps:
        least = comparison.error(comparison.finer(chosen, len(comparison.steps)))
        words = in_words(comparison.steps)
        reachable = f", and still {number(least)} with {words}"
    return VerificationFailed(
        f"{scheme} costs too much: error {number(error)} of the outputs (limit {limit:g})"
        f"{reachable}, so nothing was written; choose another --scheme, or raise the limit with "
        "--max-error"
    )


def require_gain(measured: Measured, size: int, float_size: int) -> None:
    """Raise ``VerificationFailed`` if the result is slower than float32, and no smaller."""
    speed, before = measured.speed, measured.float_speed
    if speed and before and measured.is_slower and size >= float_size:
        raise VerificationFailed(
            f"nothing is gained: {speed.what} takes {number(speed.milliseconds)} ms, where float32 "
            f"takes {number(before.milliseconds)} ms, and the result is no smaller, so nothing was "
            "written; choose another --scheme or --format"
        )


def store(
    work: Workshop,
    result: Quantised,
    staged: Path,
    adds: bool,
    prompts: Prompts | None,
    event: Event,
) -> Quantised:
    """Put the chosen candidate, all other files of the original, and the record into ``staged``.

    With ``adds``, the files of the result that stands at ``result.out`` stay beside it. Returns the
    result with what it generates for the ``prompts``.
    """
    for file in work.place(result.chosen).iterdir():
        file.rename(staged / file.name)
    if adds:
        keep_files(Path(result.out), staged)
    written = {file.name for file in staged.iterdir()}
    checkpoint = work.original.checkpoint
    others = other_files(checkpoint)
    copy_files([file for file in others if file not in written], checkpoint.source.path, staged)
    if not FORMATS[result.format].is_checkpoint:
        write_config(staged, checkpoint.raw_config, result.model_class)
    if result.format == OPENVINO:
        write_tokenizer(staged, event)
    if prompts:
        trusted = work.original.trust_remote_code
        model = load_onnx(
            staged, result.suffix[1:], threads=result.threads, trust_remote_code=trusted
        )
        if model.has_cache:
            result = replace(result, generated=agreement(model, prompts))
    entry = {name: value for name, value in result.to_json().items() if name != "out"}
    error, limit = number(result.held_out.error), f"{result.max_error:g}"
    summary = f"error {error} of the outputs on {counted(result.inputs, 'input')} (limit {limit})"
    record(staged, result.scheme, entry, {"passed": True, "summary": summary})
    write_quantised_card(staged, checkpoint.source, Path(result.out).expanduser().absolute())
    return result


def require_layers(model: Any, patterns: Sequence[str]) -> None:
    """Raise ``UnsupportedModel`` for a pattern that is the path of no layer."""
    paths = [path for path, _ in model.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise UnsupportedModel(f"--keep {pattern}: no layer has such a path")
