"""Names that no file can have, and configs that repeat an entry 100,000 times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_models import CHECKPOINTS

import enjoyln_cli
from enjoyln_cli.checkpoint.config import MAX_CONFIG_BYTES, load_config
from enjoyln_cli.checkpoint.marker import proof_of, read_marker
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.errors import BadCheckpoint, EnjoyLNError
from enjoyln_cli.recipe.read import load_recipe
from enjoyln_cli.rewrite.opened_model import open_model

GPT2 = str(CHECKPOINTS / "gpt2")
NUL = "a\0b"
MANY = 20_000


@pytest.mark.parametrize(
    "use",
    [
        lambda: enjoyln_cli.fold(GPT2, NUL),
        lambda: enjoyln_cli.fold(NUL, "out"),
        lambda: enjoyln_cli.export(GPT2, NUL),
        lambda: load_recipe(NUL),
        lambda: open_source(NUL),
    ],
)
def test_a_path_with_a_nul_character_in_python(use: Callable[[], Any]) -> None:
    with pytest.raises(EnjoyLNError) as caught:
        use()
    assert "\0" not in str(caught.value) or "cannot be read" in str(caught.value)


REPEATED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "norms": lambda plan: plan.update(norms=plan["norms"] * MANY),
    "centred_weights": lambda plan: plan.update(centred_weights=plan["centred_weights"] * MANY),
    "signatures": lambda plan: plan.update(
        covered={"signatures": [{"owner": "Net", "arguments": [["x", {"value": 1}]]}] * MANY}
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_marker_that_repeats_an_entry_is_refused(outs: dict[str, Path], name: str) -> None:
    config: dict[str, Any] = json.loads((outs["gpt2"] / "config.json").read_text())
    REPEATED[name](config["enjoyln"]["plan"])
    config["enjoyln"]["proof"] = proof_of(config["enjoyln"])
    with pytest.raises(BadCheckpoint, match=f"malformed: .*{name}: .*is repeated") as caught:
        read_marker(config)
    assert len(str(caught.value)) < 300


def test_a_config_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """It is valid JSON, and names a model that is known."""
    labels = {str(number): f"label {number}" for number in range(MAX_CONFIG_BYTES // 20)}
    config = {"model_type": "gpt2", "id2label": labels}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for use in (open_model, enjoyln_cli.from_pretrained, enjoyln_cli.analyze):
        with pytest.raises(BadCheckpoint, match=r"config.json has .* MB, and no config has more"):
            use(str(tmp_path))


def test_as_many_labels_as_imagenet_has_are_read(tmp_path: Path) -> None:
    labels = {str(number): f"a label of four words, {number}" for number in range(21_843)}
    config = {
        "model_type": "gpt2",
        "id2label": labels,
        "label2id": {v: k for k, v in labels.items()},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(open_source(str(tmp_path))).num_labels == 21_843
