"""The traps of the mathematics, each on a small model: the norm is kept, and the reason is right.

For every trap, the forbidden edit is also forced, and shown to change the output. A similar model
without the trap folds, and computes the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from folding_live import randomised
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.runtime.install import fold_in_memory, install

D, VOCAB = 11, 13


def ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(1))


def error(model: nn.Module, change: Callable[[nn.Module], None], *inputs: torch.Tensor) -> float:
    """Relative error that ``change``, made in place, causes in the output."""
    with torch.no_grad():
        before = model(*inputs)
        change(model)
        after = model(*inputs)
    return float((after - before).norm() / before.norm())


def fold(model: nn.Module, *inputs: torch.Tensor) -> float:
    """Fold what is proven, and return the relative error."""
    plan = analyze_module(model, *inputs).plan
    assert plan.folded, "there is nothing to fold"

    def change(live: nn.Module) -> None:
        fold_in_memory(live, plan)

    return error(model, change, *inputs)


def centred(weight: nn.Parameter, dim: int) -> None:
    with torch.no_grad():
        weight.sub_(weight.mean(dim, keepdim=True))


WRITER = ("writer.weight", "writer.bias")


def forced(*writers: str) -> Callable[[nn.Module], None]:
    """Centres the writers, though that is not proven, and makes ``norm`` an RMSNorm."""

    def change(live: nn.Module) -> None:
        for name in writers:
            centred(live.get_parameter(name), 1 if name == "embed.weight" else 0)
        install(live, ["norm"], ())

    return change


def verdict(model: nn.Module, norm: str, *inputs: torch.Tensor):  # noqa: ANN201
    return next(v for v in analyze_module(model, *inputs).plan.norms if v.norm == norm)


class Stem(nn.Module):
    """An embedding, a hidden layer, ``middle``, the norm under test, and a head."""

    def __init__(self, affine: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.writer = nn.Linear(D, D)
        self.norm = nn.LayerNorm(D)
        self.first = nn.LayerNorm(D, elementwise_affine=affine)
        self.head = nn.Linear(D, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(self.norm(self.middle(x + self.writer(self.norm_free(x)))))

    def norm_free(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (D,))


def test_the_plain_stem_folds_exactly() -> None:
    assert fold(randomised(Stem()), ids()) < 1e-12


class PostNorm(Stem):
    """Trap 1: a norm reads the output of another."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(tokens))
        return self.head(self.norm(x + self.writer(x)))


def test_the_output_of_an_affine_norm_is_not_zero_mean() -> None:
    model = randomised(PostNorm())
    found = verdict(model, "norm", ids())
    assert (found.status, found.culprit) == ("kept", "first")
    assert "output of a LayerNorm with weights" in found.reason

    assert error(model, forced(*WRITER), ids()) > 1e-3
    plain = randomised(PostNorm(affine=False))
    assert verdict(plain, "norm", ids()).status != "kept"
    assert fold(plain, ids()) < 1e-12


def test_a_tied_embedding_is_not_centred() -> None:
    model = randomised(Stem(tied=True))
    found = verdict(model, "norm", ids())
    assert found.status == "kept"
    assert "used elsewhere" in found.reason
    assert "embed.weight" in found.culprit or "head" in found.culprit
    assert error(model, lambda live: centred(live.embed.weight, 1), ids()) > 1e-3


class TwoNorms(Stem):
    """One operation for two norms is worth its cost; one for a single norm is not."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.writer(self.first(x))
        return self.head(self.norm(x))


def test_one_operation_for_two_norms_pays() -> None:
    model = randomised(TwoNorms(tied=True))
    plan = analyze_module(model, ids()).plan
    assert [op.module for op in plan.ops] == ["embed"]
    assert {v.status for v in plan.norms} == {"centred"}
    assert fold(model, ids()) < 1e-12


class Returned(Stem):
    """Trap 3: the stream itself is returned."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return torch.cat((x, self.norm(x)), 1)


