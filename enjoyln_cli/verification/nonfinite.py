"""NaN and infinity in what the original computes exactly, and in its weights.

Where the exact function is NaN, nothing can be compared: any other model that is NaN there passes.
So a fold of such a model is not verified, unless its user has said that NaN in the weights is meant
(``fold --allow-nonfinite``); then NaN is compared as NaN, place by place. Two things are no error:
NaN in rows with padding, where a class has nothing to attend to, and infinity as a mask (a logit
that is never chosen), as long as the weights are finite and not all of an output is infinite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from enjoyln_cli.checkpoint.headers import DTYPES
from enjoyln_cli.checkpoint.reader import Checkpoint, read_tensor

Values = Sequence[Mapping[str, torch.Tensor]]
MOST_NAMED = 3


def nonfinite_outputs(exact: Values, batches: Values) -> dict[str, str]:
    """Outputs that are not finite everywhere, by name: ``nan``, ``nowhere`` (finite), ``inf``."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for batch in exact for name in batch):
        pairs = [
            (out[name], given) for out, given in zip(exact, batches, strict=True) if name in out
        ]
        finite = [value.isfinite() for value, _ in pairs]
        if all(bool(mask.all()) for mask in finite):
            continue
        if any(bool(_unpadded(value, given).isnan().any()) for value, given in pairs):
            found[name] = "nan"
        elif not any(bool(mask.any()) for mask in finite):
            found[name] = "nowhere"
        else:
            found[name] = "inf"
    return found


def _unpadded(value: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The rows of an output whose inputs have no padding; all rows where that cannot be told."""
    rows = torch.ones(len(value), dtype=torch.bool)
    for name, mask in given.items():
        if name.endswith("attention_mask") and mask.ndim > 1 and len(mask) == len(value):
            rows &= mask.flatten(1).bool().all(1)
    return value[rows]


def nonfinite_weights(checkpoint: Checkpoint) -> list[str]:
    """The stored tensors that hold NaN or infinity. All of them are read."""
    floating = (name for name, one in checkpoint.tensors.items() if _floats(one.dtype))
    return [name for name in floating if not bool(read_tensor(checkpoint, name).isfinite().all())]


def _floats(dtype: str) -> bool:
    return DTYPES[dtype].is_floating_point or DTYPES[dtype].is_complex


def failure(outputs: Mapping[str, str], original: Checkpoint, meant: bool) -> str | None:
    """Why outputs that are not finite do not pass, in one sentence; ``None`` where they do.

    With ``meant`` the user has said that the weights may hold NaN and infinity.
    """
    if not outputs:
        return None
    weights = nonfinite_weights(original)
    if weights and meant:
        return None
    wrong = {name: kind for name, kind in outputs.items() if weights or kind != "inf"}
    if not wrong:
        return None
    what = "NaN" if "nan" in wrong.values() else "infinite"
    text = f"nothing can be compared where {', '.join(wrong)} of the original is {what}"
    if not weights:
        return f"{text}; its weights are finite, so look at its config.json"
    more = f" and {len(weights) - MOST_NAMED} more" if len(weights) > MOST_NAMED else ""
    return (
        f"{text}; its weights hold NaN or Inf in {', '.join(weights[:MOST_NAMED])}{more}: repair "
        "them, or fold with --allow-nonfinite"
    )
