"""``from_pretrained(OUT, quantization_config=EnjoyLNConfig())``: loading by transformers alone.

For programs that only call transformers, for example a ``pipeline``. Quantisers are transformers'
only extension point that sees a model both before and after its weights are loaded. This quantiser
refuses a model before, and calls ``optimize`` after. It removes itself from the config, so that
``save_pretrained`` writes nothing of it. It quantises nothing. Importing this module registers it.
"""

from __future__ import annotations

from typing import Any

from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from enjoyln_cli.checkpoint.config import MARKER
from enjoyln_cli.runtime.loading import optimize, plan_of


@register_quantization_config(MARKER)
class EnjoyLNConfig(QuantizationConfigMixin):
    """Runs a converted checkpoint with RMSNorm. Has no options."""

    def __init__(self, **kwargs: Any) -> None:
        self.quant_method = MARKER  # type: ignore[assignment]


@register_quantizer(MARKER)
class EnjoyLNLoader(HfQuantizer):
    """Does what ``optimize`` does while transformers loads a model. Raises as ``optimize`` does."""

    def preprocess_model(self, model: Any, *args: Any, **kwargs: Any) -> None:
        plan_of(model)  # which refuses a model before its weights are loaded

    def postprocess_model(self, model: Any, **kwargs: Any) -> Any:
        self.remove_quantization_config(model)
        return optimize(model)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True
