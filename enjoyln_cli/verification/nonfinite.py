"""NaN and infinity in the original's outputs in float64, and in its weights.

An output that is NaN proves nothing: any other model that returns NaN there would pass. So such a
model cannot pass, unless the user has said that NaN in the weights is intended
(``fold --allow-nonfinite``). Then both models must return NaN at the same places.

Two cases are no error: NaN in rows with padding, where attention may have no tokens, and infinity
as a mask (a logit that is never chosen), if the weights are finite and some values of the output
are finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from enjoyln_cli.checkpoint.reader import Checkpoint, read_tensor
from enjoyln_cli.text import listed_briefly

NamedValues = Sequence[Mapping[str, torch.Tensor]]


def nonfinite_outputs(exact: NamedValues, batches: NamedValues) -> dict[str, str]:
    """The outputs that have non-finite values, from name to kind.

    The kind is ``nan`` (NaN in a row without padding), ``nowhere`` (no value is finite) or ``inf``
    (others).
    """
    kinds: dict[str, str] = {}
    for name in dict.fromkeys(name for batch in exact for name in batch):
        pairs = [
            (out[name], batch) for out, batch in zip(exact, batches, strict=True) if name in out
        ]
        finite = [value.isfinite() for value, _ in pairs]
        if all(bool(mask.all()) for mask in finite):
            continue
        if any(bool(_unpadded(value, batch).isnan().any()) for value, batch in pairs):
            kinds[name] = "nan"
        elif not any(bool(mask.any()) for mask in finite):
            kinds[name] = "nowhere"
        else:
            kinds[name] = "inf"
    return kinds


def _unpadded(value: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The rows of an output whose inputs have no padding; all rows if no mask fits the output."""
    rows = torch.ones(len(value), dtype=torch.bool)
    for name, mask in batch.items():
        if name.endswith("attention_mask") and mask.ndim > 1 and len(mask) == len(value):
            rows &= mask.flatten(1).bool().all(1)
    return value[rows]


def nonfinite_weights(checkpoint: Checkpoint) -> list[str]:
    """The names of stored tensors that contain NaN or infinity. Reads all tensors."""
    tensors = ((name, read_tensor(checkpoint, name)) for name in checkpoint.tensors)
    return [name for name, tensor in tensors if not bool(tensor.isfinite().all())]


def failure(outputs: Mapping[str, str], original: Checkpoint, meant: bool) -> str | None:
    """Why non-finite ``outputs`` do not pass, in one sentence; ``None`` if they pass.

    ``meant`` says that the user allows NaN and infinity in the weights.
    """
    if not outputs:
        return None
    weights = nonfinite_weights(original)
    if weights and meant:
        return None
    wrong = {name: kind for name, kind in outputs.items() if weights or kind != "inf"}
    if not wrong:
        return None
    value = "NaN" if "nan" in wrong.values() else "infinity"
    text = f"cannot compare {', '.join(wrong)}: the original returns {value}"
    if not weights:
        return f"{text}; its weights are finite, so check its config.json"
    return (
        f"{text}; its weights contain NaN or Inf ({listed_briefly(weights)}): repair them, or fold "
        "with --allow-nonfinite"
    )
