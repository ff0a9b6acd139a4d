"""A pass for Olive that rotates a checkpoint before later passes quantise it.

It takes the place of ``QuaRot`` for models with LayerNorm, and for any architecture:

    from olive.workflows import run

    passes = {"rotate": {"type": "EnjoylnRotate"}, "quantise": {"type": "Rtn", "bits": 4}}
    model = {"type": "HfModel", "model_path": "microsoft/phi-2"}
    config = {"input_model": model, "passes": passes, "output_dir": "out"}
    run(config, package_config=package_config())
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from olive.package_config import OlivePackageConfig
from olive.passes import Pass
from olive.passes.pass_config import PassConfigParam
from olive.passes.pytorch.common import inherit_hf_from_hf

from enjoyln_cli.conversion.fold import convert
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.plan.fold_options import Options


class EnjoylnRotate(Pass):
    """Rotates the features of a Hugging Face model, as ``enjoyln rotate`` does."""

    @classmethod
    def _default_config(cls, accelerator_spec: Any) -> dict[str, PassConfigParam]:
        return {
            "seed": PassConfigParam(
                type_=int, default_value=0, description="Chooses the matrices."
            ),
            "untie": PassConfigParam(
                type_=bool, default_value=True, description="Store a tied head separately."
            ),
            "values": PassConfigParam(
                type_=bool, default_value=True, description="Rotate the values of attentions too."
            ),
        }

    def _run_for_config(self, model: Any, config: Any, output_model_path: str) -> Any:
        if model.adapter_path:
            raise UnsupportedModel(f"{model.model_path}: merge its adapter first")
        options = Options(
            fold=False, rotate=True, untie=config.untie, values=config.values, seed=config.seed
        )
        load = model.get_load_kwargs()
        hub = {key: load[key] for key in ("revision", "trust_remote_code") if load.get(key)}
        convert(model.model_path, output_model_path, options=options, force=True, **hub)
        return inherit_hf_from_hf(model, output_model_path)


def package_config() -> dict[str, Any]:
    """The passes of Olive and this pass, for ``olive.workflows.run``."""
    package: dict[str, Any] = json.loads(
        Path(OlivePackageConfig.get_default_config_path()).read_text(encoding="utf-8")
    )
    every = ("supported_providers", "supported_accelerators", "supported_precisions")
    name = EnjoylnRotate.__name__
    package["passes"][name] = {"module_path": f"{__name__}.{name}", **{key: ["*"] for key in every}}
    return package
