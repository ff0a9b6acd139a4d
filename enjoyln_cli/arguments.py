"""What the commands take: options that several share, and how a text becomes a value.

Torch and transformers are imported inside the functions, as in ``cli``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

import click

Names = tuple[str, ...]
Options = dict[str, Any]

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

LARGEST = 2**63
"""Bytes, that no file or memory has."""

FOLDER = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
DTYPES = click.Choice(["float32", "float16", "bfloat16"])
FORMATS = click.Choice(["table", "json", "markdown", "csv"])

OPENING = (
    "revision",
    "token",
    "cache_dir",
    "trust_remote_code",
    "model_class",
    "outputs",
    "recipe",
    "stream",
)
"""How a model is opened: fields of ``convert.Opening``."""
ASKING = ("modes", "repeats")
"""What ``bench`` is to measure, the sizes apart: fields of ``bench.Asked``."""
MODES = ("eager", "fused", "compile", "cudagraphs")
"""As in ``variants``, which imports torch."""
ALLOWING = ("widen_mlp", "widen_to", "merge", "untie")
"""What a plan may change besides centring: the fields of ``plan.Options``."""


def parse_names(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Names:
    """``a,b`` as a tuple of names, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in (value or "").split(",") if name.strip()))
    if value is not None and not names:
        raise click.BadParameter("names nothing; write logits or logits,*_embeds", ctx, parameter)
    return names


model_class_option = click.option(
    "--model-class", metavar="CLASS", help="Plan for this class only, e.g. GPT2Model."
)
outputs_option = click.option(
    "--outputs",
    callback=parse_names,
    metavar="NAMES",
    help="Keep these outputs the same, not all: logits,*_embeds.",
)
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def parse_size(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """``5GB``, ``500MB`` or plain bytes as a number of bytes (decimal units)."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", value.strip(), re.IGNORECASE)
    nbytes = float(match[1]) * UNITS[match[2].upper()] if match else 0
    if not 1 <= nbytes < LARGEST:
        raise click.BadParameter(f"{value!r} is not a size; write 5GB or 500MB", ctx, parameter)
    return int(nbytes)


def hub_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The Hub's options; all that say how a model is opened arrive as one ``opening`` argument."""

    @functools.wraps(command)
    def gathered(**options: Any) -> Any:
        opening = {name: options.pop(name) for name in OPENING if name in options}
        allowed = {name: options.pop(name) for name in ALLOWING if name in options}
        if allowed:
            opening["options"] = allowing(**allowed)
        return command(opening=opening, **options)

    wrapped: Callable[..., Any] = gathered
    for option in (
        click.option("--trust-remote-code", is_flag=True, help="Run code that comes with MODEL."),
        click.option("--cache-dir", type=FOLDER, metavar="DIR", help="Cache of the Hub's files."),
        click.option("--token", metavar="TOKEN", help="Hub token, for gated and private models."),
        click.option("--revision", metavar="REV", help="Branch, tag or commit on the Hub."),
    ):
        wrapped = option(wrapped)
    return wrapped


def allowing(widen_mlp: bool, widen_to: int | None, **others: Any) -> Any:
    """The ``plan.Options`` that were asked for."""
    from enjoyln_cli.plan import PLAIN, Options

    if widen_to and not widen_mlp:
        raise click.UsageError("--widen-to goes with --widen-mlp.")
    return Options(widen_mlp=widen_mlp, widen_to=widen_to or PLAIN.widen_to, **others)


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a plan may change besides centring."""
    for option in (
        click.option("--untie", is_flag=True, help="Give what is tied, as a head, its own copy."),
        click.option(
            "--merge",
            type=click.Choice(["bias", "affine"]),
            help="Move what folded norms add, or all of their affine, into the linears after them.",
        ),
        click.option(
            "--widen-to",
            type=click.IntRange(min=1),
            metavar="N",
            help="Hidden units become a multiple of N, by default 8.",
        ),
        click.option("--widen-mlp", is_flag=True, help="Let MLPs subtract a mean: a few units."),
    ):
        command = option(command)
    return command


def parse_numbers(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """``1,8`` as whole numbers from 1 on, each once."""
    try:
        found = tuple(dict.fromkeys(int(number) for number in value.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        text = f"{value!r} is no list of whole numbers from 1 on; write 1,8"
        raise click.BadParameter(text, ctx, parameter)
    return found


def parse_modes(ctx: click.Context, parameter: click.Parameter, value: str) -> Names:
    """``eager,compile`` as a tuple of modes, each once."""
    found = parse_names(ctx, parameter, value)
    for name in found:
        if name not in MODES:
            close = get_close_matches(name, MODES, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(MODES)}."
            raise click.BadParameter(f"{name!r} is no mode; {hint}", ctx, parameter)
    return found


def bench_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What is measured; all of it arrives as one ``asked`` argument, a ``bench.Asked``."""

    @functools.wraps(command)
    def gathered(**options: Any) -> Any:
        from enjoyln_cli.bench import Asked

        asked = {name: options.pop(name) for name in ASKING}
        asked["pairs"] = tuple(product(options.pop("batch_sizes"), options.pop("seq_lens")))
        return command(asked=Asked(**asked), **options)

    wrapped: Callable[..., Any] = gathered
    for option in (
        click.option(
            "--repeats",
            type=click.IntRange(min=3),
            default=15,
            show_default=True,
            help="Turns, in each of which every model has a go.",
        ),
        click.option(
            "--mode",
            "modes",
            callback=parse_modes,
            default="eager",
            show_default=True,
            metavar="MODES",
            help=f"How the models are run: {', '.join(MODES)}.",
        ),
        click.option(
            "--seq-len",
            "seq_lens",
            callback=parse_numbers,
            default="128,512,1024",
            show_default=True,
            metavar="NUMBERS",
            help="Tokens of each row.",
        ),
        click.option(
            "--batch-size",
            "batch_sizes",
            callback=parse_numbers,
            default="1,8",
            show_default=True,
            metavar="NUMBERS",
            help="Rows of one run.",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped


def placing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where a model is while it runs, as ``from_pretrained`` has it."""
    for option in (
        click.option(
            "--max-memory",
            callback=parse_size,
            metavar="SIZE",
            help="Of the process: 8GB. All there is by default.",
        ),
        click.option(
            "--device-map",
            type=click.Choice(["auto", "cpu", "disk"]),
            default="auto",
            show_default=True,
            help="Weights: in memory as far as they fit, all of them, none.",
        ),
    ):
        command = option(command)
    return command


def push_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How a repository is made and committed to, as ``hf upload`` has it."""
    for option in (
        click.option("--yes", "-y", is_flag=True, help="Push without asking."),
        click.option("--commit-message", metavar="TEXT", help="First line of the commit."),
        click.option("--create-pr", is_flag=True, help="Push as a pull request."),
        click.option(
            "--private/--no-private", default=None, help="A new repository; public by default."
        ),
    ):
        command = option(command)
    return command


def refuse_push_options(options: Options) -> None:
    """Refuse what says how to push where nothing is pushed."""
    given = {
        "--private" if options["private"] else "--no-private": options["private"] is not None,
        "--create-pr": options["create_pr"],
        "--commit-message": options["commit_message"] is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise click.UsageError(f"{name} goes with --push-to-hub.")
