"""The marker of a result: what it remembers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fold_cases import plan_for
from stored_files import opened

from enjoyln_cli.checkpoint.marker import marker, proof_of, read_marker
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.plan.axis import Axis


def test_a_hub_id_is_remembered_with_its_commit(source: Path) -> None:
    hub = SimpleNamespace(model="org/model", revision="abc", path=source)
    entry = marker(plan_for({}, {}), hub)  # type: ignore[arg-type]
    assert (entry["source"], entry["revision"]) == ("org/model", "abc")
    assert read_marker({"enjoyln": json.loads(json.dumps(entry))}).revision == "abc"


def axis(*numbers: int) -> dict[str, int]:
    return dict(zip(("dim", "start", "outer", "size", "inner"), numbers, strict=True))


def op(module: str, place: str, *numbers: int) -> dict[str, Any]:
    return {"module": module, "place": place, "axis": axis(*numbers)}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": True},
        {"plan": {"fused": 3}},
        {"revision": 3},
        {"plan": {"subtractions": [op("a", "between", -1, 0, 1, 8, 1)]}},
        {"plan": {"subtractions": [{"module": "a", "place": "output", "axis": {"dim": -1}}]}},
        {"plan": {"norms": 3 * [{"norm": "a", "status": "in_weights"}]}},
        {"note": "mine"},
        {"plan": {"covered": {"forms": ["x"]}}},
        {"plan": {"widened": [{"first": "a", "bias": None, "second": "b"}]}},
        {"plan": {"subtractions": [op("", "output", -1, 0, 1, 8, 1)]}},
        {"plan": {"subtractions": [op("a", "output", 9, 0, 1, 8, 1)]}},
        {"plan": {"subtractions": [op("a", "output", -1, -1, 1, 8, 1)]}},
        {"plan": {"subtractions": [op("a", "output", -1, 0, 0, 8, 1)]}},
        {"plan": {"centred_weights": [{"parameter": "a", "axis": axis(0, 0, 1, 2**62, 2)}]}},
        {"plan": {"centred_weights": [{"parameter": "a", "axis": axis(-1, 0, 1, 8, 1)}]}},
        {"proof": None},
    ],
    ids=str,
)
def test_a_malformed_marker_is_refused(source: Path, change: dict[str, Any]) -> None:
    entry = marker(plan_for({}, {}), opened(source).source)
    read_marker({"enjoyln": entry})
    change = change | ({"plan": {**entry["plan"], **change["plan"]}} if "plan" in change else {})
    with pytest.raises(BadCheckpoint) as caught:
        read_marker({"enjoyln": {**entry, **change}})
    assert "\n" not in str(caught.value)
    if "proof" not in change:
        assert "malformed" in str(caught.value) or "version" in str(caught.value)


@pytest.mark.parametrize("key", ["centred_weights", "subtractions"])
def test_a_marker_that_lacks_an_entry_is_refused(source: Path, key: str) -> None:
    """Also if its digest fits: a missing entry must not be taken for an empty entry."""
    entry = marker(plan_for({}, {}), opened(source).source)
    del entry["plan"][key]
    with pytest.raises(BadCheckpoint, match=f"malformed: .*the key .*{key} is missing"):
        read_marker({"enjoyln": {**entry, "proof": proof_of(entry)}})


@pytest.mark.parametrize(
    "change",
    [
        {"norms": [{"norm": "transformer.ln_f", "status": "in_weights"}]},
        {"centred_weights": []},
    ],
    ids=str,
)
def test_a_marker_that_somebody_changed_is_refused(source: Path, change: dict[str, Any]) -> None:
    entry = marker(
        plan_for({"a": torch.ones(8)}, {"a": (Axis(0, 0, 1, 8, 1),)}), opened(source).source
    )
    moved = {**entry, "source": "elsewhere", "revision": "abc", "tool": "enjoyln 9"}
    assert read_marker({"enjoyln": moved}).source == "elsewhere"
    with pytest.raises(BadCheckpoint, match="edited after the fold"):
        read_marker({"enjoyln": {**entry, "plan": {**entry["plan"], **change}}})
