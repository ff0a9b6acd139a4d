"""The result of a fold as plain data, which ``--json`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from enjoyln_cli.report.model_report import ModelReport

if TYPE_CHECKING:
    from enjoyln_cli.conversion.fold import FoldJob
    from enjoyln_cli.plan.fold_options import WriteOptions
    from enjoyln_cli.rewrite.directory import FoldResult


def fold_json(
    report: ModelReport,
    job: FoldJob,
    result: FoldResult | None,
    writing: WriteOptions,
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """What ``enjoyln fold --json`` prints: the report, the files written, the verification.

    Without a ``result`` it is a dry run, and ``bytes_written`` is how many would be written.
    ``resumed`` is the number of weight files that an earlier run had finished.
    """
    entries = report.to_json() | {"dry_run": result is None, "warnings": list(warnings)}
    copies = {copy.tensor for copy in report.plan.untied}
    entries["tensors"] = len(copies | job.opened.checkpoint.tensors.keys())
    if job.target:
        entries["stored_as"] = job.target.target
    entries["bytes_added"] = job.bytes_added(writing.stored_dtype)
    if result is None:
        return entries | {"bytes_written": job.bytes_to_write(writing.stored_dtype)}
    checked = result.verification.to_json() if result.verification else None
    entries |= {"out": str(result.out), "bytes_written": result.bytes_written}
    entries["resumed"] = result.resumed
    entries |= {"seconds": result.seconds, "check_seconds": result.check_seconds}
    return entries | {"verification": checked}
