"""What a user decides about a fold: the edits, what is proven, and how the result is written.

Nothing slow is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.plan.option_field import InRange, keyword, option, plan_option
from enjoyln_cli.text import bytes_in, dtype_name

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Options:
    """Edits besides centring that the user allows. All are exact; by default none is allowed."""

    widen_mlp: bool = plan_option(
        False, "Add a few hidden units to each MLP so that more norms convert."
    )
    widen_to: Annotated[int, InRange(1)] = plan_option(
        8, "Round the number of hidden units up to a multiple of N (default: 8).", metavar="N"
    )
    merge: Literal["bias", "affine"] | None = plan_option(
        None, "Merge norm biases (or weights and biases) into the next linear layers."
    )
    untie: bool = plan_option(False, "Store tied weights (for example the LM head) separately.")
    fold: bool = True
    """Convert LayerNorms to RMSNorm."""
    keep_norms: tuple[str, ...] = plan_option(
        (), "LayerNorms to leave as they are, such as *.ln_f.", metavar="NAMES"
    )
    rotate: bool = plan_option(
        False, "Also rotate the features by an orthogonal matrix, for quantisation."
    )
    values: bool = plan_option(
        True,
        "Also rotate the values of each attention head (default: yes).",
        flags=("--values/--no-values",),
    )
    online_rotations: bool = False
    """With ``rotate``, also rotate streams online (see ``RotationGroup.online_rotation``)."""
    seed: int = plan_option(0, "Seed of the random matrix (default: 0).", metavar="N")
    matrix: str = plan_option(
        "", "Rotate by the matrices of this file, such as learned matrices.", path="file"
    )

    def __post_init__(self) -> None:
        """Take one name for ``keep_norms``. Raise ``EnjoyLNError`` for a wrong value."""
        if self.merge not in (None, "bias", "affine"):
            raise EnjoyLNError(f"merge is {self.merge!r}, but must be None, 'bias' or 'affine'")
        if self.widen_to < 1:
            raise EnjoyLNError(f"widen_to is {self.widen_to}, but must be at least 1")
        names = self.keep_norms
        object.__setattr__(self, "keep_norms", (names,) if isinstance(names, str) else tuple(names))


CENTRING_ONLY = Options()


@dataclass(frozen=True, kw_only=True)
class FoldOptions:
    """What is proven about a model, and which edits a fold may make."""

    model_class: str | None = plan_option(
        None, "Plan for this class only, e.g. GPT2Model.", metavar="CLASS"
    )
    outputs: tuple[str, ...] = plan_option(
        (), "Only these outputs must stay unchanged, such as logits,*_embeds.", metavar="NAMES"
    )
    stored_as: str | None = plan_option(
        None,
        "Store it as a stock class with RMSNorm, such as llama.",
        flags=("--as",),
        metavar="NAME",
    )
    compress: bool = plan_option(
        False, "With --as: leave out the feature that streams of zero mean do not need."
    )
    options: Options = keyword(CENTRING_ONLY, "What may be changed besides centring.")
    recipe: str | Path | None = plan_option(
        None, "Refuse if the proof gives other edits than this recipe has.", path="file"
    )
    example_calls: Sequence[Any] = keyword(
        (), "Calls to prove besides those made up from the config, each as ``(args, kwargs)``."
    )

    def __post_init__(self) -> None:
        """Take one name for ``outputs``."""
        names = self.outputs
        object.__setattr__(self, "outputs", (names,) if isinstance(names, str) else tuple(names))


FOLD_DEFAULTS = FoldOptions()


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How a result is written; independent of the plan."""

    dtype: str | torch.dtype | None = option(
        None,
        "Also convert all floating-point weights to this dtype.",
        choices=("float32", "float16", "bfloat16"),
    )
    """By default each tensor keeps its own. A dtype of torch becomes its name."""
    max_shard_size: int | None = option(
        None,
        "Re-shard into files of at most this size, such as 5GB.",
        metavar="SIZE",
        parse=bytes_in,
    )
    """By default the source's files keep their layout."""
    jobs: Annotated[int, InRange(1)] | None = option(
        None, "Parallel workers (default: number of cores).", metavar="N", is_in_card=False
    )
    allow_nonfinite: bool = option(
        False, "Accept weights with NaN or Inf; the edits spread them within a tensor."
    )
    force: bool = option(False, "Replace OUT if it exists.", is_in_card=False)
    resume: bool = option(False, "Continue an interrupted run, if any.", is_in_card=False)
    """Take over the weight files that an interrupted run has finished."""

    def __post_init__(self) -> None:
        """Name the dtype."""
        object.__setattr__(self, "dtype", self.dtype and dtype_name(self.dtype))

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """``dtype`` as torch's."""
        import torch

        found: torch.dtype | None = getattr(torch, str(self.dtype), None)
        return found


WRITE_DEFAULTS = WriteOptions()
