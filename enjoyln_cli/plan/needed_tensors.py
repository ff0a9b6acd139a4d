"""Which tensors a plan reads or edits, and the sizes that they must have.

The same list holds for a checkpoint and for a model in memory: a tensor has one name in the files
and one in the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from enjoyln_cli.plan.plan import Plan


@dataclass(frozen=True)
class NeededTensor:
    """A tensor that has to be there before a plan is carried out."""

    parameter: str
    """Its name in the model."""
    tensor: str
    """Its name in the checkpoint."""
    shape: tuple[int, ...] | None = None
    """Its shape in the checkpoint; ``None`` if that does not matter."""
    sizes: Mapping[int, int] = field(default_factory=dict)
    """Sizes by dimension, if they alone matter."""
    is_converted: bool = False
    """Whether the model holds it in another layout, so that its shape there is another one."""

    def expected(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that it should have, for a tensor that has ``shape``."""
        whole = shape if self.shape is None else self.shape
        return tuple(self.sizes.get(dim, size) for dim, size in enumerate(whole))


def needed_tensors(plan: Plan) -> Iterator[NeededTensor]:
    """The tensors of ``plan``; those that become copies of others are taken from these."""
    copies = {one.tensor: one.stored for one in plan.untied}
    for copy in plan.untied:
        yield NeededTensor(copy.source, copy.stored, copy.shape)
    for w in plan.edited_tensors:
        stored = copies.get(w.tensor, w.tensor)
        yield NeededTensor(w.parameter, stored, w.shape, is_converted=w.held is not None)
    for named in (one for norm in plan.baked.values() for one in (norm.weight, norm.bias)):
        yield NeededTensor(named.parameter, named.tensor)
    for mlp in plan.widened:
        for part in mlp.parts:
            yield NeededTensor(part.parameter, part.tensor, sizes={part.dim: mlp.size})
    for named in (name for merge in plan.merged for name in merge.names):
        yield NeededTensor(named.parameter, copies.get(named.tensor, named.tensor))
