"""Code that comes with a checkpoint: its folded result is right, and runs RMSNorm where proven."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from custom_code import custom_checkpoint
from live_models import computes_rms
from rounding import IDENTITY, relative
from transformers import AutoModelForCausalLM

import enjoyln_cli
from enjoyln_cli import UnsupportedModel, fold
from enjoyln_cli.checkpoint.marker import proof_of, read_marker
from enjoyln_cli.errors import BadCheckpoint, UnprovenCall
from enjoyln_cli.plan.cache_argument import CACHE, cache_argument
from enjoyln_cli.runtime.modules import Folded

OWN = """
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, hidden_size=16, loud=False, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size, self.hidden_size, self.loud = 50, hidden_size, loud


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 32), nn.Linear(32, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        d = config.hidden_size
        self.wte, self.style, self.head = nn.Embedding(50, d), nn.Embedding(4, d), nn.Linear(d, 50)
        self.h, self.norm = nn.ModuleList([Block(d), Block(d)]), nn.LayerNorm(d)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, SIGNATURE, labels=None, **kwargs):
        x = self.wte(input_ids)
        x = x.cumsum(-1) if self.config.loud else x
        BRANCH
        for block in self.h:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)
"""


def own_checkpoint(folder: Path, signature: str, branch: str) -> Path:
    code = OWN.replace("SIGNATURE", signature).replace("BRANCH", branch)
    return custom_checkpoint(folder, code, hidden_size=16)


IDS = torch.arange(27).reshape(3, 9)
READS = "if style_labels is not None: x = x * self.style(style_labels)[:, None]"


@pytest.fixture(scope="module")
def own_result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result of code that reads ``style_labels``; its checkpoint is ``source`` beside it."""
    folder = tmp_path_factory.mktemp("reads")
    source = own_checkpoint(folder / "source", "style_labels=None", READS)
    assert fold(source, folder / "out", trust_remote_code=True).plan.folded
    return folder / "out"


@pytest.mark.slow
def test_custom_code_on_disk_is_right_with_other_inputs(
    own_result: Path,
) -> None:
    given, out = {"style_labels": torch.tensor([1, 2, 3])}, own_result
    load: dict[str, Any] = {"trust_remote_code": True, "dtype": torch.float64}
    original: Any = AutoModelForCausalLM.from_pretrained(out.with_name("source"), **load)
    model = enjoyln_cli.from_pretrained(out, **load)
    masked = {"attention_mask": torch.ones_like(IDS)}
    for usual in ({}, masked, {"labels": IDS}, {**masked, "labels": IDS}):
        assert computes_rms(model, IDS, **usual)
    for named in ({}, given, {**masked, **given}):
        with torch.no_grad():
            got, expected = (one(IDS, **named).logits for one in (model, original))
        assert relative(got, expected) <= IDENTITY, sorted(named)


