"""Signatures of calls as text and as data, and conditions on their sizes."""

from __future__ import annotations

import json

import pytest

from enjoyln_cli.calls import call_text
from enjoyln_cli.plan import schema
from enjoyln_cli.plan.covered_calls import CallSignature, Constant, Items, Length, TensorSpec
from enjoyln_cli.plan.size_conditions import holds, require_condition

FORMS = {
    "Net()": CallSignature("Net", ()),
    "Net(int[()], x=float[a, 2, b])": CallSignature(
        "Net", (("*0", TensorSpec("int", ())), ("x", TensorSpec("float", ("a", 2, "b"))))
    ),
    "Net(x=bool[a]) if a * 3 % 4 > 0": CallSignature(
        "Net", (("x", TensorSpec("bool", ("a",))),), ("a * 3 % 4 > 0",)
    ),
    r"""Net(v0=None, v1=True, v2=0, v3=-3, v4=1.5, v5=inf, v6="it's \" if x\n")""": CallSignature(
        "Net",
        tuple(
            (f"v{i}", Constant(value))
            for i, value in enumerate((None, True, 0, -3, 1.5, float("inf"), "it's \" if x\n"))
        ),
    ),
    'Net(pair=(float[a],), both=[None, ()], batch={"a b": complex[2, a]}, cache=Cache(seen=a)) '
    "if (a - 1 == min(a, 9) or a // 2 <= max(a, 3)) and a != 4": CallSignature(
        "Net",
        (
            ("pair", Items("tuple", (TensorSpec("float", ("a",)),))),
            ("both", Items("list", (Constant(None), Items("tuple", ())))),
            ("batch", Items("dict", (TensorSpec("complex", (2, "a")),), ("a b",))),
            ("cache", Items("Cache", (Length("a"),), ("seen",))),
        ),
        ("a - 1 == min(a, 9) or a // 2 <= max(a, 3)", "a != 4"),
    ),
}


@pytest.mark.parametrize(("text", "signature"), FORMS.items(), ids=range(len(FORMS)))
def test_a_signature_survives_writing_and_reading(text: str, signature: CallSignature) -> None:
    assert call_text.to_text(signature) == text
    stored = json.loads(json.dumps(schema.plain(signature)))
    assert schema.read(CallSignature, stored) == signature


@pytest.mark.parametrize(
    "text",
    [
        "", "a.b", "f(a)", "a ** a", "a if a else a", "a = 1", "max(a, key=a)", "'a' < 1",
        "a < 1 < 2", "1.5 * a > 1", "(" * 1000, "-" * 1999 + "a", "1" * 5000, "a\0",
    ],
)  # fmt: skip
def test_other_text_is_no_condition(text: str) -> None:
    with pytest.raises(ValueError, match=r"condition|nested"):
        require_condition(text)


def test_a_condition_that_divides_by_zero_does_not_hold() -> None:
    condition = require_condition("a % (b - 1) == 0")
    assert condition == "a % (b - 1) == 0"
    assert holds(condition, {"a": 4, "b": 3})
    assert not holds(condition, {"a": 5, "b": 3}) and not holds(condition, {"a": 4, "b": 1})
