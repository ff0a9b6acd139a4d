"""Programs that ``transformers.exporters`` writes: from a model and its inputs to a directory."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.load import silent
from enjoyln_cli.text import first_line


def exported(exporter: Any, model: Any, inputs: Mapping[str, Any], config: Any) -> Any:
    """The ``transformers.exporters.ExportedModel`` of one call of ``model`` with ``inputs``.

    ``exporter`` and ``config`` are an exporter of transformers and its settings. Raises
    ``UnsupportedModel`` if the model cannot be exported.
    """
    try:
        with torch.no_grad(), silent(), redirect_stdout(io.StringIO()):
            return exporter.export(model, dict(inputs), config)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # the exporter and a model's code may raise anything
        name = type(model).__name__
        raise UnsupportedModel(f"{name} cannot be exported: {first_line(error)}") from error


def save(made: Any, folder: Path, config: Any) -> None:
    """Write the programs, and what ``ExportedModel.from_pretrained`` reads, to ``folder``.

    The nodes' metadata in ONNX programs is left out: it quotes the source code that was traced,
    with its paths.
    """
    for component in made.components.values():
        if hasattr(component.program, "graph"):
            for node in component.program.graph:
                node.metadata_props.clear()
    made.config = config
    made.save_pretrained(folder)
