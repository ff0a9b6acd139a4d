"""Does a random module compute the same after it was analysed and folded in memory?

Everything that leaves a call is compared, in float64: what it returns, however that is packed, what
the model, its classes and its globals keep, and what it writes into its inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import traceback
import types
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from random_writer import Call, Written, write
from torch import nn
from torch._subclasses import FakeTensor

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.kernels import literally
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.install import install
from enjoyln_cli.runtime.modules import Folded

FAILURES = ("wrong", "apart", "raised", "spoiled")
REGISTRIES = frozenset(vars(nn.Module())) - {"_buffers"}
"""What a module holds of its own: nothing that a call leaves there."""

Seen = dict[str, Any]
"""Tensors, numbers and texts by where they are."""


@dataclass(frozen=True)
class Result:
    """What became of one module."""

    seed: int
    outcome: str
    """``folded``, ``kept`` (all norms stay), ``refused``; ``wrong``, ``apart`` (wrong where a block
    is called by itself), ``raised`` (a bare exception, no refusal) or ``spoiled`` (the analysis
    left something in the model); ``invalid``: it does not run."""
    norms: int = 0
    folded: int = 0
    error: float = 0.0
    """Relative to the largest element, of the worst value of all calls."""
    call: str = ""
    where: str = ""
    """The value that differs, or the line that raised."""
    reason: str = ""
    decisions: tuple[str, ...] = ()
    skipped: int = 0
    """Calls that the original does not take either."""

    @property
    def failed(self) -> bool:
        return self.outcome in FAILURES


def fold_in_memory(model: nn.Module, plan: Plan) -> None:
    """The plan, carried out on a live model."""
    centre_parameters(model, plan)
    _install(model, [v.norm for v in plan.folded], plan)


def centre_only(model: nn.Module, plan: Plan) -> None:
    """As a stock class would compute from the same weights, with the same centring operations."""
    centre_parameters(model, plan)
    _install(model, [], plan)


def _install(model: nn.Module, norms: list[str], plan: Plan) -> None:
    install(model, norms, plan.ops, plan.entry_inputs, plan.unproven, covered=plan.covered)


def check(seed: int, without: Collection[str] = ()) -> Result:
    """Analyse and fold the module number ``seed``, and compare every call."""
    return checked(write(seed, without))


def checked(written: Written) -> Result:
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _checked(written)


def _checked(written: Written) -> Result:
    made_of = tuple(f"{place}: {what}" for place, what in written.decisions.items())
    found = functools.partial(Result, written.seed, decisions=made_of)
    try:
        original = Subject(written)
        first = Subject(written).run(written.example)
    except Exception:
        return found("invalid", where=_last_line(), reason=traceback.format_exc())
    if isinstance(first, Exception):
        text = "".join(traceback.format_exception(first))
        return found("invalid", where=repr(first)[:200], reason=text)
    analysed = Subject(written)
    args, kwargs = written.example.arguments(analysed.names)
    try:
        plan = analyze_module(analysed.model, *args, **kwargs).plan
    except EnjoyLNError as error:
        return found("refused", reason=f"{type(error).__name__}: {error}")
    except Exception as error:
        return found("raised", call="analyze", where=_last_line(), reason=_text(error))
    left = _left_behind(analysed, Subject(written).model)
    found = functools.partial(found, norms=len(plan.norms), folded=len(plan.folded))
    reason = "; ".join(sorted({v.reason for v in plan.norms if v.reason}))
    subject, refused = Subject(written), ""
    try:
        if plan.folded:
            fold_in_memory(subject.model, plan)
    except EnjoyLNError as error:
        refused = f"install: {type(error).__name__}: {error}"
    except Exception as error:
        return found("raised", call="install", where=_last_line(), reason=_text(error))
    subject.remember()
    worst, skipped = found("ok"), 0
    for call in (written.example, *written.others):
        after = subject.run(call)
        if isinstance(after, EnjoyLNError):  # neither of the two keeps anything of it
            refused = refused or f"call: {type(after).__name__}: {after}"
            continue
        before = original.run(call)
        if isinstance(before, Exception):
            skipped += 1
            continue
        if isinstance(after, Exception):
            line = "".join(traceback.format_exception(after)[-6:])
            return found("raised", call=str(call), where=line, reason=_text(after))
        error, where = difference(before, after)
        if not error <= max(written.tolerance, worst.error):
            error = max(0.0, error - _sensitivity(written, call) * 100)
        if error > worst.error:
            worst = found("ok", error=error, call=str(call), where=where)
    if worst.error > written.tolerance:
        return dataclasses.replace(worst, outcome="wrong", reason=reason, skipped=skipped)
    if plan.folded and not refused:
        try:
            apart = _sub_modules(written, plan)
        except EnjoyLNError as error:
            apart, refused = None, str(error)
        if apart:
            return found("apart", **apart)
    if left:
        return found("spoiled", call="analyze", where=left)
    outcome = "refused" if refused else "folded" if plan.folded else "kept"
    return found(outcome, error=worst.error, reason=refused or reason, skipped=skipped)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def _last_line() -> str:
    return traceback.format_exc()[-1500:]


class Subject:
    """A live model, with the names of its source and what these held at first."""

    def __init__(self, written: Written) -> None:
        self.model, self.names = written.build()
        self.remember()

    def remember(self) -> None:
        """What is held now is not what a call has changed."""
        self.at_first = dict(self.state())

    def state(self) -> Iterator[tuple[str, Any]]:
        """What is held beside parameters: by modules, by classes, by globals."""
        own = {k: v for k, v in self.names.items() if _is_own(v, self.names["__name__"])}
        yield from opened({"model": self.model, "names": own}, "")

    def run(self, call: Call) -> Seen | Exception:
        """All that leaves a call; the exception that it raises."""
        args, kwargs = call.arguments(self.names)
        module = self.model.get_submodule(call.path)
        try:
            with getattr(torch, call.context)(), literally():
                returned = module(*args, **kwargs)
                seen = dict(opened(returned, "returned"))
                seen |= dict(opened({"args": args, "kwargs": kwargs}, "inputs"))
                kept = dict(self.state())
        except Exception as error:
            return error
        changed = {k: v for k, v in kept.items() if not _same(v, self.at_first.get(k))}
        return {k: _frozen(v) for k, v in {**seen, **changed}.items()}


def _is_own(value: Any, name: str) -> bool:
    """Whether a global is one of the model's own: a container, or a class that its source makes."""
    if isinstance(value, type):
        return value.__module__ == name
    return isinstance(value, (list, dict, set, deque))


