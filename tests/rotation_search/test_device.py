"""``rotate --learn`` and ``--search`` on another device than the CPU, without such a device.

``FakeTensorMode`` of torch follows the shape, dtype and device of tensors without their values, and
raises where an operation gets tensors of two devices. ``lazy`` is the only device besides the CPU
whose gradients a build of torch without GPUs can follow. What a GPU computes is not tested here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import GPT2, ignore
from sentence_encoder import sentence_encoder
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.comparison.embedding import embedder
from enjoyln_cli.comparison.run import run
from enjoyln_cli.comparison.simulated_rounding import simulated
from enjoyln_cli.conversion.fold import prepare
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.plan.fold_options import FoldOptions, Options
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.opened_model import OpenedModel, open_model
from enjoyln_cli.rotation_search import learned_matrices
from enjoyln_cli.rotation_search.learned_matrices import learn_matrices
from enjoyln_cli.rotation_search.trials import Trials, device_named, trials

DEVICE = torch.device("lazy:0")


class Stop(Exception):
    """Raised after a step of learning."""


@contextmanager
def gpt2_trials() -> Iterator[Trials]:
    options = Options(fold=False, rotate=True, untie=True)
    ready = prepare(GPT2, None, folding=FoldOptions(options=options), on_event=ignore)
    data = UserData(tokens=tuple(tuple(range(at, at + 5)) for at in range(3, 11)))
    with trials(ready, data, "w4a8", None, ignore) as tried:
        yield tried


def test_no_operation_gets_tensors_of_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = OpenedModel.load

    def load_with_values(
        original: OpenedModel, dtype: torch.dtype, plan: Plan | None
    ) -> torch.nn.Module:
        with unset_fake_temporarily():
            rotated: torch.nn.Module = load(original, dtype, plan)
        return rotated

    def stop(*_: object) -> None:
        raise Stop

    monkeypatch.setattr(OpenedModel, "load", load_with_values)
    monkeypatch.setattr(learned_matrices, "_digest", lambda *_: "of values")
    with gpt2_trials() as tried, FakeTensorMode(allow_non_fake_inputs=True):
        placed = replace(tried, device=DEVICE)
        rotated = placed.load(placed.job.plan)
        assert {weight.device for weight in rotated.parameters()} == {DEVICE}
        with simulated(rotated, placed.rounding):
            (outputs,) = run(rotated, [placed.calibration.examples[0].batch])
        assert {value.device.type for value in outputs.values()} == {"cpu"}
        with pytest.raises(Stop):
            learn_matrices(placed, 20, tmp_path / "state", ignore, stop)


def test_a_state_of_another_device_continues_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    with gpt2_trials() as tried:
        with monkeypatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:99")
            learned = learn_matrices(tried, 1, state, ignore, ignore)
        with pytest.raises(RuntimeError, match="on a CUDA device"):
            torch.load(state, weights_only=True)
        again = learn_matrices(tried, 1, state, ignore, ignore, resume=True)
    assert again.calibration == learned.calibration


def test_a_sentence_embedding_is_computed_where_the_outputs_are(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    pipeline = open_model(str(sentence_encoder(tmp_path / "model")))
    add = embedder(pipeline.source, ignore)
    assert add is not None
    hidden = torch.zeros(1, 5, pipeline.config.hidden_size, device="meta")
    outputs = add({"last_hidden_state": hidden}, {"input_ids": hidden[..., 0].long()})
    assert outputs["sentence_embedding"].device.type == "meta"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gpu", "--device gpu is not supported; use cpu, cuda, mps"),
        ("cuda:x", "--device cuda:x is not available: Invalid device string"),
    ],
)
def test_a_device_that_is_not_there_is_refused(name: str, why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        device_named(name)
    assert device_named("cpu") == torch.device("cpu")
