"""Options that several commands share, and how their texts are parsed.

Torch and transformers are imported inside the functions, as in the commands.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from enjoyln_cli.checkpoint.access import HubAccess

Names = tuple[str, ...]
Options = dict[str, Any]

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

LARGEST = 2**63
"""A number of bytes that no file or memory reaches."""

FOLDER = click.Path(file_okay=False, path_type=Path)
OLD_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
DTYPES = click.Choice(["float32", "float16", "bfloat16"])
POSITIVE = click.FloatRange(min=0, min_open=True)
COMPUTE_DTYPES = click.Choice(["float64", "float32", "float16", "bfloat16"])

OPENING_FIELDS = ("revision", "trust_remote_code", "model_class", "outputs", "recipe")
"""How a model is opened: fields of ``conversion.inspect.Opening``, except ``access``."""
PLAN_FIELDS = (
    "widen_mlp",
    "widen_to",
    "merge",
    "untie",
    "rotate",
    "values",
    "seed",
    "matrix",
    "keep_norms",
)
"""What a plan may change besides centring: the fields of ``plan.Options``."""


def parse_names(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Names:
    """``a,b`` as a tuple of names, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in (value or "").split(",") if name.strip()))
    if value is not None and not names:
        raise click.BadParameter("is empty; write logits or logits,*_embeds", ctx, parameter)
    return names


model_class_option = click.option(
    "--model-class", metavar="CLASS", help="Plan for this class only, e.g. GPT2Model."
)
outputs_option = click.option(
    "--outputs",
    callback=parse_names,
    metavar="NAMES",
    help="Only these outputs must stay unchanged, such as logits,*_embeds.",
)
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
no_verify_option = click.option(
    "--no-verify", "verify", flag_value=False, default=True, help="Skip the check."
)
against_option = click.option(
    "--against", metavar="MODEL", help="The original, if it has moved since OUT was made."
)
max_ratio_option = click.option(
    "--max-ratio",
    type=POSITIVE,
    metavar="R",
    help="Fail above this error ratio (default: 1.25; 2 if OUT is rotated).",
)
jobs_option = click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Parallel workers (default: number of cores).",
)


