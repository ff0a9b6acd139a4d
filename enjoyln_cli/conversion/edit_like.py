"""Edit adapters, prompts and drafts as their model was edited for a result (``--like``)."""

from __future__ import annotations

from pathlib import Path

from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.checkpoint.open_options import OPENED_PLAINLY, OpenOptions
from enjoyln_cli.checkpoint.result_files import ADAPTER_CONFIG
from enjoyln_cli.conversion.adapter import Adapter, edit_adapter
from enjoyln_cli.conversion.draft import Draft, edit_draft
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.fs.staging import staged_output
from enjoyln_cli.recipe.stock_targets import target_for
from enjoyln_cli.rewrite.opened_model import open_model
from enjoyln_cli.verification.verify import original_of, plan_of_result


def edit_like(
    model: str | Path,
    like: str | Path,
    out: str | Path,
    opening: OpenOptions = OPENED_PLAINLY,
    *,
    force: bool = False,
) -> None:
    """Write ``model`` to ``out``, edited as its base model was for the result ``like``.

    ``model`` is the directory of a LoRA adapter or of a trained prompt, or an EAGLE-3 draft model
    in a directory or on the Hub. Reads the plan of ``like``, and from the original the weights that
    the edits need. The new directory appears whole or not at all.

    Raises as ``edit_adapter`` and ``edit_draft`` do, ``BadCheckpoint`` if ``like`` was not
    converted, ``UnsupportedModel`` if its tensors have other names or sizes than the original's,
    ``ModelNotFound`` if the original cannot be found, and ``OutputError`` if ``out`` cannot be
    written.
    """
    result = open_model(str(like), opening)
    marker = read_marker(result.checkpoint.raw_config, result.source.model)
    if marker.stored_from and target_for(marker.stored_from, marker.plan.model_class).renamed:
        raise UnsupportedModel(
            f"{like} is a {marker.plan.model_class}, whose layers have other names than the layers "
            f"of {marker.stored_from}; merge {model} into the original and fold the result"
        )
    original = original_of(result, marker, opening)
    plan = plan_of_result(result.checkpoint, marker)
    if any(group.compressed for group in plan.rotated):
        raise UnsupportedModel(
            f"{like} has one feature less than its original; merge {model} into the original and "
            "fold the result"
        )
    edited: Adapter | Draft
    if (Path(model).expanduser() / ADAPTER_CONFIG).is_file():
        edited = edit_adapter(model, plan, original)
    else:
        edited = edit_draft(model, plan, original, str(like), opening)
    with staged_output(Path(out), source=Path(like), force=force) as staged:
        edited.write(staged, str(like))