def test_a_returned_stream_stays_as_it_is() -> None:
    model = randomised(Returned())
    found = verdict(model, "norm", ids())
    assert found.status == "kept"
    assert "embed.weight" in found.culprit
    assert error(model, lambda live: centred(live.embed.weight, 1), ids()) > 1e-3


class Merged(nn.Module):
    """Trap 4: features of two values side by side, under one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(D, D), nn.Linear(D, D)
        self.norm = nn.LayerNorm(2 * D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.cat((self.left(x), self.right(x)), -1))


def floats(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) + 0.3


def test_a_concatenation_mixes_means() -> None:
    model = randomised(Merged())
    found = verdict(model, "norm", floats(3, D))
    assert "concatenation" in found.reason

    writers = [f"{part}.{name}" for part in ("left", "right") for name in ("weight", "bias")]
    assert error(model, forced(*writers), floats(3, D)) > 1e-3


class Grouped(nn.Module):
    """Traps 6 and 9: a grouped convolution before a norm, or a GroupNorm over positions."""

    def __init__(self, groups: int, group_norm: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, padding=1, groups=groups)
        self.norm: nn.Module = nn.GroupNorm(1, 8) if group_norm else nn.LayerNorm(8)
        self.last = not group_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return self.norm(x.transpose(1, 2)) if self.last else self.norm(x)


def test_only_a_whole_convolution_is_centred() -> None:
    x = floats(2, 4, 6)
    assert "grouped convolution" in verdict(randomised(Grouped(2)), "norm", x).reason
    assert fold(randomised(Grouped(1)), x) < 1e-12


def test_group_norm_over_positions_sees_a_shift_of_each_position() -> None:
    model = randomised(Grouped(1, group_norm=True))
    plan = analyze_module(model, floats(2, 4, 6)).plan
    assert not plan.norms and not plan.writers

    def forced(live: nn.Module) -> None:
        centred(live.conv.weight, 0)

    assert error(model, forced, floats(2, 4, 6)) > 1e-3


class Scaled(Stem):
    """Trap 7: LayerScale. ``also`` names another reader of the scale, or of what it scales."""

    def __init__(self, shape: Sequence[int], also: str = "") -> None:
        super().__init__()
        self.also = also
        self.other = nn.Linear(D, D)
        self.scale = nn.Parameter(torch.ones(*shape))
        if also == "tied":
            self.other.bias = self.scale
        if also == "bias of its own layer":
            self.writer.bias = self.scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        inner = self.norm_free(x)
        written = self.writer(inner)
        x = x + self.scale * written.view(-1, D).view(written.shape)
        if self.also == "scale":
            x = x + self.other(inner * self.scale)
        if self.also == "weight":
            x = x + self.other(F.gelu(self.writer(inner)))
        if self.also == "value":
            x = x + self.other(F.gelu(written))
        if self.also == "scale of two layers":
            x = x + self.scale * self.other(inner)
        if self.also == "tied":
            x = x + self.other(inner)
        return self.norm(x)


@pytest.mark.parametrize("shape", [(D,), (1, 1, D), (1,)])
def test_a_layer_scale_is_merged_into_the_layer_before_it(shape: tuple[int, ...]) -> None:
    model = randomised(Scaled(shape))
    assert fold(model, ids()) < 1e-12
    assert torch.equal(model.scale.detach(), torch.ones(shape).double()) == (max(shape) > 1)


def test_a_layer_scale_forbids_to_centre_the_weight_alone() -> None:
    model = randomised(Scaled((D,)))
    assert error(model, forced("embed.weight", *WRITER), ids()) > 1e-3


@pytest.mark.parametrize(
    ("also", "reason"),
    [
        ("scale", "used elsewhere"),
        ("weight", "used elsewhere"),
        ("value", "elementwise product"),
        ("scale of two layers", "several layers"),
        ("tied", "used elsewhere"),
        ("bias of its own layer", "used elsewhere"),
    ],
)
def test_a_layer_scale_that_others_read_is_not_merged(also: str, reason: str) -> None:
    model = randomised(Scaled((D,), also))
    found = verdict(model, "norm", ids())
    assert found.status == "kept" and reason in found.reason

    def forced(live: nn.Module) -> None:
        with torch.no_grad():
            for parameter in (live.writer.weight, live.writer.bias):
                parameter.mul_(live.scale.reshape(-1, *(1,) * (parameter.ndim - 1)))
            live.scale.fill_(1)

    assert error(model, forced, ids()) > 1e-3


class Zoo(nn.Module):
    """A scaled convolution whose channels move to the end, as in ConvNeXt and BEiT."""

    def __init__(self, groups: int = 1, drop: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, groups=groups)
        self.scale = nn.Parameter(torch.ones(8))
        self.norm, self.drop = nn.LayerNorm(8), drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.conv(x), 0.5, training=self.drop)
        x = self.scale[:, None, None] * x if not self.drop else self.scale.view(8, 1, 1) * x
        return self.norm(x.flatten(2).transpose(1, 2))


def test_a_layer_scale_is_merged_through_ops_that_move_whole_features() -> None:
    image = floats(2, 4, 6, 6)
    assert fold(randomised(Zoo()), image) < 1e-12
    assert "grouped" not in verdict(randomised(Zoo()), "norm", image).reason
    for kept in (Zoo(groups=2), Zoo(drop=True)):
        assert "elementwise product" in verdict(randomised(kept), "norm", image).reason


class Normalised(nn.Module):
    """A convolution with weight normalisation, as wav2vec2's for positions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(4, 8, 3), dim=dim)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x).transpose(1, 2))


