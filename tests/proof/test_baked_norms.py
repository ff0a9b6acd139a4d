"""Norms behind an embedding table, as BLOOM's, that are baked into the table."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from live_models import CHECKPOINTS, moved
from rounding import relative
from stored_files import changed
from tiny_models import TOKENS, converted, live, outputs, rotated
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM

import enjoyln_cli
from enjoyln_cli import fold, verify
from enjoyln_cli.analysis.analyze import analyze_config, analyze_module
from enjoyln_cli.edits.baked_rows import EncodeRows, NormRows, baked_rows, level_of, normed_rows
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.errors import UnprovenCall
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.plan.orthogonal_matrices import Rotation, rotate
from enjoyln_cli.plan.plan import Plan

FOLDED = Options(untie=True)
ROTATED = Options(fold=False, rotate=True, untie=True)
BOTH = Options(rotate=True)
BLOOM = BloomConfig(**TOKENS, hidden_size=24, n_layer=2, n_head=3, layer_norm_epsilon=1e-4)
TABLE, NORM = "transformer.word_embeddings.weight", "transformer.word_embeddings_layernorm"


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.3])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_the_new_norm_returns_the_wanted_rows(eps: float, size: float) -> None:
    """Whatever the sizes of rows, weights and biases are, and after a rotation that keeps means."""
    table = size * (draw(11, 26) + 2 * draw(11, 1, seed=1))
    gain, bias = size * (draw(26, seed=2) + 1), size * draw(26, seed=3)
    original = functional.layer_norm(table, (26,), gain, bias, eps)
    wanted = original - original.mean(-1, keepdim=True)
    rows = normed_rows(table, gain, bias, eps)
    level = level_of(table.split(4), gain, bias, eps)
    largest = float(wanted.square().mean(-1).sqrt().max())
    assert 1.5 * largest <= level <= 3 * largest and level.as_integer_ratio()[0].bit_count() == 1
    matrix = Rotation(26, 5, "rows", True)
    for rotating in (lambda x: x, lambda x: rotate(x, Axis(1, 0, 1, 26, 1), matrix)):
        baked = baked_rows(rotating(rows), level, eps)
        again = level * functional.layer_norm(baked, (26,), None, None, eps)
        assert relative(again, rotating(wanted)) <= 1e-12


def test_a_table_of_equal_features_has_a_level() -> None:
    zeros, ones = torch.zeros(26).double(), torch.ones(26).double()
    assert level_of([draw(3, 1).expand(3, 26)], ones, zeros, 1e-5) == 1.0
    assert level_of([], ones, zeros, 1e-5) == 1.0


def test_no_element_is_further_off_than_its_bound() -> None:
    """Computed in float32, with its eps, each row stays within the bound that a check allows."""
    table, gain, bias = draw(40, 26) + 3, draw(26, seed=2) + 1, draw(26, seed=3)
    level = level_of([table], gain, bias, 1e-5)
    exact = baked_rows(normed_rows(table, gain, bias, 1e-5), level, 1e-5)
    coarse = normed_rows(table.float(), gain.float(), bias.float(), 1e-5)
    off = (baked_rows(coarse, level, 1e-5) - exact).abs().amax(-1, keepdim=True)
    norm = ("table", "gain", "bias", 1e-5)
    held = {"table": table, "gain": gain, "bias": bias}
    edit = Edit((NormRows(*norm), EncodeRows(*norm))).loaded(held.__getitem__)
    torch.testing.assert_close(edit.apply(table), exact, rtol=0, atol=1e-15)
    bound = edit.bound(table)
    assert (off <= 26 * torch.finfo(torch.float32).eps * bound).all()


@pytest.fixture(scope="module")
def bloom() -> Any:
    return live("BloomForCausalLM", BLOOM)


def plan_of(options: Options) -> Plan:
    return analyze_config(BLOOM, model_class="BloomForCausalLM", options=options).plan


PADDED = {
    "input_ids": torch.tensor([[5, 9, 3, 17, 30], [8, 4, 36, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
}


def error(model: Any, original: Any, **settings: Any) -> float:
    given = {**PADDED, **settings}
    pairs = zip(outputs(model, given), outputs(original, given), strict=True)
    return max(relative(a, b) for a, b in pairs)


def test_all_norms_of_bloom_fold_in_the_weights_alone(bloom: Any) -> None:
    """Computes the same in prefill and decoding, with RMSNorm and as the stock class."""
    plan = plan_of(FOLDED)
    assert [v.status for v in plan.norms] == ["in_weights"] * 6 and not plan.subtractions
    assert plan.baked.keys() == {TABLE} and plan.unproven == ("inputs_embeds",)
    folded = converted(bloom, plan)
    assert error(folded, bloom) <= 1e-12
    assert error(rotated(bloom, plan), bloom) <= 1e-12  # its norms still compute LayerNorm
    weight = folded.get_submodule(NORM).weight
    assert (weight == weight[0]).all() and not folded.get_submodule(NORM).bias.any()
    assert not torch.equal(bloom.get_submodule(NORM).weight, weight)


def test_the_stream_of_bloom_rotates(bloom: Any) -> None:
    plan = plan_of(ROTATED)
    assert [group.kind for group in plan.rotated] == ["residual", "values", "values"]
    assert plan.rotated[0].fixes_ones and plan.rotated[0].inputs == ("inputs_embeds",)
    rotated_model = rotated(bloom, plan)
    assert error(rotated_model, bloom, use_cache=False) <= 1e-12  # cached values are rotated
    before, after = (m.get_submodule(NORM)(m.get_input_embeddings()(PADDED["input_ids"]))
                     for m in (bloom, rotated_model))  # fmt: skip
    assert relative(after, before) > 0.1  # the result that it hands on is rotated


def test_embeddings_from_elsewhere_are_refused(bloom: Any) -> None:
    folded = converted(bloom, plan_of(FOLDED))
    with pytest.raises(UnprovenCall, match="inputs_embeds.*without --merge, --untie and"):
        folded(inputs_embeds=bloom.get_input_embeddings()(PADDED["input_ids"]))


def test_a_tied_table_keeps_its_norm() -> None:
    plan = plan_of(Options())
    assert not plan.baked and len(plan.subtractions) == 1
    assert not plan_of(Options(fold=False, rotate=True)).baked


class Net(nn.Module):
    """A table, a norm behind it, and a block; ``how`` says who else reads one of these."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table, self.norm = nn.Embedding(29, 14), nn.LayerNorm(14)
        self.other, self.up = nn.Embedding(29, 14), nn.Linear(14, 9)
        self.down, self.end, self.head = nn.Linear(9, 14), nn.LayerNorm(14), nn.Linear(14, 5)
        if how == "tied":
            self.head = nn.Linear(14, 29, bias=False)
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        if self.how == "sum":
            x = x + self.other(ids)
        h = self.norm(x)
        if self.how == "called twice":
            h = h + self.norm(self.other(ids))
        if self.how == "read beside":
            h = h + 0.1 * x
        if self.how == "a second lookup":
            h = h + self.table(ids.flip(1))
        if self.how == "its weight is read":
            h = h * self.norm.weight
        if self.how == "its result is read":
            return self.head(h) + self.head(self.end(h + self.down(self.up(h))))
        return self.head(self.end(h + self.down(self.up(self.end(h)).relu())))