def _frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor).clone()
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.equal(a.detach(), b.detach())
    return type(a) is type(b) and not isinstance(a, torch.Tensor) and bool(a == b)


def opened(value: Any, path: str, around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every tensor, number and text in ``value``, however it is packed."""
    if isinstance(value, nn.Parameter):
        if path.startswith("returned"):
            yield path, value
        return
    if isinstance(value, torch.Tensor):
        if path.startswith(("returned", "inputs")):
            yield path, value
        else:
            yield path, value.detach().clone() if len(around) else value
        if extra := getattr(value, "__dict__", None):
            yield from opened(dict(extra), f"{path}.__dict__", (*around, id(value)))
        return
    if isinstance(value, (int, float, str)):
        yield path, value
        return
    if value is None or id(value) in around or len(around) > 12 or _of_the_tool(value):
        return
    around = (*around, id(value))
    for key, item in _items(value):
        yield from opened(item, f"{path}.{key}", around)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, nn.Module):
        yield from ((k, v) for k, v in vars(value).items() if k not in REGISTRIES and _own(k))
        yield from value._modules.items()
    elif isinstance(value, Mapping):
        yield from list(value.items())
    elif isinstance(value, (list, tuple, deque)):
        yield from enumerate(list(value))
    elif isinstance(value, (set, frozenset)):
        yield from enumerate(sorted(value, key=lambda v: str(getattr(v, "shape", v))))
    elif isinstance(value, types.GeneratorType):
        if value.gi_frame is not None:
            yield from list(value.gi_frame.f_locals.items())
    elif isinstance(value, types.MethodType):
        yield "__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        yield from ((i, c.cell_contents) for i, c in enumerate(cells) if _is_filled(c))
    elif isinstance(value, functools.partial):
        yield from (("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, type):
        yield from ((k, v) for k, v in vars(value).items() if isinstance(v, torch.Tensor))
    elif not isinstance(value, (types.ModuleType, torch.dtype, torch.device, torch.Size)):
        yield from list(getattr(value, "__dict__", {}).items())
        for cls in type(value).__mro__:
            slots = vars(cls).get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, slot) and isinstance(slot, str) and not slot.startswith("__"):
                    yield slot, getattr(value, slot)


def _of_the_tool(value: Any) -> bool:
    """Whether folding has put the value there, and so nobody else reads it."""
    return type(value).__module__.startswith("enjoyln_cli") and not isinstance(value, nn.Module)


def _own(name: str) -> bool:
    """Whether an attribute is the model's, and none that folding puts there."""
    return name not in ("centrings", "shifted", "within", "guarding", "training")


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def difference(before: Seen, after: Seen) -> tuple[float, str]:
    """The largest difference, relative to the largest element of its tensor, and where it is."""
    worst = 0.0, ""
    for key in before.keys() | after.keys():
        error = _apart(before.get(key), after.get(key))
        if error > worst[0]:
            worst = error, key
    return worst


def _apart(a: Any, b: Any) -> float:
    if isinstance(a, float) and isinstance(b, float):
        a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return 0.0 if type(a) is type(b) and a == b else math.inf
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not a.numel() or _same(a, b):
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return math.inf
    finite = torch.isfinite(a) & torch.isfinite(b)
    odd = ~finite & ~((a == b) | (a.isnan() & b.isnan()))
    if odd.any() or not finite.any():
        return math.inf if odd.any() else 0.0
    largest = float(a[finite].abs().max())
    apart = float((a[finite] - b[finite]).abs().max())
    return apart / largest if largest > 0 else (math.inf if apart > 1e-9 else 0.0)


def _sensitivity(written: Written, call: Call) -> float:
    """How far rounding of the weights alone takes the original's answer to this call."""
    worst, step = 0.0, 1e-15 if written.tolerance < 1e-6 else torch.finfo(torch.float32).eps
    for seed in range(2):
        subjects = Subject(written), Subject(written)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            for p in subjects[1].model.parameters():
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.mul_((1 + step * noise).to(p.dtype))
        for one in (written.example, *written.others):
            before, after = (subject.run(one) for subject in subjects)
            if one == call:
                break
        if isinstance(before, dict) and isinstance(after, dict):
            worst = max(worst, difference(before, after)[0])
    return worst if math.isfinite(worst) else 0.0


def _left_behind(subject: Subject, unread: nn.Module) -> str:
    """What the analysis has left in the model, and that the next call meets.

    That is a tensor without values, or a parameter that is not as in the same model ``unread``.
    """
    for path, value in subject.state():
        if isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and value.is_meta):
            return f"{path} is a {type(value).__name__} without values"
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return f"{path} is a {type(value).__name__}"
    for path, parameter in subject.model.named_parameters():
        if isinstance(parameter, FakeTensor) or parameter.is_meta:
            return f"{path} has no values"
        if not _same(parameter, unread.get_parameter(path)):
            return f"{path} has other values"
    modules = [m for m in subject.model.modules() if isinstance(m, Folded)]
    return "a norm is folded already" if modules else ""


