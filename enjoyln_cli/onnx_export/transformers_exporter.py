"""Programs that ``transformers.exporters`` writes: from a model and its inputs to a directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enjoyln_cli.onnx_export.exporting import exporting


def exported(exporter: Any, model: Any, inputs: Mapping[str, Any], config: Any) -> Any:
    """The ``transformers.exporters.ExportedModel`` of one call of ``model`` with ``inputs``.

    ``exporter`` and ``config`` are an exporter of transformers and its settings. Raises
    ``UnsupportedModel`` if the model cannot be exported.
    """
    advice = "; --format torchao quantises a model without exporting it"
    with exporting(model, "transformers", advice):
        return exporter.export(model, dict(inputs), config)


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