@pytest.mark.slow
def test_a_check_that_makes_calls_that_are_not_proven_says_so(tmp_path: Path) -> None:
    longer = "x = x.cumsum(-1) if input_ids.shape[1] > 9 else x"
    source = own_checkpoint(tmp_path / "source", "_=None", longer)
    with pytest.raises(UnprovenCall, match="OwnModel: its proof covers no call with"):
        fold(source, tmp_path / "out", trust_remote_code=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_call_of_custom_code_is_proven_when_handed_in(tmp_path: Path) -> None:
    branch = "x = x + self.style(kwargs['ids']) if 'ids' in kwargs else x"
    source = own_checkpoint(tmp_path / "source", "_=None", branch)
    given = {"ids": IDS % 4}
    calls = [((IDS,), given)]
    fold(source, tmp_path / "out", trust_remote_code=True, example_calls=calls, verify=False)
    load: dict[str, Any] = {"trust_remote_code": True, "dtype": torch.float64}
    original: Any = AutoModelForCausalLM.from_pretrained(source, **load)
    model = enjoyln_cli.from_pretrained(tmp_path / "out", **load)
    for named in (given, {"ids": given["ids"][:2, :4]}):
        ids = IDS[: len(named["ids"]), : named["ids"].shape[1]]
        assert computes_rms(model, ids, **named)
        with torch.no_grad():
            expected, got = (m(ids, **named).logits for m in (original, model))
        assert relative(got, expected) <= IDENTITY


CHAT = """
import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class ChatConfig(PretrainedConfig):
    model_type = "own_chat"

    def __init__(self, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, **kwargs):
        self.vocab_size, self.hidden_size = 50, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        super().__init__(**kwargs)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        d = config.hidden_size
        self.layer, self.heads = layer, config.num_attention_heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, mask, cache):
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        d = config.hidden_size
        self.ln_1, self.attn = nn.LayerNorm(d), Attention(config, layer)
        self.ln_2, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x, mask, cache):
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class ChatModel(PreTrainedModel, GenerationMixin):
    config_class = ChatConfig

    def __init__(self, config):
        super().__init__(config)
        d = config.hidden_size
        self.wte, self.wpe, self.head = nn.Embedding(50, d), nn.Embedding(64, d), nn.Linear(d, 50)
        self.h = nn.ModuleList([Block(config, i) for i in range(config.num_hidden_layers)])
        self.ln_f = nn.LayerNorm(d)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, position_ids=None, CACHE=None,
                use_cache=None, cache_position=None, labels=None, return_dict=None):
        if use_cache and CACHE is None:
            CACHE = DynamicCache()
        past = 0 if CACHE is None else CACHE.get_seq_length()
        if cache_position is None:
            cache_position = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)
        if position_ids is None:
            position_ids = cache_position[None]
        keys = torch.arange(past + input_ids.shape[1], device=input_ids.device)
        mask = (keys <= cache_position[:, None])[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :].bool()
        x = self.wte(input_ids) + self.wpe(position_ids)
        if past > 40:
            x = x * self.wpe.weight[0]
        for block in self.h:
            x = block(x, mask, CACHE)
        logits = self.head(self.ln_f(x))
        return CausalLMOutputWithPast(logits=logits, CACHE=CACHE)
""".replace("CACHE", cache_argument(transformers.GPT2LMHeadModel.forward) or CACHE)
"""Code whose ``forward`` takes the cache by the name that this release of transformers passes."""


@pytest.mark.slow
def test_generate_of_custom_code_runs_rms_norm(tmp_path: Path) -> None:
    source = custom_checkpoint(tmp_path / "source", CHAT, "Chat")
    plan = fold(source, tmp_path / "out", trust_remote_code=True, verify=False).plan
    assert len(plan.folded) == len(plan.norms) == 3
    load: dict[str, Any] = {"trust_remote_code": True, "dtype": torch.float64}
    original: Any = AutoModelForCausalLM.from_pretrained(source, **load)
    model: Any = enjoyln_cli.from_pretrained(tmp_path / "out", **load)
    counted: list[bool] = []
    for module in model.modules():
        if isinstance(module, Folded):
            module.register_forward_hook(lambda module, *_: counted.append(module.shifted))
    how: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
    padded = torch.ones(3, 9, dtype=torch.long)
    padded[0, :4] = 0
    for ids, given in (
        (IDS, {"attention_mask": padded}),
        (IDS[:1, :1], {"use_cache": False}),
        (IDS[:2], {"num_beams": 3}),
    ):
        counted.clear()
        torch.manual_seed(0)
        expected = original.generate(ids, max_new_tokens=5, **{"do_sample": False, **given}, **how)
        torch.manual_seed(0)
        found = model.generate(ids, max_new_tokens=5, **{"do_sample": False, **given}, **how)
        assert torch.equal(found.sequences, expected.sequences)
        for one, other in zip(found.logits, expected.logits, strict=True):
            assert (one - other).abs().max() <= 1e-10 * other.abs().max()
        assert len(counted) >= 15 and not any(counted)
    with pytest.raises(UnsupportedModel, match="ChatModel: its proof covers no call with"):
        model.generate(IDS[:, :2].repeat(1, 20), max_new_tokens=5)  # past 40, where it scales


@pytest.mark.slow
def test_a_config_that_says_something_else_is_refused(own_result: Path) -> None:
    out = own_result
    with pytest.raises(UnsupportedModel, match=r"OwnModel\.config\.loud was False and is now True"):
        enjoyln_cli.from_pretrained(out, loud=True, trust_remote_code=True)
    config = json.loads((out / "config.json").read_text())
    calls = read_marker(config).plan.covered
    assert calls is not None and any(
        signature.owner == "OwnModel" for signature in calls.signatures
    )
    entry = config["enjoyln"]
    signature = {
        "owner": "OwnModel",
        "arguments": [["input_ids", {"kind": "int", "sizes": ["a", "b"]}]],
    }
    assert signature in entry["plan"]["covered"]["signatures"]
    for condition, wrong in (("a.b", "a.b is no condition on sizes"), ("c > 1", "c > 1 is a")):
        covered = {"signatures": [{**signature, "conditions": [condition]}]}
        broken = {**entry, "plan": {**entry["plan"], "covered": covered}}
        broken["proof"] = proof_of(broken)
        where = r"malformed: plan.covered.signatures\[0\]"
        with pytest.raises(BadCheckpoint, match=f"{where}.*: {wrong}"):
            read_marker({"enjoyln": broken})
