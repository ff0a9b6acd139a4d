"""``enjoyln verify`` and ``quantize``: what is measured on the user's own inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from enjoyln_cli.checkpoint import config
from enjoyln_cli.checkpoint.open_options import OpenOptions
from enjoyln_cli.checkpoint.result_files import PRECISIONS_FILE, require_float
from enjoyln_cli.cli import help
from enjoyln_cli.cli.early_checks import (
    look_up,
    read_data,
    refuse_ignored,
    require_folded,
    require_model,
    require_new_folder,
    require_one_source,
    require_quantisable,
    require_source_of,
    with_origin,
)
from enjoyln_cli.cli.group import complain
from enjoyln_cli.cli.options import (
    FOLDER,
    json_option,
    option,
    options_of,
    quiet_option,
)
from enjoyln_cli.comparison.data_files import DataFiles, require_halves
from enjoyln_cli.publish.precisions import can_add, needs_data
from enjoyln_cli.quantisers.schemes import (
    ONNX,
    QuantizeOptions,
    require_scheme,
    require_target,
)
from enjoyln_cli.verification.verify_options import VerifyOptions

USED_FOR_QUANTISED = {
    *("against", "accept", "text", "images", "audio", "tokens", "quiet", "as_json"),
    *("revision", "token", "cache_dir", "trust_remote_code"),
}
"""The options of ``verify`` for a quantised result."""


@help.command()
@click.argument("out", type=FOLDER)
@options_of(DataFiles, "data")
@options_of(VerifyOptions, "options")
@quiet_option
@json_option
@options_of(OpenOptions, "opening")
def verify(
    out: Path,
    options: VerifyOptions,
    data: DataFiles,
    quiet: bool,
    as_json: bool,
    opening: OpenOptions,
) -> None:
    """Check that OUT gives the original's outputs: exit status 0 if so, 1 if not.

    Of a result of `enjoyln quantize` or `export`, each precision is run, and its error on your data
    equals the recorded error. No file of OUT may have changed since it was written.
    """
    is_quantised = (out / PRECISIONS_FILE).is_file()
    if is_quantised:
        refuse_ignored(USED_FOR_QUANTISED, "on ONNX files or a quantised result")
    require_one_source(data, is_needed=is_quantised and needs_data(out))
    from enjoyln_cli.cli.progress import watch_job

    require_model(options.against)
    if not is_quantised:
        require_folded(out)
    own = read_data(data, None if is_quantised else out)
    if is_quantised and needs_data(out):
        require_halves(own)
    with watch_job(quiet or as_json, f"verifying {with_origin(out)}") as watch:
        look_up(out, replace(opening, revision=None), config.require_folded)
        if options.against is None and not is_quantised:
            require_source_of(out, opening)
        listeners: dict[str, Any] = {"on_event": watch.event, "on_progress": watch.seconds}
        result: Any
        if is_quantised:
            from enjoyln_cli.quantisation.written_result import verify_quantised

            result = verify_quantised(out, own, options, opening, **listeners)
        else:
            from enjoyln_cli.verification.verify import check_result  # takes seconds

            result = check_result(out, own, options, opening, **listeners)
    from enjoyln_cli.cli.console import write_json, write_result_check, write_verification

    if as_json:
        write_json(result.to_json())
    elif not quiet:
        (write_result_check if is_quantised else write_verification)(result)
    elif not result.passed:
        complain(result.summary)
    if not result.passed:
        raise click.exceptions.Exit(1)


@help.command()
@click.argument("model", shell_complete=help.folders)
@option("-o", "--out", type=FOLDER, required=True, help="New directory, or ONNX files to add to.")
@options_of(QuantizeOptions, "options")
@options_of(DataFiles, "data", without=("samples",))
@quiet_option
@json_option
@options_of(OpenOptions, "opening")
def quantize(
    model: str,
    out: Path,
    options: QuantizeOptions,
    data: DataFiles,
    quiet: bool,
    as_json: bool,
    opening: OpenOptions,
) -> None:
    """Quantise MODEL, rotated if that is better on your data, and measure the result.

    The original and rotated candidates are compared on one half of your data (calibration data), in
    the program that the format is for. The result is measured on the other half (held-out data).
    If its error is too large, the layers that cost most get more bits. Exit status 1 if it remains
    too large.
    """
    from enjoyln_cli.cli.progress import watch_job

    require_one_source(data, is_needed=True)
    if whole := next((pattern for pattern in options.keep if set(pattern) == {"*"}), None):
        raise click.UsageError(f"--keep {whole!r} leaves no layer to quantise; name some layers.")
    require_float(model)
    require_model(model, require_quantisable)
    format_name = options.format
    adds = format_name == ONNX and can_add(out, options.force)
    require_new_folder(out, model, force=options.force or adds)
    require_scheme(options.scheme, format_name)
    require_target(options.target, options.scheme, format_name)
    own = read_data(data, model)
    require_halves(own)
    with watch_job(quiet or as_json, f"opening {with_origin(model)}") as watch:
        look_up(model, opening, require_quantisable)
        from enjoyln_cli.cli.console import say, write_json, write_quantised
        from enjoyln_cli.publish.quantised_card import loading
        from enjoyln_cli.quantisation.quantize import quantize as run  # takes seconds

        listeners: dict[str, Any] = {"on_event": watch.event, "on_progress": watch.seconds}
        result = run(model, out, own, **vars(options), **vars(opening), **listeners)
    if as_json:
        write_json(result.to_json())
    elif not quiet:
        write_quantised(result)
        where = f'"{out}"'
        say(f"next: {loading(out, where, opening.trust_remote_code)} loads it")
