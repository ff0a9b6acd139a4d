"""Random modules, as somebody might write them: for each number the source of one, and its calls.

``write(seed)`` decides what a model is made of and writes it down as Python. ``build`` of that
makes the live model, in float64 and eval mode, with weights on which nothing passes by luck.

Every decision has a place of its own in the model (``Block.norm1``) and is drawn for it alone, so
that one can be taken back (``without``) and the rest stays: this is how ``shrunk`` finds what a
failure needs.
"""

from __future__ import annotations

import linecache
import random
import sys
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from string import Template
from textwrap import indent
from typing import Any

import random_parts as parts
import random_streams as streams
import torch
from random_parts import Part, Table
from torch import nn

WIDTHS = {8: 2, 9: 3, 12: 3, 16: 4, 24: 4}
"""Widths of the stream, with the number of heads."""
SHAPES = ((2, 5), (1, 5), (3, 9), (2, 1), (1, 12), (4, 2))
"""Batch and tokens; the first is analysed."""

KINDS = ("pre-LN", "pre-LN", "pre-LN", "sandwich", "sandwich", "parallel", "MLP alone")


@torch.library.custom_op("random_modules::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    """An op that nobody has a rule for."""
    return x / 2


@halve.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@dataclass(frozen=True)
class Call:
    """A call of the model, or of the module ``path`` in it, as text and as it would be written."""

    label: str
    inputs: str
    """The inputs in Python, as between the parentheses of a call."""
    context: str = "no_grad"
    path: str = ""

    def arguments(self, names: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def given(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, kwargs

        return eval(f"given({self.inputs})", {**names, "given": given})  # type: ignore

    def __str__(self) -> str:
        where = f".get_submodule({self.path!r})" if self.path else ""
        return f"with torch.{self.context}(): model{where}({self.inputs})  # {self.label}"


@dataclass(frozen=True)
class Written:
    """The source of a module, and what it is made of."""

    seed: int
    source: str
    decisions: Mapping[str, str]
    """What is not usual, by its place in the model."""
    example: Call
    """The call to analyse."""
    others: tuple[Call, ...]
    """In this order, on one model."""

    @property
    def tolerance(self) -> float:
        """Of a result, relative to its largest element; a call that loses more is excused."""
        model = self.source.partition(parts.PRELUDE)[2]
        lower = (".float()", "float32", ".half()", "autocast")
        return 2**-13 if any(word in model for word in lower) else 1e-9

    def build(self) -> tuple[nn.Module, dict[str, Any]]:
        """The model, and the names that its source defines."""
        name = f"random_module_{self.seed}"
        module = types.ModuleType(name)
        sys.modules[name] = module
        linecache.cache[name] = len(self.source), None, self.source.splitlines(True), name
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(self.seed)
        try:
            exec(compile(self.source, name, "exec"), module.__dict__)
            model = module.__dict__["build"]()
        finally:
            torch.set_default_dtype(before)
        return model, module.__dict__

    def __str__(self) -> str:
        made_of = "\n".join(f"#   {place}: {what}" for place, what in self.decisions.items())
        return f"# seed {self.seed}\n{made_of}\n{self.source.partition(parts.PRELUDE)[2]}"


class Decisions:
    """What is drawn for each place, and what of it is unusual."""

    def __init__(
        self, seed: int, without: Collection[str], only: Part | str | None, skip: int
    ) -> None:
        self.seed, self.without, self.only = seed, without, only
        self.skip = skip
        """The number of places that could have ``only``, before the one that has."""
        self.unusual: dict[str, str] = {}
        heats = (0.02, 0.03, 0.04, 0.05, 0.07, 0.15) if only is None else (0.0,)
        self.heat = self.at("heat").choice(heats)
        """How much of a model is unusual."""

    def at(self, place: str) -> random.Random:
        return random.Random(f"{self.seed} {place}")

    def chance(self, place: str, what: str, probability: float) -> bool:
        """Whether something unusual happens at ``place``."""
        option = streams.OPTIONS.odd.get(what)
        if self.only is not None and self.only in (what, option) and self._has_it():
            self.unusual[place] = what
            return True
        happens = self.at(place).random() < probability and place not in self.without
        if happens:
            self.unusual[place] = what
        return happens

    def _has_it(self) -> bool:
        """Whether this is the place for what alone is unusual."""
        self.skip -= 1
        return self.skip == -1

    def part(self, place: str, table: Table, probability: float) -> Part:
        """A usual part, or with ``probability`` an odd one."""
        for name, part in table.odd.items():
            if part is self.only and self._has_it():
                self.unusual[place] = name
                return part
        drawn = self.at(place)
        odd = drawn.random() < probability
        usual, unusual = (drawn.choice([*options] or [""]) for options in (table.plain, table.odd))
        if odd and place not in self.without:
            self.unusual[place] = unusual
            return table.odd[unusual]
        return table.plain[usual] if usual else Part()


class Body:
    """The class of a module while it is written."""

    def __init__(self, name: str, decisions: Decisions, known: Mapping[str, Any]) -> None:
        self.name, self.decisions, self.known = name, decisions, known
        self.top: list[str] = []
        self.init: list[str] = []
        self.forward: list[str] = []
        self.count = 0
        self.norms: list[tuple[str, bool]] = []

    def place(self, kind: str) -> str:
        self.count += 1
        return f"{self.name}.{kind}{self.count}"

    def add(self, part: Part, x: str = "h", y: str | None = None, **more: Any) -> str:
        """The lines of ``part``; returns the name of its value."""
        self.count += 1
        y = y or f"y{self.count}"
        names = {**self.known, "n": self.count, "x": x, "y": y, "h": "h", **more}
        self.top += [_filled(part.top, names)] if part.top else []
        self.init += [_filled(part.init, names)] if part.init else []
        self.forward += [_filled(part.forward, names)] if part.forward else []
        return y

    def source(self, signature: str = "self, x", base: str = "nn.Module") -> str:
        head = f"class {self.name}({base}):\n    def __init__(self):\n        super().__init__()\n"
        init = indent("\n".join(self.init), " " * 8)
        forward = indent("\n".join(self.forward), " " * 8)
        text = f"{head}{init}\n\n    def forward({signature}):\n{forward}\n"
        return "\n\n\n".join([*self.top, text])


def _filled(text: str, names: Mapping[str, Any]) -> str:
    return Template(text).substitute(names)


def write(seed: int, without: Collection[str] = (), only: Part | str | None = None) -> Written:
    """The module number ``seed``, without what is unusual at the places ``without``.

    With ``only``, an odd part or kind of block, nothing but that is unusual.
    """
    if only is None:
        return _written(Decisions(seed, without, None, 0))
    places = Decisions(seed, without, only, 1000)
    _written(places)
    skip = places.at("only").randrange(max(1, 1000 - places.skip))
    return _written(Decisions(seed, without, only, skip))


def _written(decisions: Decisions) -> Written:
    start = decisions.at("shape")
    width = start.choice(list(WIDTHS))
    known = {"d": width, "heads": WIDTHS[width], "layers": start.choice((1, 1, 2, 2, 3))}
    model = Body("Model", decisions, known)
    heat = decisions.heat

    stem_table = streams.STEMS
    tied = decisions.chance("Model.tied", "a head tied to the embedding", 3 * heat)
    tied = tied or any(part is decisions.only for part in streams.TIED.odd.values())
    if tied:
        stem = Part("$y = self.embed($x)", "self.embed = nn.Embedding(20, $d)")
        floating = False
    else:
        stem = decisions.part("Model.stem", stem_table, 3 * heat)
        names = {**stem_table.plain, **stem_table.odd}
        floating = next(name for name in names if names[name] is stem) in streams.FLOAT_STEMS
    model.add(stem, "x", "h")
    model.add(decisions.part("Model.position", streams.POSITIONS, 2 * heat), "h", "h")
    options = _options(model, 4 * heat)
    _stream(model)

    block = _block(decisions, known)
    loop = decisions.part("Model.loop", streams.LOOPS, 3 * heat)
    model.add(loop, B=block.name)
    _stream(model)
    y = norm(model, "h")
    if start.random() < 0.5:
        y = norm(model, writer(model, model.add(Part("$y = F.gelu($x)"), y), width))
    if tied:
        head = decisions.part("Model.head", streams.TIED, 1.0)
    else:
        head = decisions.part("Model.head", streams.HEADS, 2 * heat)
    y = model.add(head, y)
    y = _leak(model, y)
    edit = decisions.part("Model.edit", parts.EDITS, 0.5 * heat)
    returned = decisions.part("Model.output", streams.OUTPUTS, 3 * heat)
    model.add(returned, y, y)
    if floating or "a[0]" not in edit.init:
        model.add(edit, m="self")

    build = f"def build():\n    model = Model()\n    randomise(model, {decisions.seed % 1000})\n"
    build += "    return model.eval()\n"
    source = [block.source(), model.source(_signature(options)), build]
    example, others = _calls(decisions, options, floating, known)
    text = f"{parts.PRELUDE}\n\n" + "\n\n\n".join(source)
    return Written(decisions.seed, text, decisions.unusual, example, others)


def _stream(body: Body) -> None:
    """Something that happens to the stream, and somebody who keeps it."""
    heat = body.decisions.heat
    body.add(body.decisions.part(body.place("stream"), streams.STREAM, 3 * heat), "h", "h")
    body.add(body.decisions.part(body.place("keep"), streams.KEEPS, 1.5 * heat), "h", "h")


def _block(decisions: Decisions, known: Mapping[str, Any]) -> Body:
    body = Body("Block", decisions, known)
    heat = decisions.heat
    body.forward.append("h = x")
    kind = decisions.at("Block.kind").choice(KINDS)
    if decisions.chance("Block.kind", "post-LN", heat):
        kind = "post-LN"
    first = norm(body, "h") if kind != "post-LN" else "h"
    if kind == "MLP alone":
        _join(body, mlp(body, first))
    elif kind == "parallel":
        both = body.add(Part("$y = $x + $z"), attention(body, first), z=mlp(body, first))
        _join(body, both)
    else:
        for branch in (attention, mlp):
            y = branch(body, first)
            y = norm(body, y) if kind == "sandwich" else y
            _join(body, y)
            if kind == "post-LN":
                body.add(Part("h = $x"), norm(body, "h"))
                first = "h"
            elif branch is attention:
                _stream_small(body)
                first = norm(body, "h")
    body.forward.append("return h")
    return body


def _stream_small(body: Body) -> None:
    heat = body.decisions.heat
    body.add(body.decisions.part(body.place("stream"), streams.STREAM, heat), "h", "h")
    body.add(body.decisions.part(body.place("keep"), streams.KEEPS, heat), "h", "h")


def _join(body: Body, y: str) -> None:
    part = body.decisions.part(body.place("residual"), streams.RESIDUALS, 2 * body.decisions.heat)
    body.add(part, y, "h")


def norm(body: Body, x: str) -> str:
    """A norm of the value ``x``, in any of the ways in which it may be made and called."""
    decisions, heat = body.decisions, body.decisions.heat
    place = body.place("norm")
    if body.norms and decisions.chance(f"{place}.shared", "a norm that is there", heat):
        name, plain = body.norms[0]
        return _called(body, place, name, x, plain)
    part = decisions.part(place, parts.NORMS, 2 * heat)
    plain = part in parts.NORMS.plain.values()
    y = body.add(part, x)
    name = f"self.norm{body.count}"
    if part.forward:
        return y
    body.add(decisions.part(f"{place}.edit", parts.EDITS, 1.5 * heat), m=name)
    body.norms.append((name, plain))
    return _called(body, place, name, x, plain)


def _called(body: Body, place: str, name: str, x: str, layer_norm: bool = False) -> str:
    odd = dict(parts.CALLS.odd)
    if ".norm" in place:
        odd |= parts.ROW_CALLS.odd
    if layer_norm:
        odd |= parts.LAYER_NORM_CALLS.odd
    table = Table(parts.CALLS.plain, odd)
    part = body.decisions.part(f"{place}.call", table, 1.5 * body.decisions.heat)
    more = {"m": name, "a": name.removeprefix("self.")}
    if part is table.plain["call"] or body.decisions.at(f"{place}.call.of").random() < 0.5:
        return body.add(part, x, **more)
    y = body.add(table.plain["call"], x, **more)
    other = body.add(Part("$y = torch.linspace(-1, 2, $d).to($x).expand($x.shape)"), x)
    return body.add(Part("$y = $x + $z"), y, z=body.add(part, other, **more))


def attention(body: Body, x: str) -> str:
    return _branch(body, x, "Attention", _attention)


def _attention(body: Body, x: str) -> str:
    heat = body.decisions.heat
    place = body.place("attention")
    y = body.add(body.decisions.part(place, streams.ATTENTIONS, 3 * heat), x)
    return writer(body, y, body.known["d"])


def mlp(body: Body, x: str) -> str:
    return _branch(body, x, "MLP", _mlp)


def _mlp(body: Body, x: str) -> str:
    heat, hidden = body.decisions.heat, 2 * body.known["d"]
    y = body.add(body.decisions.part(body.place("linear"), parts.LINEARS, 2 * heat), x, o=hidden)
    y = body.add(body.decisions.part(body.place("act"), streams.ACTIVATIONS, 2 * heat), y)
    return writer(body, y, hidden)


def _branch(body: Body, x: str, name: str, inside: Callable[[Body, str], str]) -> str:
    """What a norm feeds, in lines of the block or in a module of its own."""
    decisions = body.decisions
    if decisions.at(f"{body.name}.{name}.inline").random() < 0.4:
        return inside(body, x)
    own = Body(name, decisions, body.known)
    result = inside(own, "x")
    own.forward.append(f"return {result}")
    body.top.append(own.source())
    module = f"self.{name.lower()}"
    body.init.append(f"{module} = {name}()")
    edit = decisions.part(f"{name}.edit", parts.EDITS, decisions.heat)
    body.add(edit, m=module)
    return _called(body, name, module, x)


def writer(body: Body, x: str, size: int) -> str:
    """From ``size`` features to those of the stream."""
    decisions, heat = body.decisions, body.decisions.heat
    place = body.place("writer")
    part = decisions.part(place, parts.WRITERS, 3 * heat)
    y = body.add(part, x, i=size)
    if "self.out$n = nn.Linear" in part.init and "self.out$n($x)" in part.forward:
        name = f"self.out{body.count}"
        for table in (parts.WEIGHT_EDITS, parts.EDITS):
            body.add(decisions.part(body.place("edit"), table, heat), m=name)
    return y


def _leak(body: Body, y: str) -> str:
    decisions = body.decisions
    drawn = decisions.at("Model.leak.weight")
    number, width = drawn.randrange(12), body.known["d"]
    kind = drawn.choice(("matrix", "vector"))
    weight = f"{kind}(self, {width}, {number})"
    return body.add(decisions.part("Model.leak", streams.LEAKS, 3 * decisions.heat), y, w=weight)


@dataclass(frozen=True)
class Option:
    """An optional input of ``forward``."""

    name: str
    """With stars for what takes any number of inputs."""
    default: str
    """In Python."""
    other: str
    """Another value, or keyword and value."""
    given: bool
    """Whether the analysed call has it."""
    keyword_only: bool = False

    @property
    def declared(self) -> str:
        return f"{self.name}={self.default}" if self.default else self.name


def _options(body: Body, probability: float) -> list[Option]:
    found: dict[str, Option] = {}
    for number in range(3):
        place = f"Model.option{number}"
        text = body.decisions.at(f"{place}.name").choice([*streams.OPTIONS.odd])
        if body.decisions.only is not None:
            text = next((t for t, p in streams.OPTIONS.odd.items() if p is body.decisions.only), "")
        declared, _, other = text.partition("|")
        name, _, default = declared.partition("=")
        keyword_only, name = name.startswith("*, "), name.removeprefix("*, ")
        if not text or name in found or not body.decisions.chance(place, text, probability):
            continue
        given = body.decisions.chance(f"{place}.given", "in the analysed call", 0.4)
        found[name] = Option(name, default, other, given, keyword_only)
        body.add(streams.OPTIONS.odd[text], "h", "h", o=name.lstrip("*"))
    return [*found.values()]


def _signature(options: list[Option]) -> str:
    plain = [o.declared for o in options if not o.name.startswith("*") and not o.keyword_only]
    last = [o.declared for o in options if o.keyword_only]
    rest = ["*rest"] if any(o.name == "*rest" for o in options) else ["*"] * bool(last)
    anything = ["**kwargs"] if any(o.name == "**kwargs" for o in options) else []
    return ", ".join(["self", "x", *plain, *rest, *last, *anything])


def _inputs(x: str, options: list[Option], given: Collection[str], by_place: bool = False) -> str:
    """The inputs of a call that gives the other values of the options ``given``."""
    found = [x]
    plain = [o for o in options if not o.name.startswith("*") and not o.keyword_only]
    by_place = by_place or "*rest" in given
    if by_place:
        values = [o.other if o.name in given else o.default for o in plain]
        found += values if "*rest" in given else values[: _last(plain, given)]
    for o in options:
        if o.name in given and (o.name.startswith("*") or o.keyword_only or not by_place):
            found.append(o.other if o.name.startswith("*") else f"{o.name}={o.other}")
    positional = [text for text in found if not _is_keyword(text)]
    return ", ".join(positional + [text for text in found if _is_keyword(text)])


def _is_keyword(text: str) -> bool:
    return text.partition("=")[0].isidentifier()


def _last(options: list[Option], given: Collection[str]) -> int:
    """The number of options up to the last one that is given."""
    return max((i + 1 for i, o in enumerate(options) if o.name in given), default=0)


def _calls(
    decisions: Decisions, options: list[Option], floating: bool, known: Mapping[str, Any]
) -> tuple[Call, tuple[Call, ...]]:
    """The call to analyse, and others."""
    usual = [o.name for o in options if o.given]

    def call(
        label: str,
        shape: tuple[int, int] = SHAPES[0],
        given: Collection[str] = usual,
        by_place: bool = False,
        context: str = "no_grad",
        x: str = "",
        **more: Any,
    ) -> Call:
        batch, tokens = shape
        seed = f"seed={len(found)}" + "".join(f", {k}={v}" for k, v in more.items())
        x = x + (
            f"floats({batch}, {tokens}, 5, {seed})"
            if floating
            else f"ids({batch}, {tokens}, {seed})"
        )
        text = _filled(_inputs(x, options, given, by_place), {**known, "B": batch, "T": tokens})
        found.append(Call(label, text, context))
        return found[-1]

    found: list[Call] = []
    call("analysed")
    call("other values")
    for shape in SHAPES[1:]:
        call("another shape", shape)
    if floating:
        for scale in (0.0, 1e-7, 1e-3, 1e3):
            call("another magnitude", scale=scale)
    else:
        call("one id", value=0)
    for o in options:
        toggled = {*usual} ^ {o.name}
        call(f"with{'out' * (o.name in usual)} {o.name}", given=toggled)
        call("the same, another shape", (3, 9), given=toggled)
        call("by place", given=toggled, by_place=True)
    call("all options", given=[o.name for o in options])
    call("keyword", given=[n for n in usual if n != "*rest"], x="x=")
    call("with gradients", context="enable_grad")
    call("in inference mode", context="inference_mode")
    found.append(Call("again", found[0].inputs))
    return found[0], tuple(found[1:])


def write_alone(number: int) -> Written:
    """A module in which only the odd part of this number is unusual."""
    parts_by_number = [*odd_parts().values()]
    return write(number, only=parts_by_number[number])


def odd_parts() -> dict[str, Part | str]:
    """All that may be unusual, by table and name."""
    tables = {**vars(parts), **vars(streams)}
    found: dict[str, Part | str] = {"kind: post-LN": "post-LN"}
    for name, table in tables.items():
        if isinstance(table, Table):
            found |= {f"{name.lower()}: {key}": part for key, part in table.odd.items()}
    return found
