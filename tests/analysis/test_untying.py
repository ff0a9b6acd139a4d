"""Stored tensors decide what is tied, and a norm that is called several times counts once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AlbertConfig, GPT2Config, GPT2LMHeadModel

from enjoyln_cli.analysis.analyze import analyze_config
from enjoyln_cli.checkpoint.config import load_config
from enjoyln_cli.checkpoint.reader import open_checkpoint
from enjoyln_cli.checkpoint.source import open_source


@pytest.mark.parametrize("differ", [True, False])
def test_a_config_may_claim_a_tie_that_the_tensors_contradict(tmp_path: Path, differ: bool) -> None:
    config = GPT2Config(n_layer=1, n_embd=12, n_head=2, vocab_size=17, tie_word_embeddings=False)
    model = GPT2LMHeadModel(config)
    if not differ:
        with torch.no_grad():
            model.lm_head.weight.copy_(model.transformer.wte.weight)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    source = open_source(str(tmp_path), weights=True)
    plan = analyze_config(load_config(source), checkpoint=open_checkpoint(source)).plan
    centred = {writer.parameter for writer in plan.writers}
    assert ("transformer.wte.weight" in centred) is differ
    assert len(plan.ops) == (0 if differ else 1)
    assert len(plan.folded) == 3


def test_a_norm_of_shared_layers_counts_once() -> None:
    config = AlbertConfig(
        num_hidden_layers=3, hidden_size=24, num_attention_heads=2, intermediate_size=30
    )
    plan = analyze_config(config, model_class="AlbertModel").plan
    assert len(plan.norms) == 3
    assert [verdict.norm for verdict in plan.folded] == ["embeddings.LayerNorm"]
    assert all("output of a LayerNorm" in verdict.reason for verdict in plan.kept)
