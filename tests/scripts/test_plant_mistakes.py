"""Mistakes that are planted in the proof are noticed by its tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from plant_mistakes import MODULES, all_mistakes, mistakes_in

ROOT = Path(__file__).resolve().parents[2]

SOURCE = """
def rule(node, axis):
    if axis.dim != 1 or node.written:
        return Opaque("features")
    return ((node, axis),)


def absorbs(node, axis):
    same = bool(node.dim == axis.dim and axis.size == 3)
    if not same:
        return False
    return True


def mean_bound(eps):
    return eps / 2
"""


def accepted(source: str) -> list[object]:
    """What the functions of a source say of features, another dimension and a part, or a mean."""
    from types import SimpleNamespace as Thing

    found: dict[str, object] = {"Opaque": lambda reason: reason}
    exec(source, found)
    return [
        (
            found["rule"](node, axis) != "features",  # type: ignore
            found["absorbs"](node, axis),  # type: ignore
            found["mean_bound"](0.1) >= 0.2,  # type: ignore
        )
        for node in (Thing(dim=1, written=False), Thing(dim=1, written=True))
        for axis in (Thing(dim=1, size=3), Thing(dim=0, size=3), Thing(dim=1, size=2))
    ]


def test_each_mistake_accepts_more_and_is_named() -> None:
    right = accepted(SOURCE)
    planted = {mistake.what: accepted(mistake.source) for mistake in mistakes_in("m", SOURCE)}
    assert planted.keys() == {
        "never refuses if axis.dim != 1 or node.written",
        "no longer refuses if axis.dim != 1",
        "no longer refuses if node.written",
        "no longer requires node.dim == axis.dim",
        "no longer requires axis.size == 3",
        "never refuses if not same",
        "mean_bound is ten times as large",
    }
    for what, answers in planted.items():
        assert answers != right, what
        for wrong, exact in zip(answers, right, strict=True):
            assert all(w or not e for w, e in zip(wrong, exact, strict=True)), what  # type: ignore


def test_every_module_of_rules_has_mistakes_to_plant() -> None:
    found = all_mistakes(MODULES)
    assert {mistake.module for mistake in found} == set(MODULES)
    assert len({mistake.text for mistake in found}) > 100


@pytest.mark.slow
def test_a_sample_of_mistakes_is_noticed() -> None:
    names = ("test_rules", "test_any_operands", "test_pulls_and_pushes")
    tests = [f"tests/proof/{name}.py" for name in names]
    script = [sys.executable, "scripts/plant_mistakes.py", "--sample", "5", "--tests", *tests]
    modules = ["--modules", "proof.rules", "proof.index_rules", "proof.weight_rules"]
    ran = subprocess.run([*script, *modules], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "5 mistakes, 0 not noticed" in ran.stdout
