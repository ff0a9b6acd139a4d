"""Towers of vision models in the stock classes: what turns, and which outputs change."""

from __future__ import annotations

import census
import pytest

TOWERS: list[tuple[str, str, int, set[str]]] = [
    ("swin", "SwinForImageClassification", 3, set()),
    (
        "qwen2_vl", "Qwen2VLForConditionalGeneration", 2,
        {"image_outputs.last_hidden_state", "image_outputs.pooler_output"},
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "streams", "changed"), TOWERS, ids=[tower[0] for tower in TOWERS]
)
def test_towers_turn_in_the_stock_class(
    kind: str, name: str, streams: int, changed: set[str]
) -> None:
    row = census.examine(name, kind, "rotate")
    assert row["status"] == "ok" and row["error"] <= 1e-11, row
    assert row["turned"].count("stream") == streams, row["not_turned"]
    assert set(row["changed"]) == changed
