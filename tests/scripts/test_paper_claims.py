"""The papers' claims: what the page computes is right, and its text names what is computed."""

from __future__ import annotations

import re
from string import Formatter
from typing import Any

import paper_claims
import paper_figures
import pytest
import torch
from tiny_models import BERT, GPT2
from torch.nn import functional as F
from transformers import CONFIG_MAPPING

from enjoyln_cli import analyze
from enjoyln_cli.analysis.paper import algorithm_1


@pytest.fixture
def image() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 12, 5, 3).double() + 0.4


def test_a_group_norm_over_images_sees_a_shift_of_each_position(image: torch.Tensor) -> None:
    """Appendix C.3 replaces its centring by a zero mean over the channels of each position."""
    shift = torch.randn(2, 1, 5, 3).double()
    exact, shifted = (F.group_norm(x, 1) for x in (image, image + shift))
    assert (shifted - exact).norm() > 0.1 * exact.norm()
    last = image.movedim(1, -1)
    exact, shifted = (F.layer_norm(x, (12,)) for x in (last, last + shift.movedim(1, -1)))
    assert (shifted - exact).norm() < 1e-14 * exact.norm()


def test_a_group_norm_of_features_does_not() -> None:
    assert paper_claims.group_norm_error((4, 12)) < 1e-14
    assert paper_claims.group_norm_error((4, 12, 9, 7)) > 0.1


def test_equation_24_centres_a_convolution_and_26_does_not() -> None:
    none, right, second, printed = paper_claims.convolutions().values()
    assert right < 1e-14
    assert min(second, printed) > 0.5 * none


def test_equation_34_has_an_identity_too_many() -> None:
    assert paper_claims.group_means(has_identity=False) < 1e-14
    assert paper_claims.group_means(has_identity=True) == pytest.approx(1)
    alone = paper_claims.group_matrix(groups=5, size=1, has_identity=False)  # InstanceNorm
    assert torch.equal(alone, torch.eye(5).double())


def test_the_counts_of_both_tables_are_the_printed_ones() -> None:
    for name, printed in (("Table 7", paper_figures.TABLE_7), ("Table 8", paper_figures.TABLE_8)):
        assert paper_claims.counted()[name] == (printed["LN"], printed["RMS"])
    saved = [row[-1] for row in paper_claims.operations()]
    assert saved == ["40 %", "69 %", "70 %"]


@pytest.mark.parametrize(
    ("shown", "fraction"), [(96.0, "24/25"), (83.33, "5/6"), (70.59, "12/17"), (100.0, "1")]
)
def test_a_percentage_as_a_fraction(shown: float, fraction: str) -> None:
    assert str(paper_claims.as_fraction(shown)) == fraction


@pytest.mark.parametrize(
    ("model_type", "model_class", "settings", "counts"),
    [
        ("bert", "BertModel", BERT, (5, 4, 5, 1)),  # all but the norm of the embeddings
        ("bloom", "BloomForCausalLM", {}, (6, 5, 6, 5)),  # the paper's 83.33 %
        ("gpt2", "GPT2LMHeadModel", GPT2, (5, 0, 5, 5)),  # its stream begins with embeddings
    ],
)
def test_norms_of_algorithm_1_without_and_with_embeddings_and_exact_ones(
    model_type: str, model_class: str, settings: dict[str, Any], counts: tuple[int, ...]
) -> None:
    config = CONFIG_MAPPING[model_type](**settings)
    found = analyze(config, model_class=model_class)
    without = algorithm_1(found.subject.traces[0], centre_embeddings=False)
    plan = found.plan
    assert (len(plan.norms), len(without), len(found.paper), len(plan.folded)) == counts


def test_a_percentage_that_no_fraction_has() -> None:
    with pytest.raises(ValueError, match="no fraction of at most 5 norms"):
        paper_claims.as_fraction(70.59, most=5)


def test_the_times_of_phi_cannot_be_those_of_phi_2_in_float32() -> None:
    rows = {str(row[0]): row for row in paper_claims.bounds()}
    assert {name for name, row in rows.items() if row[-1] != "yes"} == {
        f"Phi, if Phi-2{head}, {where}"
        for head in ("", " without its head")
        for where in paper_figures.OVERHEAD
    }
    head, layers = 2560 * 51200, 32 * (4 * 2560**2 + 2 * 2560 * 10240)
    assert (
        rows["Phi, if Phi-2, A100 (Table 4)"][2]
        == f"{2e3 * 256 * (head + layers) / 19.5e12:.1f}"
        == "69.5"
    )


def test_shares_are_those_of_the_printed_times() -> None:
    for total, norms, printed in paper_figures.TABLE_9.values():
        assert round(100 * norms / total, 2) == printed
    rows = {str(row[0]): str(row[3]) for row in paper_claims.beyond_the_share()}
    assert set(rows) == {"Bert", "GPT2", "OPT"} and "24.95 %, 4 x 16384 (Table 16)" in rows["Bert"]
    shares = [float(str(row[2]).split()[0]) for row in paper_claims.share_by_length()]
    assert shares == sorted(shares, reverse=True)


def test_the_text_has_a_place_for_each_value() -> None:
    root = paper_claims.ROOT
    text = (root / "scripts" / "paper_claims.md").read_text()
    source = (root / "scripts" / "paper_claims.py").read_text()
    names = {name for _, name, _, _ in Formatter().parse(text) if name}
    written = source.partition("def values()")[2].partition("def main()")[0]
    assert names == set(re.findall(r'^        "(\w+)": ', written, re.MULTILINE))