IDS = torch.randint(0, 29, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "how",
    ["alone", "sum", "called twice", "read beside", "a second lookup", "its weight is read",
     "its result is read", "tied"],
)  # fmt: skip
def test_only_what_nothing_else_reads_is_baked(how: str) -> None:
    """Whatever is baked or not, the outputs are the same."""
    torch.manual_seed(0)
    model = moved(Net(how)).double().eval()
    found = analyze_module(model, IDS)
    for options, convert in ((Options(fold=False, rotate=True), rotated), (BOTH, converted)):
        plan = found.under(options).plan
        assert bool(plan.baked) == (how == "alone")
        with torch.no_grad():
            assert relative(convert(model, plan)(IDS.flip(0)), model(IDS.flip(0))) <= 1e-12


def test_a_norm_without_eps_cannot_scale_rows() -> None:
    torch.manual_seed(0)
    model = moved(Net("alone")).double().eval()
    model.norm.eps = 0.0
    assert not analyze_module(model, IDS, options=BOTH).plan.baked


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("baked")
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "bloom", dtype=torch.bfloat16)
    model.save_pretrained(folder / "source")
    fold(folder / "source", folder / "out", options=FOLDED)
    return folder / "source", folder / "out"


def test_16_bits_are_verified(folders: tuple[Path, Path]) -> None:
    found = verify(folders[1])
    assert found.passed and found.identity_error <= 1e-12 and found.stock_ratio <= 1.1


@pytest.mark.parametrize("name", [TABLE, f"{NORM}.weight"])
def test_a_changed_element_is_noticed(
    folders: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    """One element of the table by one step of bfloat16, or one of the norm."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(torch.int16).view(-1)[-1] += 1

    found = verify(changed(folders[1], tmp_path / "wrong", edit))
    assert not found.passed and any(name in line for line in found.failures), found.failures


def test_a_norm_that_is_trained_on_brings_layernorm_back(folders: tuple[Path, Path]) -> None:
    """As the stock class would: its result has a mean again."""
    _, out = folders
    model = enjoyln_cli.from_pretrained(out, BloomForCausalLM, dtype=torch.float64).eval()
    stock = BloomForCausalLM.from_pretrained(out, dtype=torch.float64).eval()
    ids = IDS % 29 + 3
    with torch.no_grad():
        assert 0 < relative(model(ids).logits, stock(ids).logits) < torch.finfo(torch.bfloat16).eps
        for one in (model, stock):
            one.get_submodule(NORM).weight[3] *= 1.5
        with pytest.warns(UserWarning, match=f"{NORM}.weight: is no longer one number"):
            found = model(ids).logits
        assert relative(found, copy.deepcopy(stock)(ids).logits) <= 1e-12
