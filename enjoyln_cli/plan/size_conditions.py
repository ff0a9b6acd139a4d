"""Conditions on the sizes of a call, as text: ``b <= 64`` or ``a // 2 == min(b, 9)``.

The text has Python's syntax. It is parsed with ``ast`` and evaluated here, never executed by
Python: it may have whole numbers, names of sizes, arithmetic, comparisons, ``and``, ``or``, ``min``
and ``max``.
"""

from __future__ import annotations

import ast
import operator
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

MAX_CHARS = 2_000
"""Longer conditions are refused before they are parsed."""

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def require_condition(text: str) -> str:
    """``text``, written as Python writes it. Raises ``ValueError`` if it is no condition."""
    tree = _parsed(text)
    try:
        _value(tree, defaultdict(lambda: 1))
    except ZeroDivisionError:  # for other sizes it may have a value
        pass
    except RecursionError:
        raise ValueError(f"{text:.80} is nested too deeply") from None
    return ast.unparse(tree)


def holds(condition: str, sizes: Mapping[str, int]) -> bool:
    """Whether a condition holds for sizes by name; a condition that divides by zero does not."""
    try:
        return bool(_value(_parsed(condition), sizes))
    except ZeroDivisionError:
        return False


def names_in(condition: str) -> set[str]:
    """The names of sizes in a condition."""
    names = {node.id for node in ast.walk(_parsed(condition)) if isinstance(node, ast.Name)}
    return names - {"min", "max"}


@lru_cache(maxsize=1024)
def _parsed(text: str) -> ast.expr:
    if len(text) > MAX_CHARS:
        raise ValueError(f"a condition has {len(text)} characters, at most {MAX_CHARS} are read")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        raise ValueError(f"{text:.80} is no condition on sizes") from None


def _value(node: ast.expr, sizes: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return sizes[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, sizes)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.BoolOp(op=op, values=operands):
            values = [_value(operand, sizes) for operand in operands]
            return all(values) if isinstance(op, ast.And) else any(values)
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[_, _, *_], keywords=[]):
            values = [_value(operand, sizes) for operand in node.args]
            return min(values) if name == "min" else max(values)
    raise ValueError(f"{ast.unparse(node):.80} is no condition on sizes")