def parse_size(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """``5GB``, ``500MB`` or plain bytes as a number of bytes (decimal units)."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", value.strip(), re.IGNORECASE)
    nbytes = float(match[1]) * UNITS[match[2].upper()] if match else 0
    if not 1 <= nbytes < LARGEST:
        raise click.BadParameter(f"{value!r} is not a size; write 5GB or 500MB", ctx, parameter)
    return int(nbytes)


Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


def all_of(*decorators: Decorator) -> Decorator:
    """A decorator that adds several options; help shows the last one first."""

    def add(command: Command) -> Command:
        for decorator in decorators:
            command = decorator(command)
        return command

    return add


def gathered(change: Callable[[Options], Options]) -> Decorator:
    """A decorator for a command that takes what ``change`` makes of its options."""

    def decorate(command: Command) -> Command:
        return functools.wraps(command)(lambda **options: command(**change(options)))

    return decorate


def _gather_opening(options: Options) -> Options:
    opening = {name: options.pop(name) for name in OPENING_FIELDS if name in options}
    token, cache_dir = options.pop("token"), options.pop("cache_dir")
    opening["access"] = HubAccess(token=token, cache_dir=cache_dir)
    allowed = {name: options.pop(name) for name in PLAN_FIELDS if name in options}
    if allowed:
        opening["options"] = checked_plan_options(**allowed)
    return {"opening": opening, **options}


hub_options = all_of(
    click.option("--trust-remote-code", is_flag=True, help="Run code that comes with MODEL."),
    click.option(
        "--cache-dir", type=FOLDER, metavar="DIR", help="Where files from the Hub are stored."
    ),
    click.option("--token", metavar="TOKEN", help="Hub token, for gated and private models."),
    click.option("--revision", metavar="REV", help="Branch, tag or commit on the Hub."),
)
opening_options = all_of(gathered(_gather_opening), hub_options)
"""The Hub's options, which a command gets in its argument ``opening``, with other such options."""


def checked_plan_options(
    widen_mlp: bool = False, widen_to: int | None = None, **others: Any
) -> Options:
    """The fields of ``plan.Options`` for these values of the command line.

    A command without ``--rotate`` that has the other options of it is ``enjoyln rotate``.
    """
    if "rotate" not in others:
        others |= {"rotate": True, "fold": False}

    if widen_to and not widen_mlp:
        raise click.UsageError("--widen-to needs --widen-mlp.")
    passed = {"--seed": others["seed"] is not None, "--no-values": not others["values"]}
    passed["--matrix"] = bool(others["matrix"])
    for name in (name for name, is_passed in passed.items() if is_passed and not others["rotate"]):
        raise click.UsageError(f"{name} needs --rotate.")
    others["seed"] = others["seed"] or 0
    others["matrix"] = str(others["matrix"] or "")
    if widen_to:
        others["widen_to"] = widen_to
    return {"widen_mlp": widen_mlp, **others}


def make_opening(opening: Options) -> Any:
    """The ``Opening`` for what ``opening_options`` has gathered. Imports torch."""
    from enjoyln_cli.conversion.inspect import Opening
    from enjoyln_cli.plan.plan import Options

    return Opening(**{**opening, "options": Options(**opening["options"])})


untie_option = click.option(
    "--untie", is_flag=True, help="Store tied weights (for example the LM head) separately."
)


rotation_options = all_of(
    click.option(
        "--values/--no-values",
        default=True,
        help="Also rotate the values of each attention head (default: yes).",
    ),
    click.option(
        "--matrix", type=FILE, help="Rotate by the matrices of this file, such as learned matrices."
    ),
    click.option("--seed", type=int, metavar="N", help="Seed of the random matrix (default: 0)."),
)
"""The options for how a model is rotated."""


plan_options = all_of(
    click.option(
        "--keep-norms",
        callback=parse_names,
        metavar="NAMES",
        help="LayerNorms to leave as they are, such as *.ln_f.",
    ),
    rotation_options,
    click.option(
        "--rotate",
        is_flag=True,
        help="Also rotate the features by an orthogonal matrix, for quantisation.",
    ),
    untie_option,
    click.option(
        "--merge",
        type=click.Choice(["bias", "affine"]),
        help="Merge norm biases (or weights and biases) into the next linear layers.",
    ),
    click.option(
        "--widen-to",
        type=click.IntRange(min=1),
        metavar="N",
        help="Round the number of hidden units up to a multiple of N (default: 8).",
    ),
    click.option(
        "--widen-mlp",
        is_flag=True,
        help="Add a few hidden units to each MLP so that more norms convert.",
    ),
)
"""The options for what a plan may change besides centring."""


def parse_samples(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> int | Path | None:
    """``8`` as a number of inputs, anything else as a file with one text on each line."""
    if value is None:
        return None
    try:
        number = int(value)
    except ValueError:
        if not Path(value).is_file():
            text = f"{value!r} is neither a number of inputs nor a file of texts"
            raise click.BadParameter(text, ctx, parameter) from None
        return Path(value)
    if number < 1:
        raise click.BadParameter(f"{value} is not a positive number of inputs", ctx, parameter)
    return number


def checking_options(seconds: float | None) -> Decorator:
    """The options that limit a check; ``seconds`` is the default time."""
    default = "no limit" if seconds is None else f"about {seconds:g}"
    return all_of(
        click.option(
            "--seconds",
            type=POSITIVE,
            metavar="S",
            help=f"Time for the check; fewer inputs run if it is short (default: {default}).",
        ),
        click.option(
            "--samples",
            callback=parse_samples,
            metavar="N|FILE",
            help="Run on N inputs, or on a FILE of texts, one on each line.",
        ),
    )


def _gather_data(options: Options) -> Options:
    data = {name: options.pop(name) for name in ("text", "images", "audio", "tokens")}
    return {"data": data, **options}


data_options = all_of(
    gathered(_gather_data),
    click.option("--tokens", type=FILE, help="Token ids: a JSON list of them on each line."),
    click.option("--audio", type=OLD_FOLDER, metavar="DIR", help="Directory of recordings."),
    click.option(
        "--image",
        "images",
        type=click.Path(exists=True, path_type=Path),
        multiple=True,
        metavar="FILE|DIR",
        help="Image, or directory of images; may be repeated, and combined with --text.",
    ),
    click.option("--text", type=FILE, help="Running text; a language model is scored on it."),
)
"""The options for the user's own inputs, passed as ``data``; only images with a text are two."""
