"""Prints the results of the commands: tables, trees and closing lines.

Results go to standard output, progress and warnings to standard error. Nothing here decides or
measures anything.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text
from rich.tree import Tree as RichTree

from enjoyln_cli.cli.output_lines import console, say
from enjoyln_cli.report.layer_names import compact
from enjoyln_cli.report.model_report import ModelReport
from enjoyln_cli.report.notes import counts, notes, stock_lines, verbs
from enjoyln_cli.report.quantised_table import QUANTISED_HEADS, quantised_rows
from enjoyln_cli.report.verification_table import (
    verification_heads,
    verification_rows,
)
from enjoyln_cli.text import counted, measure, number, size

if TYPE_CHECKING:
    from enjoyln_cli.onnx_export.export import Exported, ProgramSummary
    from enjoyln_cli.plan.plan import Plan
    from enjoyln_cli.proof.explain import Tree
    from enjoyln_cli.publish.push import Upload
    from enjoyln_cli.quantisation.quantised import Quantised
    from enjoyln_cli.quantisation.written_result import ResultCheck
    from enjoyln_cli.scaling.overflows import OverflowReport
    from enjoyln_cli.verification.verify import Verification

NARROW = 12
"""Width to which the first column of a table may be wrapped."""

WORST = 3
"""How many of the largest input means of RMSNorms are shown."""


def _table(*heads: str) -> Table:
    """A table whose columns but the first are aligned to the right."""
    table = Table()
    for head in heads:
        table.add_column(head, justify="right" if table.columns else "left", overflow="fold")
    return table


def _show(table: Table) -> None:
    """Print a table whose words are whole, except in the first column.

    On a terminal that is too narrow for that, each row is printed on several lines.
    """
    out = console()
    heads = [str(column.header) for column in table.columns]
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    texts = [[head, *cells] for head, cells in zip(heads, columns, strict=True)]
    least = [max((cell_len(w) for t in column for w in t.split()), default=0) for column in texts]
    least[0] = min(least[0], NARROW)
    spare = out.width - sum(least) - 3 * len(least) - 1
    if spare >= 0:
        for column, width, cells in zip(table.columns, least, texts, strict=True):
            more = min(spare, max(map(cell_len, cells)) - width)
            column.width, spare = width + more, spare - more
        out.print(table)
        return
    for first, *others in zip(*columns, strict=True):
        say(f"{heads[0]} {first}".strip())
        for head, cell in zip(heads[1:], others, strict=True):
            if cell:
                say(f"  {head} {cell}".rstrip() if head else f"  {cell}")


def write_json(data: Any) -> None:
    """Print one JSON object on one line of standard output."""
    print(json.dumps(data))


COLUMNS = {
    "layernorms": "LayerNorms",
    "become_rmsnorm": "become RMSNorm",
    "with_subtraction": "of these with an added mean subtraction",
    "stays_layernorm": "stay",
}
"""The fields of ``Counts`` that a report's table shows, and the heads of their columns."""


def write_reports(reports: Sequence[ModelReport]) -> None:
    """Print a table with a row for each model, and below it the notes about each."""
    shown = [report for report in reports if report.plan.norms]
    if shown:
        _write_counts(shown)
    for report in reports:
        for line in (*notes(report), *stock_lines(report.plan)):
            say(line)


def write_overflows(model: str, report: OverflowReport) -> None:
    """Print where a model overflows in float16, and what ``--fp16-safe`` makes of each place."""
    if report.overflows:
        table = _table("what", "module", "largest", "with --fp16-safe")
        for found in report.overflows:
            after = Text(number(found.after), style="green" if found.is_mended else "red")
            table.add_row(found.kind, found.module, number(found.largest), after)
        _show(table)
    for line in report.lines:
        say(f"{model} ({report.model_class}): {line}")


def _write_counts(reports: Sequence[ModelReport]) -> None:
    has_paper = any(report.paper is not None for report in reports)
    table = _table("model", *COLUMNS.values(), *["paper's Algorithm 1"] * has_paper)
    for report in reports:
        numbers = [getattr(report.counts, field) for field in COLUMNS]
        numbers += [len(report.paper or ())] * has_paper
        layernorms, folded, *others = (f"{number:,}" for number in numbers)
        style = _colour(len(report.plan.folded), len(report.plan.norms))
        table.add_row(report.model, layernorms, Text(folded, style=style), *others)
    _show(table)
    if has_paper:
        say("paper's Algorithm 1: as printed; never used to convert", "dim")


def _colour(count: int, total: int) -> str:
    """Green for all, red for none, yellow between."""
    return "green" if count == total else "yellow" if count else "red"


def write_tree(tree: Tree) -> None:
    """Print the zero-mean graph of one norm; green where the mean is zero, red where it is not."""

    def leaf(node: Tree) -> Text:
        return Text(node.text, style="green" if node.zero_mean else "red")

    def grow(branch: RichTree, node: Tree) -> None:
        for child in node.children:
            grow(branch.add(leaf(child)), child)

    root = RichTree(leaf(tree))
    grow(root, tree)
    console().print(root)


