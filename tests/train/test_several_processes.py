"""Processes that train together keep the same centred weights: DDP, FSDP2 and the Trainer."""

from __future__ import annotations

import json
import pickle
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import python
from live_models import ROOT
from tiny_models import PHI, live
from torch import nn

from enjoyln_cli import from_pretrained, verify
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.train import keep_centred
from enjoyln_cli.train.trained_fold import plan_in_training

MEMBER = ROOT / "tests" / "support" / "training_member.py"


def together(*commands: Sequence[object]) -> list[tuple[int, str]]:
    """Exit status and output of each process, started as by a launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": f"{len(commands)}",
        "LOCAL_WORLD_SIZE": f"{len(commands)}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
    }
    running = [
        python(*command, environment={**common, "RANK": f"{rank}"})
        for rank, command in enumerate(commands)
    ]
    said = [process.communicate()[0] for process in running]
    return [(process.wait(), text) for process, text in zip(running, said, strict=True)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out, plan = tmp_path_factory.mktemp("trained"), tmp_path_factory.mktemp("plan") / "plan"
    model = live("PhiForCausalLM", transformers.PhiConfig(**PHI))
    plan.write_bytes(pickle.dumps(plan_in_training(model)))
    found = together(*[(MEMBER, out, plan)] * 2)
    assert [status for status, _ in found] == [0, 0]
    return out, [json.loads(text.rpartition("result:")[2]) for _, text in found]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_learn_the_same(way: str, results: tuple[Path, list[dict[str, Any]]]) -> None:
    for plain, kept in (member[way] for member in results[1]):
        pairs = zip(kept["losses"], plain["losses"], strict=True)
        assert max(abs(a - b) / b for a, b in pairs) < 1e-11
        assert plain["losses"][-1] < 0.9 * plain["losses"][0]
        assert kept["rms"] and not plain["rms"]
        assert kept["mean"] < 1e-15 and plain["mean"] > 1e-2
    first, second = (member[way][1] for member in results[1])
    assert first["sum"] == second["sum"] and first["losses"] != second["losses"]


@pytest.mark.slow
def test_the_trainer_saves_a_folded_checkpoint(
    results: tuple[Path, list[dict[str, Any]]],
) -> None:
    saved = results[0] / "checkpoint-2"
    assert verify(saved, samples=4).passed
    from_pretrained(saved)


def test_weights_that_are_flattened_are_refused() -> None:
    class FullyShardedDataParallel(nn.Module):
        """As the first version of FSDP names its wrapper."""

    model = live("PhiForCausalLM", transformers.PhiConfig(**PHI))
    model.model.layers[0].mlp.wrapped = FullyShardedDataParallel()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UnsupportedModel, match="fsdp_version=2"):
        keep_centred(model)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
