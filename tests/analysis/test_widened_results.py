"""Checkpoints whose MLPs subtract a mean: exact, loaded by stock transformers, and watched."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import enjoyln
from live_models import CHECKPOINTS
from rounding import IDENTITY, TIMES, as_exact, in_float64, relative
from safetensors.torch import load_file
from tiny_models import BERT, calls, converted, live
from transformers import CONFIG_MAPPING, AutoConfig, BertConfig, BertForMaskedLM
from widening_cases import BART, FAMILY, WIDEN

from enjoyln_cli import fold, from_pretrained, optimize, refold
from enjoyln_cli.analysis.analyze import analyze_config
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.checkpoint.reader import open_checkpoint
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.errors import BadCheckpoint, NotCentred, RecipeError, VerificationFailed
from enjoyln_cli.models.arithmetic import Float64
from enjoyln_cli.models.outputs import tensors_in
from enjoyln_cli.plan.mean_units import UNITS
from enjoyln_cli.recipe.from_plan import recipe_of
from enjoyln_cli.recipe.write import dump_recipe
from enjoyln_cli.rewrite.directory import fold_checkpoint
from enjoyln_cli.runtime.call_guards import input_means
from enjoyln_cli.runtime.modules import RMSNorm
from enjoyln_cli.verification.verify import verify

SOURCE = CHECKPOINTS / "bert"
SECOND = "bert.encoder.layer.{}.output.dense.weight"
FIRST = "bert.encoder.layer.{}.intermediate.dense.{}"


# Live models with random weights and biases, so that nothing passes by chance.


def given_to(model: Any) -> list[dict[str, Any]]:
    """Calls of every kind; for an encoder-decoder model, a call with ids for both."""
    found = calls(model)
    if not model.config.is_encoder_decoder:
        return [{**given, "use_cache": False} for given in found]
    return [{**found[0], "decoder_input_ids": torch.randint(3, 37, (2, 5)), "use_cache": False}]


@pytest.mark.one_case
@pytest.mark.parametrize(("kind", "settings", "name", "plain", "wider"), FAMILY)
def test_the_function_stays_the_same(
    kind: str, settings: dict[str, Any], name: str, plain: int, wider: int
) -> None:
    config = CONFIG_MAPPING[kind](**settings)
    plan = analyze_config(config, model_class=name, options=WIDEN).plan
    assert len(plan.folded) == wider and not plan.subtractions
    assert sum(not verdict.mlps for verdict in plan.folded) == plain
    original = live(name, config)
    folded = converted(original, plan)
    for given in given_to(original):
        with input_means(folded) as seen, Float64(), torch.no_grad():
            pairs = zip(*(tensors_in(m(**given)) for m in (folded, original)), strict=True)
        assert max(relative(a, b) for a, b in pairs) <= 1e-12, sorted(given)
        assert max(seen.values()) <= 1e-12
        assert set(seen) == {verdict.norm for verdict in plan.folded}


def test_a_conv1d_grows_along_its_other_dimension() -> None:
    class PostNorm(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            conv1d = transformers.pytorch_utils.Conv1D
            self.config, self.before = config, torch.nn.LayerNorm(11)
            self.first, self.second = conv1d(config.size, 11), conv1d(11, config.size)
            self.after = torch.nn.LayerNorm(11)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.before(x)
            return self.after(h + self.second(torch.relu(self.first(h))))

    from enjoyln_cli.analysis.analyze import analyze_module

    torch.manual_seed(0)
    model = PostNorm(BertConfig(size=18)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) + 0.1)
    x = torch.randn(3, 11, dtype=torch.float64)
    plan = analyze_module(model, x, options=WIDEN).plan
    assert [(part.dim, one.to) for one in plan.widened for part in one.parts] == [
        (1, 24), (0, 24), (0, 24),
    ]  # fmt: skip
    folded = converted(model, plan)
    assert folded.first.weight.shape == (11, 24) and isinstance(folded.after, RMSNorm)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-13, atol=1e-13)


# Checkpoints.


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wider") / "out"
    fold(SOURCE, folder, options=WIDEN, verify=False)
    return folder


def test_what_is_stored(out: Path) -> None:
    old, new = (load_file(f / "model.safetensors") for f in (SOURCE, out))
    assert old.keys() == new.keys()
    grown = {name for name in old if old[name].shape != new[name].shape}
    assert grown == {
        name.format(i, part)
        for i in range(3)
        for name, part in ((FIRST, "weight"), (FIRST, "bias"), (SECOND, ""))
    }
    assert new[SECOND.format(1)].shape == (80, 328)
    assert torch.equal(new[FIRST.format(1, "weight")][:320], old[FIRST.format(1, "weight")])
    read = new[FIRST.format(1, "weight")][320:].double()
    written = new[SECOND.format(1)][:, 320:].double()
    assert not new[FIRST.format(1, "bias")][320:].any()
    assert not read[UNITS:].any() and not written[:, UNITS:].any()
    h = torch.randn(80, dtype=torch.float64) + 0.2
    torch.testing.assert_close(
        written @ torch.nn.functional.gelu(read @ h), -h.mean().expand(80), rtol=1e-9, atol=1e-12
    )
    kept = new[SECOND.format(1)][:, :320].double()
    step = torch.finfo(torch.float32).eps * float(kept.abs().max())  # each is rounded once
    assert float(kept.mean(0).abs().max()) <= step / 2
    assert float(old[SECOND.format(1)].mean(0).abs().max()) > step
    config = json.loads((out / "config.json").read_text())
    assert config["intermediate_size"] == 328
    assert [one["size"] for one in config["enjoyln"]["plan"]["widened"]] == [320] * 3


@pytest.mark.slow
def test_other_attributes(tmp_path: Path) -> None:
    name, sizes = "BartModel", {"encoder_ffn_dim": 40, "decoder_ffn_dim": 48}
    live(name, CONFIG_MAPPING["bart"](**BART)).float().save_pretrained(tmp_path / "source")
    done = fold(tmp_path / "source", tmp_path / "out", options=WIDEN, model_class=name)
    assert done.verification.passed and done.plan.widened
    assert {s.name: s.value for s in done.plan.settings} == sizes
    found = AutoConfig.from_pretrained(tmp_path / "out")
    assert {key: getattr(found, key) for key in sizes} == sizes


@pytest.mark.slow
def test_an_attribute_that_config_json_leaves_out_is_written(tmp_path: Path) -> None:
    config = BertConfig(**{**BERT, "num_hidden_layers": 1, "intermediate_size": 3072})
    live("BertModel", config).float().save_pretrained(tmp_path / "source")
    raw = json.loads((tmp_path / "source" / "config.json").read_text())
    del raw["intermediate_size"]
    (tmp_path / "source" / "config.json").write_text(json.dumps(raw))
    options = {"options": WIDEN, "model_class": "BertModel", "verify": False}
    fold(tmp_path / "source", tmp_path / "out", **options)
    assert AutoConfig.from_pretrained(tmp_path / "out").intermediate_size == 3080


# Errors that verify has to find.


def test_a_forced_wrong_widening_is_refuted(tmp_path: Path) -> None:
    """The plan of a model with GELU, carried out on a model with tanh."""
    right = BertConfig(**BERT)
    plan = analyze_config(right, model_class="BertModel", options=WIDEN).plan
    assert len(plan.widened) == 2
    plan = replace(plan, compositions=())  # which would refuse another activation
    wrong = BertConfig(**BERT, hidden_act="tanh")
    live("BertModel", wrong).save_pretrained(tmp_path / "source")
    source = open_source(str(tmp_path / "source"), weights=True)
    text = dump_recipe(recipe_of(plan, config=wrong))
    with pytest.raises(VerificationFailed, match="change the function"):
        fold_checkpoint(
            open_checkpoint(source),
            plan,
            tmp_path / "out",
            recipe_text=text,
            check=lambda folder: verify(folder, against=tmp_path / "source", plan=plan),
        )
    assert not (tmp_path / "out").exists()


# Recipes.


def test_without_the_option_nothing_is_widened(out: Path, tmp_path: Path) -> None:
    text = (out / "enjoyln_recipe.yaml").read_text()
    (tmp_path / "recipe.yaml").write_text(text.replace("widen_mlp: true", "widen_to: 8"))
    with pytest.raises(RecipeError, match="the recipe has in_weights, the proof stays_"):
        fold(SOURCE, tmp_path / "out", recipe=tmp_path / "recipe.yaml", verify=False)


# In use.


def inputs() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(2, 50).view(2, 24)}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**inputs()).logits


def same(model: Any, other: Any, exact: Any = None, stored: torch.dtype | None = None) -> bool:
    """Whether both compute the same, up to a few times what rounding costs ``other``."""
    return as_exact(logits(model), logits(other), logits(exact or in_float64(other)), stored)


def shifted(model: Any) -> set[bool]:
    return {bool(m.shifted) for m in model.modules() if isinstance(m, RMSNorm)}


@pytest.mark.parametrize(
    ("name", "index"),
    [
        (SECOND.format(2), (slice(None), 321)),
        (SECOND.format(2), (slice(None), 322)),
        (SECOND.format(2), (slice(None), 327)),
        (FIRST.format(0, "weight"), (323, slice(None))),
        (FIRST.format(0, "bias"), (320,)),
    ],
)
def test_units_that_have_moved_are_seen(out: Path, name: str, index: Any) -> None:
    moved = BertForMaskedLM.from_pretrained(out).eval()
    used = from_pretrained(out)
    assert shifted(used) == {False}
    for model in (moved, used):
        with torch.no_grad():
            model.get_parameter(name)[index] += 0.001
    with pytest.raises(NotCentred, match=".".join(name.split(".")[:4])):
        optimize(moved)
    with pytest.warns(UserWarning, match="computing LayerNorm"):
        logits(used)
    assert shifted(used) == {True}


def test_units_with_zero_output_weights_may_read_anything(out: Path) -> None:
    """A unit whose output weights are zero may have any input weights."""
    model = BertForMaskedLM.from_pretrained(out).eval()
    with torch.no_grad():
        model.get_parameter(FIRST.format(0, "weight"))[325] += 1
    optimize(model)


def trained(model: Any, seed: int) -> Any:
    """A step of an optimiser that moves all weights by about the same amount."""
    torch.manual_seed(seed)
    model.train()
    stepping = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss = model(**inputs(), labels=torch.randint(0, 509, (2, 24))).loss
    loss.backward()
    stepping.step()
    return model.eval()


def test_training_and_refolding(out: Path, tmp_path: Path) -> None:
    model = trained(from_pretrained(out), 0)
    start = load_file(out / "model.safetensors")[SECOND.format(1)][:, 320:324]
    units = model.get_parameter(SECOND.format(1))[:, 320:324]
    assert not torch.equal(units, start)
    model.save_pretrained(tmp_path / "trained")
    stock = BertForMaskedLM.from_pretrained(tmp_path / "trained")
    with pytest.raises(NotCentred):
        optimize(model)
    refold(model)
    assert torch.equal(model.get_parameter(SECOND.format(1))[:, 320:324], start)
    assert shifted(model) == {False}
    with input_means(model) as seen:
        assert same(model, stock)
    assert max(seen.values()) < TIMES * torch.finfo(torch.float32).eps
    model.save_pretrained(tmp_path / "again")
    assert same(from_pretrained(tmp_path / "again"), stock)
    refold(model)
    assert same(model, stock)


def test_units_trained_in_float64_are_centred_to_its_rounding(out: Path) -> None:
    """The means are far larger than the centred values."""
    model = trained(from_pretrained(out, dtype=torch.float64), 0)
    with pytest.warns(UserWarning, match="computing LayerNorm"):
        exact = logits(model)
    assert shifted(refold(model)) == {False}
    assert relative(logits(model), exact) < IDENTITY


def test_there_is_no_place_for_units_trained_twice(out: Path) -> None:
    model = trained(refold(trained(from_pretrained(out), 0)), 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(NotCentred, match="no unused units are left to hold the trained values"):
        refold(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_units_trained_twice_take_the_next_place_that_is_free(tmp_path: Path) -> None:
    fold(SOURCE, tmp_path / "out", options=replace(WIDEN, widen_to=16), verify=False)
    model = trained(refold(trained(from_pretrained(tmp_path / "out"), 0)), 1)
    before = copy.deepcopy(model)
    assert same(refold(model), before) and shifted(model) == {False}


def test_a_frozen_mlp_leaves_the_units_alone(out: Path) -> None:
    model = from_pretrained(out)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "attention" in name
    model = trained(model, 0)
    before = copy.deepcopy(model)
    assert same(refold(model), before) and shifted(model) == {False}


def test_the_marker(out: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    found = read_marker(config)
    assert [(one.second.parameter, one.second.dim, one.size) for one in found.plan.widened] == [
        (SECOND.format(i), 1, 320) for i in range(3)
    ]
    for key, value in (("to", 320), ("size", -1), ("size", True), ("first", 5), ("bias", 5)):
        wrong = copy.deepcopy(config)
        wrong["enjoyln"]["plan"]["widened"][1][key] = value
        with pytest.raises(BadCheckpoint, match=rf"malformed: plan.widened\[1\]\W.*{key}"):
            read_marker(wrong)
    del config["enjoyln"]["plan"]["widened"][2]
    with pytest.raises(BadCheckpoint, match="edited after the fold"):
        read_marker(config)


# The commands.


@pytest.mark.slow
def test_fold_says_what_it_widens(tmp_path: Path) -> None:
    done = enjoyln(
        "fold", SOURCE, "-o", tmp_path / "out", "--widen-mlp", "--widen-to", 64, "--json"
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["become_rmsnorm"], found["in_weights"]) == (3, 3)
    assert found["subtractions"] == 0
    assert found["verification"]["passed"]
    assert [(mlp["size"], mlp["to"], mlp["attribute"]) for mlp in found["plan"]["widened"]] == [
        (320, 384, "intermediate_size")
    ] * 3
    assert BertForMaskedLM.from_pretrained(tmp_path / "out").config.intermediate_size == 384
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    more = 3 * 64 * (2 * 80 + 1) * 4
    assert abs(size - (SOURCE / "model.safetensors").stat().st_size - more) < 1000


def test_a_size_without_wider_mlps_is_no_request() -> None:
    done = enjoyln("report", SOURCE, "--widen-to", 64)
    assert done.exit_code == 2 and "--widen-to needs --widen-mlp" in done.stderr
    assert enjoyln("report", SOURCE, "--widen-mlp", "--widen-to", 0).exit_code == 2
