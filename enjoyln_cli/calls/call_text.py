"""Proven calls (``CallForm``) as text for people: ``Net(x=float[a, b, 16]) if b <= 64``."""

from __future__ import annotations

import json

from enjoyln_cli.plan.covered_calls import CallForm, Constant, Form, Length, TensorForm


def to_text(form: CallForm) -> str:
    """One form as text."""
    arguments = (_argument(name, argument) for name, argument in form.arguments)
    call = f"{form.owner}({', '.join(arguments)})"
    conditions = [f"({text})" if " or " in text else text for text in form.conditions]
    return f"{call} if {' and '.join(conditions)}" if conditions else call


def _argument(name: str, form: Form) -> str:
    return _shown(form) if name.startswith("*") else f"{name}={_shown(form)}"


def _shown(form: Form) -> str:
    if isinstance(form, Constant):
        return json.dumps(form.value) if isinstance(form.value, str) else repr(form.value)
    if isinstance(form, TensorForm):
        return f"{form.kind}[{', '.join(map(str, form.sizes)) or '()'}]"
    if isinstance(form, Length):
        return str(form.size)
    inside = [_shown(value) for value in form.values]
    if form.kind == "dict":
        pairs = zip(map(json.dumps, form.keys), inside, strict=True)
        return f"{{{', '.join(f'{key}: {value}' for key, value in pairs)}}}"
    if form.kind == "tuple":
        return f"({', '.join(inside)}{',' if len(inside) == 1 else ''})"
    if form.kind == "list":
        return f"[{', '.join(inside)}]"
    pairs = zip(form.keys, inside, strict=True)
    return f"{form.kind}({', '.join(f'{key}={value}' for key, value in pairs)})"


def summary(form: CallForm) -> str:
    """The arguments of a form for a message: plain values as ``name=value``, others by name."""
    places = sum(name.startswith("*") for name, _ in form.arguments)
    named = [f"{places} by position"] if places else []
    named += [
        _argument(name, argument) if isinstance(argument, Constant) else name
        for name, argument in form.arguments
        if not name.startswith("*")
    ]
    return " and ".join(filter(None, (", ".join(named[:-1]), named[-1]))) if named else "nothing"
