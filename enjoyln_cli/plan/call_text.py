"""Convert proven calls (``CallForm``) to text, for the marker and the recipe, and back.

The text, ``Net(x=float[a, b, 16], flag=True) if b <= 64 else refused``, has Python's syntax. It is
parsed with ``ast`` and never executed. Parsing any other text raises ``ValueError``.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterable
from typing import Any

from enjoyln_cli.plan.covered_calls import (
    PLAIN_TYPES,
    CallForm,
    Constant,
    Expression,
    Form,
    Items,
    Length,
    TensorForm,
    sizes_in,
)

MAX_TEXT_CHARS = 200_000
"""Longer texts are refused before they are parsed."""
KINDS = ("float", "int", "bool", "complex")

_BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}
_COMPARED = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip


def to_text(form: CallForm) -> str:
    """One form as text."""
    inside = [
        _shown(one) if name.startswith("*") else f"{name}={_shown(one)}"
        for name, one in form.arguments
    ]
    call = f"{form.owner}({', '.join(inside)})"
    if not form.conditions:
        return call
    several = len(form.conditions) > 1
    test = [
        f"({_shown_condition(one)})"
        if several and one[0] in ("and", "or")
        else _shown_condition(one)
        for one in form.conditions
    ]
    return f"{call} if {' and '.join(test)} else refused"


def _shown(form: Form) -> str:
    if isinstance(form, Constant):
        return json.dumps(form.value) if isinstance(form.value, str) else repr(form.value)
    if isinstance(form, TensorForm):
        return f"{form.kind}[{', '.join(map(str, form.sizes)) or '()'}]"
    if isinstance(form, Length):
        return str(form.size)
    inside = [_shown(one) for one in form.values]
    if form.kind not in ("dict", "tuple", "list"):
        pairs = zip(form.keys, inside, strict=True)
        return f"{form.kind}({', '.join(f'{key}={one}' for key, one in pairs)})"
    if form.kind == "dict":
        pairs = zip(form.keys, inside, strict=True)
        return f"{{{', '.join(f'{json.dumps(key)}: {one}' for key, one in pairs)}}}"
    if form.kind == "tuple":
        return f"({', '.join(inside)}{',' if len(inside) == 1 else ''})"
    return f"[{', '.join(inside)}]"


def _shown_condition(condition: Expression) -> str:
    if not isinstance(condition, tuple):
        return str(condition)
    name, *operands = condition
    left, right = (
        f"({_shown_condition(one)})"
        if isinstance(one, tuple) and one[0] not in ("min", "max")
        else _shown_condition(one)
        for one in operands
    )
    return f"{name}({left}, {right})" if name in ("min", "max") else f"{left} {name} {right}"


def summary(text: str) -> str:
    """The arguments of a form for a message: plain values as ``name=value``, others by name."""
    form = from_text(text)
    places = sum(name.startswith("*") for name, _ in form.arguments)
    named = [f"{places} by position"] if places else []
    named += [
        f"{name}={_shown(one)}" if isinstance(one, Constant) else name
        for name, one in form.arguments
        if not name.startswith("*")
    ]
    return " and ".join(filter(None, (", ".join(named[:-1]), named[-1]))) if named else "nothing"


def from_text(text: str) -> CallForm:
    """The form that ``to_text`` wrote as ``text``. Raises ``ValueError`` for any other text."""
    if len(text) > MAX_TEXT_CHARS:
        raise ValueError(f"a call has {len(text)} characters, at most {MAX_TEXT_CHARS} are read")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text:.80} is no call") from error
    conditions: tuple[Expression, ...] = ()
    if isinstance(tree, ast.IfExp):
        test = tree.test
        several = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
        conditions = tuple(map(condition_of, test.values if several else [test]))  # type: ignore
        tree = tree.body
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise ValueError(f"{text:.80} is no call")
    arguments = [(f"*{place}", _form(node)) for place, node in enumerate(tree.args)]
    for keyword in tree.keywords:
        if keyword.arg is None:
            raise ValueError(f"{text:.80} has an argument without a name")
        arguments.append((keyword.arg, _form(keyword.value)))
    known = named_sizes(arguments)
    if not {name for one in conditions for name in names_in(one)} <= known:
        raise ValueError(f"{text:.80} has a condition on sizes that it does not name")
    return CallForm(tree.func.id, tuple(arguments), conditions)


def _form(node: ast.expr) -> Form:
    if isinstance(node, ast.Constant) and type(node.value) in PLAIN_TYPES:
        return Constant(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inside = _form(node.operand)
        if isinstance(inside, Constant) and type(inside.value) in (int, float):
            return Constant(-inside.value)  # type: ignore[operator]
    if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return Constant(math.inf if node.id == "inf" else math.nan)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
        named = [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg]
        if len(named) == len(node.keywords) and node.func.id not in ("dict", "tuple", "list"):
            values = tuple(
                Length(value.id)
                if isinstance(value, ast.Name) and value.id not in ("inf", "nan")
                else _form(value)
                for _, value in named
            )
            return Items(node.func.id, values, tuple(name for name, _ in named))
    if isinstance(node, ast.Tuple | ast.List):
        kind = "tuple" if isinstance(node, ast.Tuple) else "list"
        return Items(kind, tuple(map(_form, node.elts)))
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        if all(type(key) is str for key in keys):
            return Items("dict", tuple(map(_form, node.values)), tuple(map(str, keys)))
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        inside_of = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        sizes = tuple(map(_size, inside_of))
        if node.value.id in KINDS:
            return TensorForm(node.value.id, sizes)
    raise ValueError(f"{ast.unparse(node):.80} is no form of an argument")


def _size(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError(f"{ast.unparse(node):.80} is no size")


def condition_of(node: ast.expr) -> Expression:
    """The condition on sizes that ``node`` states.

    It may hold whole numbers, names of sizes, comparisons and the operators of ``OPERATORS``. A
    divisor has to be a positive number, so that it cannot be zero. Raises ``ValueError`` for
    anything else.
    """
    if isinstance(node, ast.BoolOp):
        return _joined("and" if isinstance(node.op, ast.And) else "or", node.values)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        operands = condition_of(node.left), condition_of(node.comparators[0])
        return (_COMPARED[type(node.ops[0])], *operands)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = condition_of(node.left), condition_of(node.right)
        divides = isinstance(node.op, ast.FloorDiv | ast.Mod)
        if not divides or (type(right) is int and right > 0):
            return _BINARY[type(node.op)], left, right
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return "-", 0, condition_of(node.operand)
    if isinstance(node, ast.Call) and len(node.args) > 1 and not node.keywords:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in ("min", "max"):
            return _joined(name, node.args)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        return node.value
    raise ValueError(f"{ast.unparse(node):.80} is no condition on sizes")


def _joined(name: str, nodes: list[ast.expr]) -> Expression:
    first, *others = map(condition_of, nodes)
    for other in others:
        first = (name, first, other)
    return first


def named_sizes(arguments: Iterable[tuple[str, Form]]) -> set[str]:
    """The names of sizes in the arguments of a form."""
    sizes = (size for _, one in arguments for size in sizes_in(one))
    return {size for size in sizes if isinstance(size, str)}


def names_in(expression: Expression) -> set[str]:
    """The names of sizes in an expression."""
    if isinstance(expression, tuple):
        return {name for one in expression[1:] for name in names_in(one)}
    return {expression} if isinstance(expression, str) else set()
