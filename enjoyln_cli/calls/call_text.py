"""Proven calls (``CallSignature``) as text for people: ``Net(x=float[a, b, 16]) if b <= 64``."""

from __future__ import annotations

import json

from enjoyln_cli.plan.covered_calls import ArgumentSpec, CallSignature, Constant, Length, TensorSpec


def to_text(signature: CallSignature) -> str:
    """One signature as text."""
    arguments = (_argument(name, argument) for name, argument in signature.arguments)
    call = f"{signature.owner}({', '.join(arguments)})"
    conditions = [f"({text})" if " or " in text else text for text in signature.conditions]
    return f"{call} if {' and '.join(conditions)}" if conditions else call


def _argument(name: str, spec: ArgumentSpec) -> str:
    return _shown(spec) if name.startswith("*") else f"{name}={_shown(spec)}"


def _shown(spec: ArgumentSpec) -> str:
    if isinstance(spec, Constant):
        return json.dumps(spec.value) if isinstance(spec.value, str) else repr(spec.value)
    if isinstance(spec, TensorSpec):
        return f"{spec.kind}[{', '.join(map(str, spec.sizes)) or '()'}]"
    if isinstance(spec, Length):
        return str(spec.size)
    inside = [_shown(value) for value in spec.values]
    if spec.kind == "dict":
        pairs = zip(map(json.dumps, spec.keys), inside, strict=True)
        return f"{{{', '.join(f'{key}: {value}' for key, value in pairs)}}}"
    if spec.kind == "tuple":
        return f"({', '.join(inside)}{',' if len(inside) == 1 else ''})"
    if spec.kind == "list":
        return f"[{', '.join(inside)}]"
    pairs = zip(spec.keys, inside, strict=True)
    return f"{spec.kind}({', '.join(f'{key}={value}' for key, value in pairs)})"


def summary(signature: CallSignature) -> str:
    """The arguments of a call for a message: plain values as ``name=value``, others by name."""
    places = sum(name.startswith("*") for name, _ in signature.arguments)
    named = [f"{places} by position"] if places else []
    named += [
        _argument(name, argument) if isinstance(argument, Constant) else name
        for name, argument in signature.arguments
        if not name.startswith("*")
    ]
    return " and ".join(filter(None, (", ".join(named[:-1]), named[-1]))) if named else "nothing"
