"""Writes random models in the words of the grammar.

``write(seed)`` draws a production for each place in a model; ``write_alone(number)`` makes a usual
model with one odd production. ``random_check`` folds them.
"""

from __future__ import annotations

import copy
import math
import random
import re
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any

import grammar
import grammar_of_layers as layers
import grammar_of_streams as streams
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
import transformers.integrations.moe  # noqa: F401  (registers its grouped product)
from grammar import Production, Rule
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

WIDTHS = {8: 2, 9: 3, 12: 3, 16: 4}
"""Widths of the stream, with the number of heads."""
SHAPES = ((2, 5), (1, 5), (3, 9), (2, 1), (1, 12), (4, 2))
"""Batch and tokens; the first is analysed."""
KINDS = ("pre-LN", "pre-LN", "pre-LN", "sandwich", "parallel", "post-LN")


# What productions may use.


@torch.library.custom_op("random_models::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    """An op that has no rule."""
    return x / 2


@halve.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@dataclass
class Output(ModelOutput):
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


def floats(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + 0.3) * scale


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(seed))


def bools(*shape: int, seed: int = 0) -> torch.Tensor:
    return floats(*shape, seed=seed) > -0.2


def tied(module: nn.Module, other: nn.Module) -> nn.Module:
    """``module`` with the memory of the parameters of ``other``."""
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        mine.data = theirs.data
    return module


NAMES = {
    "F": F, "Output": Output, "bools": bools, "checkpoint": checkpoint,
    "copy": copy, "floats": floats, "functional_call": functional_call,
    "ids": ids, "math": math, "nn": nn, "tied": tied, "torch": torch, "types": types,
    "weight": weight,
}  # fmt: skip


# Writing a model.


@dataclass(frozen=True)
class Call:
    """The inputs of a call as Python text."""

    label: str
    inputs: str
    context: str = "no_grad"

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return eval(f"(lambda *a, **k: (a, k))({self.inputs})", dict(NAMES))  # type: ignore


@dataclass(frozen=True)
class Written:
    """The source of a model, and its calls."""

    seed: int
    source: str
    odd: Mapping[str, str]
    """The names of odd productions, by their place in the model."""
    calls: tuple[Call, ...]
    """The first is analysed; the others follow on the same model, in this order."""

    @property
    def tolerance(self) -> float:
        """The largest difference, relative to the largest element of the tensor."""
        narrow = (".float()", "float32", ".half()")
        return 2**-13 if any(word in self.source for word in narrow) else 1e-9

    def build(self) -> nn.Module:
        """The model in float64 and eval mode; no gain is 1, no bias and no mean is 0."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(self.seed)
        try:
            names = dict(NAMES)
            exec(compile(self.source, f"model {self.seed}", "exec"), names)
            model = names["Model"]().eval()  # type: ignore
        finally:
            torch.set_default_dtype(before)
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                noise = floats(*p.shape, seed=self.seed + number).to(p.dtype)
                p.copy_(0.4 + 0.7 * noise if p.ndim == 1 else 0.03 + 0.4 * noise)
        return model


class Draws:
    """Which production stands at each place; each place is drawn for itself."""

    def __init__(self, seed: int, without: Collection[str], only: Production | None) -> None:
        self.seed, self.without, self.only = seed, without, only
        self.heat = self.at("heat").choice((0.02, 0.05, 0.1, 0.2)) if only is None else 0.0
        self.odd: dict[str, str] = {}

    def at(self, place: str) -> random.Random:
        return random.Random(f"{self.seed} {place}")

    def one_of(self, place: str, rule: Rule) -> Production:
        drawn = self.at(place)
        is_odd, plain = drawn.random() < self.heat, drawn.choice(rule.plain)
        odd = drawn.choice(rule.odd)
        if self.only in rule.odd and self.only is not None and not self.odd:
            is_odd, odd = True, self.only
        if not is_odd or place in self.without:
            return plain
        self.odd[place] = odd.name
        return odd


class Body:
    """A class of the model while it is written."""

    def __init__(self, name: str, draws: Draws, sizes: Mapping[str, int]) -> None:
        self.name, self.draws, self.sizes = name, draws, sizes
        self.classes: list[str] = []
        self.init: list[str] = []
        self.forward: list[str] = []
        self.norms: list[str] = []
        self.count = 0

    def place(self, kind: str) -> str:
        self.count += 1
        return f"{self.name}.{kind}{self.count}"

    def assign(self, expression: str, y: str = "") -> str:
        """Give the value of an expression a name."""
        return self.add(Production("", "", f"y = {expression}"), "", y)

    def add(self, production: Production, x: str, y: str = "", **names: object) -> str:
        """Append the lines of a production; returns the name of its result."""
        self.count += 1
        y = y or f"y{self.count}"
        words = {**self.sizes, "x": x, "y": y, **names}
        attributes = set(re.findall(r"self\.(\w+) = ", production.init)) - {"embed"}
        words |= {f"self.{name}": f"self.{name}{self.count}" for name in attributes}
        self.init += [_replaced(production.init, words)] * bool(production.init)
        self.forward += [_replaced(production.forward, words)] * bool(production.forward)
        return y

    def draw(self, kind: str, rule: Rule, x: str, y: str = "", **names: object) -> str:
        return self.add(self.draws.one_of(self.place(kind), rule), x, y, **names)

    def source(self, signature: str = "x") -> str:
        init, forward = (indent("\n".join(lines), " " * 8) for lines in (self.init, self.forward))
        head = f"class {self.name}(nn.Module):\n    def __init__(self):\n        super().__init__()"
        text = f"{head}\n{init}\n    def forward(self, {signature}):\n{forward}\n"
        return "\n".join([*self.classes, text])


def _replaced(text: str, words: Mapping[str, object]) -> str:
    """Whole words replaced, but no keywords of calls and nothing in strings."""
    listed = sorted(words, key=len, reverse=True)
    pattern = rf"(?<![\w.\"'])({'|'.join(map(re.escape, listed))})(?![\w\"'])(?!=[^=])"
    return re.sub(pattern, lambda match: str(words[match[1]]), text)


def write(seed: int, without: Collection[str] = (), only: Production | None = None) -> Written:
    """Model number ``seed``; usual at the places ``without``, or everywhere but for ``only``."""
    draws = Draws(seed, without, only)
    start = draws.at("shape")
    width = start.choice([*WIDTHS])
    sizes = {"d": width, "heads": WIDTHS[width], "layers": start.choice((1, 1, 2))}
    block, model = Body("Block", draws, sizes), Body("Model", draws, sizes)
    _write_block(block)

    is_tied = only in streams.TIED_HEADS.odd or draws.at("tied").random() < draws.heat
    stem = grammar.STEMS.plain[0] if is_tied else draws.one_of("Model.stem", grammar.STEMS)
    model.add(stem, "x", "h")
    model.draw("position", grammar.POSITIONS, "h", "h")
    options = _add_options(model)
    model.draw("stream", streams.STREAMS, "h", "h")
    model.draw("loop", streams.LOOPS, "h", "h")
    model.draw("stream", streams.STREAMS, "h", "h")
    y = _add_norm(model, "h")
    if start.random() < 0.5:
        y = _add_norm(model, _add_writer(model, model.assign(f"F.gelu({y})"), width))
    y = model.draw("head", streams.TIED_HEADS if is_tied else streams.HEADS, y)
    leaked = f"[p for p in self.parameters() if p.ndim == 2][{start.randrange(3)}]"
    y = model.draw("leak", streams.LEAKS, y, w=leaked)
    model.draw("output", streams.OUTPUTS, y, y)

    signature = ", ".join(["x", *(f"{name}={default}" for name, default, _ in options)])
    source = f"{block.source()}\n\n{model.source(signature)}"
    usual = [name for name, _, _ in options if draws.at(name).random() < 0.4]
    calls = _calls("floats" in stem.name, options, usual)
    return Written(seed, source, draws.odd, calls)


def _write_block(block: Body) -> None:
    kind, width = block.draws.at("Block.kind").choice(KINDS), block.sizes["d"]
    block.forward.append("h = x")

    def join(y: str) -> None:
        y = _add_norm(block, y) if kind == "sandwich" else y
        block.draw("residual", streams.RESIDUALS, y, "h")
        if kind == "post-LN":
            block.assign(_add_norm(block, "h"), "h")
        block.draw("stream", streams.STREAMS, "h", "h")

    first = "h" if kind == "post-LN" else _add_norm(block, "h")
    mixed = block.draw("mixer", layers.MIXERS, first)
    mixed = _add_writer(block, mixed, width)
    if kind != "parallel":
        join(mixed)
        first = "h" if kind == "post-LN" else _add_norm(block, "h")
    block.init.append(f"self.widen = nn.Linear({width}, {2 * width})")
    hidden = block.assign(f"self.widen({first})")
    hidden = block.draw("activation", layers.ACTIVATIONS, hidden)
    hidden = _add_writer(block, hidden, 2 * width)
    join(block.assign(f"{mixed} + {hidden}") if kind == "parallel" else hidden)
    block.forward.append("return h")


def _add_writer(body: Body, x: str, width: int) -> str:
    """What computes the features of the stream from ``width`` others."""
    y = body.draw("writer", layers.WRITERS, x, i=width)
    layer = re.search(r"self\.out\d+(?= = nn\.Linear\(\d+, \d+\))", body.init[-1])
    if layer:
        body.draw("edit", grammar.WEIGHT_EDITS, "", m=layer[0])
    return y


def _add_norm(body: Body, x: str) -> str:
    """A norm of the value ``x``, in one of the ways in which it is made, edited and called."""
    place = body.place("norm")
    if body.norms and body.draws.at(f"{place}.shared").random() < body.draws.heat:
        return body.draw("call", grammar.CALLS, x, m=body.norms[0])
    production = body.draws.one_of(place, grammar.NORMS)
    if not production.init:
        name = f"Norm{body.name}{body.count}"
        lines = indent(production.forward, " " * 8)
        body.classes.append(f"class {name}(nn.LayerNorm):\n    def forward(self, x):\n{lines}\n")
        production = replace(production, init=f"self.norm = {name}(d)", forward="")
    y = body.add(production, x)
    if production.forward:
        return y
    body.norms.append(f"self.norm{body.count}")
    body.draw("edit", grammar.EDITS, "", m=body.norms[-1])
    return body.draw("call", grammar.CALLS, x, m=body.norms[-1])


def _add_options(model: Body) -> list[tuple[str, str, str]]:
    """Optional inputs of the model: their names, defaults and other values."""
    options = []
    for production in streams.OPTIONS.odd:
        place, draws = model.place("option"), model.draws
        drawn = production is draws.only or draws.at(place).random() < draws.heat
        if drawn and place not in draws.without:
            draws.odd[place] = production.name
            declared, other = production.name.split(": ", 1)
            name, default = declared.split("=")
            options.append((name, default, _replaced(other, model.sizes)))
            model.add(production, "x", "h")
    return options


def _calls(
    reads_floats: bool, options: list[tuple[str, str, str]], usual: Collection[str]
) -> tuple[Call, ...]:
    """The analysed call, which passes the options ``usual``, and others."""
    calls: list[Call] = []
    every = [name for name, _, _ in options]

    def call(
        label: str,
        shape: tuple[int, int] = SHAPES[0],
        passed: Collection[str] = usual,
        context: str = "no_grad",
        more: str = "",
    ) -> None:
        sizes = {"B": shape[0], "T": shape[1]}
        x = "floats(B, T, 5, seed=" if reads_floats else "ids(B, T, seed="
        texts = [f"{x}{len(calls)}{more})", *(f"{n}={v}" for n, _, v in options if n in passed)]
        calls.append(Call(label, _replaced(", ".join(texts), sizes), context))

    call("analysed")
    call("other values")
    for shape in SHAPES[1:]:
        call("another shape", shape)
    for scale in ("0.0", "1e-7", "1e3") if reads_floats else ():
        call("another magnitude", more=f", scale={scale}")
    for name in every:
        call(f"{name} passed or left out", passed={*usual} ^ {name})
        call(f"{name} passed or left out, another shape", (3, 9), {*usual} ^ {name})
    call("all options", passed=every)
    call("with gradients", context="enable_grad")
    return (*calls, replace(calls[0], label="again"))


def odd_productions() -> list[Production]:
    """All productions that are not usual."""
    rules = [v for m in (grammar, layers, streams) for v in vars(m).values() if isinstance(v, Rule)]
    return [production for rule in rules for production in rule.odd]


def write_alone(number: int) -> Written:
    """A usual model with the odd production of this number, where it can stand first."""
    production = odd_productions()[number]
    seeds = range(number, number + 50)
    return next(w for w in (write(seed, only=production) for seed in seeds) if w.odd)