def write_fold(report: ModelReport, result: Mapping[str, Any]) -> None:
    """Print the closing lines of a fold and the next command to run; for a dry run, the plan."""
    plan, dry = report.plan, result["dry_run"]
    does, did = verbs(plan)
    say(f"{f'would {does}' if dry else did} {counts(plan)}", "green")
    for line in notes(report, result["bytes_added"]):
        say(line)
    for line in result.get("matrices", {}).get("summary", ()):
        say(line)
    if dry:
        for name in compact(writer.tensor for writer in plan.centred_weights):
            say(f"  centre {name}")
        wrote = f"{result['tensors']} tensors, {size(result['bytes_written'])}"
        say(f"would write {wrote}; nothing was written (dry run)")
        return
    checked = result["verification"]
    wrote = f"wrote {size(result['bytes_written'])} to {result['out']}"
    wrote += f" in {result['seconds']:.1f} s"
    if checked:
        wrote += f", checked on {checked['count']} in {result['check_seconds']:.1f} s"
    say(wrote)
    if result["resumed"]:
        done = counted(result["resumed"], "weight file")
        say(f"{done} had been finished by an earlier run")
    say(f"verified: {checked['summary']}" if checked else "not verified (--no-verify)")
    if plan.rotated and "stored_as" not in result:
        dtype = checked["compute_dtype"] if checked else ""
        _say_before_quantising(dtype, "matrices" in result, plan.model_class)
    if len(plan.kept) > len(plan.folded) > 0 and not (plan.widened or plan.untied):
        say(f"options that may convert more: enjoyln report {shlex.quote(report.model)}")
    say(f"next: {_next_step(result, plan)}")


def _next_step(result: Mapping[str, Any], plan: Plan) -> str:
    """What to do with a new directory: load it if all was checked, otherwise check it."""
    checked, out = result["verification"], shlex.quote(str(result["out"]))
    if checked and checked["rows"] < checked["full_rows"]:
        return f"enjoyln verify {out} (runs all {checked['full_rows']} {checked['inputs_are']})"
    if checked and "stored_as" in result:
        return f'transformers.{result["stored_as"]}.from_pretrained("{result["out"]}") loads it'
    if checked and plan.folded:
        load = f'enjoyln_cli.from_pretrained("{result["out"]}")'
        return f"{load} loads it in RMSNorm form, transformers with LayerNorm"
    return f"enjoyln verify {out}"


DATA_OPTIONS = {
    "pixel_values": "--image DIR",
    "input_features": "--audio DIR",
    "input_values": "--audio DIR",
}
"""From the main input of a class to the option for a user's own data; others take a text."""


def _say_before_quantising(dtype: str, is_measured: bool, model_class: str) -> None:
    """What to know before a rotated model is quantised; ``dtype`` is its weights' dtype, if known.

    ``is_measured`` says whether its rounding was simulated on the user's data.
    """
    if dtype in ("float16", "bfloat16"):
        again = f"the rotation rounded every weight to {dtype} once more"
        say(f"{again}; rotate with --dtype float32 if you quantise the result")
    if not is_measured:
        import transformers

        main = getattr(getattr(transformers, model_class, None), "main_input_name", "")
        data = DATA_OPTIONS.get(main, "--text FILE")
        say(
            "to see whether rotating helps on your data: `enjoyln rotate` with --search 1 "
            f"--scheme w8a8 {data}"
        )


def write_export(result: Exported) -> None:
    """Print what the ONNX programs compute, how norms are written, and how they were verified."""
    nodes = sum((Counter(program.nodes) for program in result.programs.values()), Counter())
    norms = ", ".join(
        f"{nodes[kind]} {kind}"
        for kind in ("RMSNormalization", "LayerNormalization")
        if kind in nodes
    )
    ops = f", {counted(result.centrings, 'added mean subtraction')}" if result.centrings else ""
    say(
        f"exported {result.model_class} ({result.dtype}, opset {result.opset}): {norms}{ops}",
        "green",
    )
    for name, program in result.programs.items():
        _write_program(name, program)
    if result.overflowing:
        norms = counted(len(result.overflowing), "norm")
        say(f"  input scaled for float16: {norms}, from {result.overflowing[0]}")
    if result.biased:
        say(f"  {result.biased} RMSNorms add a bias in a second node; fold with --merge bias")
    say(f"wrote {size(result.bytes_written)} to {result.folder}/onnx in {result.seconds:.1f} s")
    for check in result.checks:
        say(f"verified in {check.runtime}: {check.summary}")
    if not result.checks:
        say("not verified (--no-verify)")


