"""Checkpoints whose model class is in a file beside the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from live_models import moved
from transformers.dynamic_module_utils import get_class_from_dynamic_module


def custom_checkpoint(
    folder: Path,
    code: str,
    name: str = "Own",
    fill: Callable[[Any], Any] = moved,
    **settings: Any,
) -> Path:
    """A new directory with a model for causal language modelling, and its code.

    ``code`` defines ``OwnModel`` and ``OwnConfig``, or these with another ``name``. ``fill`` gives
    the model its weights and returns it. ``settings`` are stored in the config.
    """
    file = folder / f"{name.lower()}.py"
    folder.mkdir()
    file.write_text(code)
    cls: Any = get_class_from_dynamic_module(f"{file.stem}.{name}Model", str(folder))
    fill(cls(cls.config_class())).save_pretrained(folder)
    file.write_text(code)
    classes = {"AutoConfig": "Config", "AutoModelForCausalLM": "Model"}
    config = {
        "model_type": cls.config_class.model_type,
        "architectures": [f"{name}Model"],
        "auto_map": {auto: f"{file.stem}.{name}{kind}" for auto, kind in classes.items()},
    }
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder
