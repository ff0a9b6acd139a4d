"""One model of every mechanism, shrunken, with random weights: folded, it computes the same."""

from __future__ import annotations

import census
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("model_type", census.FAST)
def test_a_folded_model_computes_what_it_did(model_type: str) -> None:
    """With its usual head where it has one: that is where the embedding is tied."""
    model_class = [*census.classes_of(model_type)[:2]][-1]
    row = census.examine(model_class, model_type)
    assert row["status"] == "ok", row
    assert row["norms"] > 0
    assert row["folded"] + len(row["kept"]) == row["norms"]
    assert all(reason and culprit for _, reason, culprit in row["kept"])
    assert row["audit"].keys() == {norm for norm, _, _ in row["kept"]}
    assert not [answer for answer in row["audit"].values() if answer.startswith("missing rule")]