def _write_program(name: str, program: ProgramSummary) -> None:
    """Print what one program takes and returns."""
    from enjoyln_cli.onnx_export.cached_run import is_cached

    shapes = ", ".join(
        f"{name} [{', '.join(map(str, axes))}]"
        for name, axes in program.inputs.items()
        if not is_cached(name)
    )
    cached = sum(map(is_cached, program.outputs))
    cache = f" and a cache of {counted(cached, 'tensor')}" if cached else ""
    outputs = ", ".join(name for name in program.outputs if not is_cached(name))
    say(f"  {name}: from {shapes} to {outputs}{cache}")


def write_quantised(result: Quantised) -> None:
    """Print the candidates, what was chosen, and how far the result is from the original."""
    say(result.summary)
    heads = list(result.plain.measures)
    if len(result.outputs) > 1:
        heads = [head for head in heads if head.endswith(": error")]
    table = _table("candidate", *heads, "size")
    for candidate in result.candidates:
        style = "green" if candidate.name == result.chosen else ""
        measured = (measure(head, candidate.differences.measures.get(head)) for head in heads)
        table.add_row(candidate.name, *measured, size(candidate.size), style=style)
    _show(table)
    as_original = "; no other candidate is clearly better" if result.chosen == "original" else ""
    say(f"wrote {result.scheme} as {result.format} to {result.out}: {result.chosen}{as_original}")
    if result.finer:
        table = _table("layer with more bits", "bits", "cost of rounding it alone")
        for layer in {step.layer: step for step in result.finer}.values():
            table.add_row(layer.layer, layer.what, number(layer.cost))
        _show(table)
    say(f"on the held-out data ({counted(result.inputs, 'input')}):")
    table = _table(*QUANTISED_HEADS)
    for row in quantised_rows(result.to_json()):
        table.add_row(*row)
    _show(table)
    if result.generated:
        say(str(result.generated))
    say(f"error {number(result.held_out.error)} (limit {result.max_error:g})", "green")


def write_result_check(check: ResultCheck) -> None:
    """Print how far each precision is from the original, if it was run, and the verdict."""
    for name, one in check.precisions.items():
        table = _table("", name, "float32")
        for measured, value in one.differences.measures.items():
            table.add_row(measured, measure(measured, value))
        if one.perplexity is not None:
            table.add_row("perplexity", *map(number, (one.differences.perplexity, one.perplexity)))
        _show(table)
        say(counted(one.inputs, "input"), "dim")
    say(check.summary, "green" if check.passed else "red")


def write_verification(verification: Verification) -> None:
    """Print each error next to the original's own rounding error, then the largest input means."""
    table = Table(*verification_heads(vars(verification)))
    for column in table.columns[1:3]:
        column.justify = "right"
    for row in verification_rows(vars(verification)):
        table.add_row(*row)
    _show(table)
    by_user = f", {verification.own_rows} of them your own" if verification.own_rows else ""
    say(f"{verification.count}{by_user}; errors are relative to the original in float64", "dim")
    means = [f"{number(mean)} ({name})" for name, mean in verification.norm_input_mean.items()]
    if means:
        say(f"  largest relative input means: {', '.join(means[:WORST])}")
    say(verification.summary, "green" if verification.passed else "red")


def write_push(upload: Upload) -> None:
    """Print what was pushed and where it is; for a dry run, each file and its size."""
    if upload.url:
        say(f"pushed {upload_line(upload)}", "green")
        say(upload.url)
        return
    table = _table("file", "size")
    for file in upload.files:
        table.add_row(file.name, size(file.size))
    _show(table)
    say(f"would push {upload_line(upload)}; nothing was sent (dry run)")


def write_doubts(upload: Upload) -> None:
    """Print the warnings before a push."""
    for warning in upload.warnings:
        say(f"warning: {warning}", "yellow", stderr=True)
    if upload.forced:
        say(f"forced, as the card will say: {upload.forced}", "yellow", stderr=True)


def upload_line(upload: Upload) -> str:
    """``8 files, 1.6 MB, to me/model@rms``."""
    where = f"a pull request to {upload.repo_id}" if upload.create_pr else upload.repo_id
    where += f"@{upload.revision}" if upload.revision else ""
    kind = {True: " (private)", False: " (public)", None: ""}[upload.private]
    return f"{counted(len(upload.files), 'file')}, {size(upload.size)}, to {where}{kind}"


def write_environment(environment: dict[str, Any]) -> None:
    """Print what ``kernels.environment`` found: one paragraph for each device."""
    say(f"torch {environment['torch']}, {counted(environment['threads'], 'thread')}")
    for device in environment["devices"]:
        _write_device(device)


def _write_device(entry: dict[str, Any]) -> None:
    """Print which kernels a device has, or why it has none."""
    if not entry["active"]:
        say(f"{entry['device']}: no kernels: {entry['why']}", style="yellow")
        say(f"  folded norms compute {entry['instead']}")
        return
    say(f"{entry['device']}: kernels: {entry['kernels']}", style="green")
