"""Help with grouped options and examples, and completion for shells.

Click itself makes the suggestions for a mistyped option or command.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import click
from click.shell_completion import CompletionItem

GROUPS = ("Options", "The plan", "Your data", "The Hub", "Measuring", "Printing")
"""The sections of the help."""

EXAMPLES = {
    "report": (
        "enjoyln report gpt2",
        "enjoyln report gpt2 --why transformer.ln_f",
        "enjoyln report gpt2 --save gpt2.svg",
        "enjoyln report --model-type bert --widen-mlp",
    ),
    "fold": (
        "enjoyln fold gpt2 -o gpt2-rms",
        "enjoyln fold gpt2 --dry-run",
        "enjoyln fold google-bert/bert-base-uncased -o bert-rms --widen-mlp",
    ),
    "rotate": (
        "enjoyln rotate facebook/opt-125m -o opt-rotated --untie",
        "enjoyln rotate gpt2 -o gpt2-rotated --untie --dtype float32",
    ),
    "quantize": (
        "enjoyln quantize gpt2 -o gpt2-int8 --text book.txt",
        "enjoyln quantize facebook/opt-125m -o opt-int4 --scheme w4a8 --text book.txt",
    ),
    "verify": (
        "enjoyln verify gpt2-rms",
        "enjoyln verify gpt2-rms --text book.txt",
        "enjoyln verify bert-rms --samples sentences.txt",
        "enjoyln verify gpt2-rms --against gpt2 --json",
    ),
    "export": (
        "enjoyln export gpt2 -o gpt2-onnx",
        "enjoyln export gpt2-rms -o gpt2-onnx --dtype float16",
    ),
    "push": ("enjoyln push gpt2-rms me/gpt2-rms --dry-run", "enjoyln push gpt2-rms me/gpt2-rms"),
    "env": ("enjoyln env",),
    "completion": (
        "enjoyln completion bash >> ~/.bashrc",
        "enjoyln completion zsh >> ~/.zshrc",
        "enjoyln completion fish > ~/.config/fish/completions/enjoyln.fish",
    ),
}


class GroupedOption(click.Option):
    """An option that the help shows in the section ``group``."""

    def __init__(self, *names: Any, group: str = "Options", **written: Any) -> None:
        super().__init__(*names, **written)
        self.group = group


class Command(click.Command):
    """A command whose help shows options in groups, and ends with examples."""

    def get_short_help_str(self, limit: int = 0) -> str:
        """The whole first sentence, however long it is."""
        return super().get_short_help_str(limit=1000)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each group of ``GROUPS`` in which the command has options."""
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
        for parameter in self.get_params(ctx):
            shown = parameter.get_help_record(ctx)
            if shown and isinstance(parameter, click.Option):
                sections[getattr(parameter, "group", "Options")].append(shown)
        for name, options in sections.items():
            if options:
                with formatter.section(name):
                    formatter.write_dl(options)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, as a user types them."""
        examples = EXAMPLES.get(self.name or "", ())
        if examples:
            with formatter.section("Examples"):
                for example in examples:
                    formatter.write(f"  {example}\n")


command = partial(click.command, cls=Command)
"""Decorator for the function of a command."""


def folders(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete an argument that may be a directory."""
    return [CompletionItem(incomplete, type="dir")]