@pytest.mark.parametrize("dim", [0, 2])
def test_a_weight_that_is_divided_by_its_own_norm_is_not_centred(dim: int) -> None:
    x = floats(2, 4, 6)
    model = randomised(Normalised(dim))
    found = verdict(model, "norm", x)
    assert found.status == "kept" and "weight_norm" in found.reason

    writers = ("conv.parametrizations.weight.original1", "conv.bias")
    assert error(model, forced(*writers), x) > 1e-3


class Dropped(Stem):
    """Trap 8: dropout that is active as in training."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.always = training

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, training=self.always)


def test_dropout_in_training_mode_breaks_a_zero_mean() -> None:
    assert "dropout in training" in verdict(randomised(Dropped(True)), "norm", ids()).reason
    assert fold(randomised(Dropped(False)), ids()) < 1e-12


class Written(Stem):
    """An in-place write through a view changes what the norm reads."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, 0].mul_(torch.arange(1.0, D + 1, dtype=x.dtype))
        return x


def test_an_in_place_write_through_a_view_is_seen() -> None:
    model = randomised(Written())
    assert verdict(model, "norm", ids()).status == "kept"
    assert error(model, forced("embed.weight", *WRITER), ids()) > 1e-3


class Squared(Stem):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


class SelfAttention(Stem):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        query = self.writer(self.norm_free(x))
        return F.scaled_dot_product_attention(query, x, x)


@pytest.mark.parametrize("model_type", [Squared, SelfAttention])
def test_another_occurrence_of_a_value_sees_its_mean(model_type: type[Stem]) -> None:
    model = randomised(model_type())
    assert verdict(model, "norm", ids()).status == "kept"
    assert error(model, lambda live: centred(live.embed.weight, 1), ids()) > 1e-3


class OwnForward(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


class Functional(Stem):
    def __init__(self, own: bool) -> None:
        super().__init__()
        if own:
            self.norm = OwnForward(D)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return F.layer_norm(self.norm(x), (D,))


def test_what_cannot_be_swapped_is_kept() -> None:
    plan = analyze_module(randomised(Functional(own=True)), ids()).plan
    reasons = {v.norm: v.reason for v in plan.norms}
    assert "does not compute a LayerNorm" in reasons["norm"]
    assert any("called as a function" in reason for reason in reasons.values())
