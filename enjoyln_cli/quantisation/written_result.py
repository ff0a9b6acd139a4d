"""``enjoyln verify`` for a directory that ``enjoyln quantize`` has written."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from enjoyln_cli.checkpoint.result_files import QUANTISATION_FILE
from enjoyln_cli.clock import Progress, no_progress
from enjoyln_cli.comparison.data_files import UserData, require_data
from enjoyln_cli.comparison.embedding import embedder
from enjoyln_cli.conversion.inspect import Opening, open_unfolded
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.events import default_listener
from enjoyln_cli.quantisation.candidates import FloatModel
from enjoyln_cli.quantisation.examples import split
from enjoyln_cli.quantisation.measure import Differences, differences, exact_outputs, perplexity_in
from enjoyln_cli.quantisation.quantize import INPUTS_IN_A_HALF, load_result
from enjoyln_cli.quantisation.schemes import require_scheme
from enjoyln_cli.text import number


@dataclass(frozen=True)
class QuantisedCheck:
    """What running a quantised result on the user's data has shown."""

    differences: Differences
    """From the original in float32."""
    perplexity: float | None
    """Of the original in float32."""
    inputs: int
    max_error: float
    passed: bool

    @property
    def summary(self) -> str:
        """The verdict in words."""
        where = "within" if self.passed else "above"
        error = number(self.differences.error)
        return f"error {error} of the outputs, {where} the limit of {self.max_error:g}"

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self) | {"summary": self.summary}


def verify_quantised(
    out: Path,
    data: UserData,
    *,
    against: str | None = None,
    opening: Opening = Opening(),  # noqa: B008  (frozen)
    on_progress: Progress = no_progress,
) -> QuantisedCheck:
    """Compare the quantised model in ``out`` with the original in float32, on the second half.

    ``against`` is the original, if it has moved. ``on_progress`` is that of ``quantize``. Raises
    ``BadCheckpoint`` if the record in ``out`` cannot be read, ``ModelNotFound`` and
    ``UnsupportedModel`` as ``quantize`` does.
    """
    require_data(data)
    try:
        record = json.loads((out / QUANTISATION_FILE).read_text(encoding="utf-8"))
        form, name = str(record["format"]), str(record["model_class"])
        names, limit = tuple(map(str, record["outputs"])), float(record["max_error"])
        require_scheme(record["scheme"], form, to_run=True)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadCheckpoint(f"{out / QUANTISATION_FILE} is damaged; quantise again") from error
    if against is None and opening.revision is None:
        opening = replace(opening, revision=record.get("revision"))
    subject = open_unfolded(against or record["source"], opening)
    embed = embedder(subject.source, default_listener)
    original: Any = FloatModel(subject, name).load(None)
    folder, trusted = subject.source.path, subject.trust_remote_code
    _, examples = split(original, folder, data, INPUTS_IN_A_HALF, trusted, on_progress=on_progress)
    with TemporaryDirectory() as scratch:
        exact = exact_outputs(original, examples, names, Path(scratch), embed, on_progress)
        measured = differences(load_result(out, form, type(original)), exact)
        perplexity = perplexity_in(exact)
    return QuantisedCheck(measured, perplexity, len(examples), limit, measured.error <= limit)
