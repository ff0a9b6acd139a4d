"""A modifier for recipes of llm-compressor that rotates the model before it is quantised.

It takes the place of ``SpinQuantModifier`` with R1 and R2, for any architecture: what rotates is
proven, not looked up. It has to come first in a recipe:

    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    quantise = QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])
    oneshot(model=model, recipe=[EnjoylnRotateModifier(seed=1), quantise])

Importing this module makes the modifier known to recipes in YAML.
"""

from __future__ import annotations

from typing import Any

from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.factory import ModifierFactory

from enjoyln_cli.conversion.rotate import rotate


class EnjoylnRotateModifier(Modifier):
    """Rotates the features of the model in place (see ``enjoyln_cli.rotate``)."""

    seed: int = 0
    """Chooses the matrices."""
    untie: bool = True
    """Whether a head that is tied to the embedding gets a copy of its own."""
    values: bool = True
    """Whether the values of each attention head rotate as well."""

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        """Rotate the model, before later modifiers add quantisers to its layers.

        Raises ``EnjoyLNError`` if nothing can rotate.
        """
        rotate(state.model, seed=self.seed, untie=self.untie, values=self.values)
        return True


ModifierFactory.register(EnjoylnRotateModifier.__name__, EnjoylnRotateModifier)