def _sub_modules(written: Written, plan: Plan) -> dict[str, Any] | None:
    """A block called by itself computes what it does with the same weights and LayerNorm."""
    stock, subject = Subject(written), Subject(written)
    centre_only(stock.model, plan)
    fold_in_memory(subject.model, plan)
    stock.remember(), subject.remember()
    width = _width(stock.model)
    for path, module in stock.model.named_modules():
        if not type(module).__name__.startswith(("Block", "CentredBlock", "MLP", "Attention")):
            continue
        call = Call("by itself", f"floats(2, 4, {width}, seed=3)", path=path)
        before, after = stock.run(call), subject.run(call)
        if isinstance(before, Exception) or isinstance(after, EnjoyLNError):
            continue
        if isinstance(after, Exception):
            return {"call": str(call), "where": _text(after), "error": math.inf}
        error, where = difference(before, after)
        if error > max(1e-6, written.tolerance):
            return {"call": str(call), "where": where, "error": error}
    return None


def _width(model: nn.Module) -> int:
    return next(m.normalized_shape[-1] for m in model.modules() if isinstance(m, nn.LayerNorm))


def shrunk(written: Written) -> Written:
    """The same failure with as little as possible that is unusual."""
    failure = checked(written)
    without: set[str] = set()
    for place in list(written.decisions):
        smaller = write(written.seed, {*without, place})
        result = checked(smaller)
        if result.outcome == failure.outcome and bool(result.where) == bool(failure.where):
            without.add(place)
    return write(written.seed, without)
