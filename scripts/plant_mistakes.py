"""Plant one mistake at a time in the proof or the runtime, and name the test that notices it.

    python scripts/plant_mistakes.py
    python scripts/plant_mistakes.py --modules proof.rules proof.flow --sample 20

A mistake makes the proof accept what it should refuse:

* an ``if`` that returns a refusal (``Opaque``, ``None``, ``False``, a text) never does;
* such an ``if`` lists several conditions, and loses a condition;
* a function or a variable that is true only if all of several conditions are, and loses a
  condition;
* a function that returns a bound (``..._bound``) allows ten times as much.

Each mistake is planted in a process of its own, which runs the tests of the proof until one fails.
A mistake that no test notices is a missing test, or code that nobody needs. The last line counts
both. The exit status is 1 if a mistake was not noticed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "enjoyln_cli"
MODULES = (
    "proof.rules", "proof.index_rules", "proof.weight_rules", "proof.pullback", "proof.flow",
    "runtime.weight_check",
)  # fmt: skip
TESTS = (
    "tests/proof/test_rules.py", "tests/proof/test_pulls_and_pushes.py",
    "tests/proof/test_any_operands.py",
    "tests/runtime/test_allowed_means.py", "tests/proof", "tests/runtime/test_edited_models.py",
)  # fmt: skip
SECONDS = 600.0
"""How long the tests of one mistake may take. One that makes them hang is noticed, too."""


@dataclass(frozen=True)
class Mistake:
    """One change of one module."""

    module: str
    line: int
    what: str
    source: str
    """The module's source with the mistake."""

    @property
    def text(self) -> str:
        return f"{self.module}:{self.line} {self.what}"


def mistakes_in(module: str, source: str) -> Iterator[Mistake]:
    """Every mistake that can be planted in the ``source`` of a module."""
    tree = ast.parse(source)
    for at, node in enumerate(ast.walk(tree)):
        for what, change in _changes(node):
            planted = copy.deepcopy(tree)
            change(next(n for i, n in enumerate(ast.walk(planted)) if i == at))
            yield Mistake(module, node.lineno, what, ast.unparse(planted))  # type: ignore


def _changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """What can be changed at a node: a description, and a function that changes its copy."""
    if isinstance(node, ast.If) and _refuses(node):
        yield f"never refuses if {ast.unparse(node.test)}", _never
        if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.Or):
            for at, lost in enumerate(node.test.values):
                yield f"no longer refuses if {ast.unparse(lost)}", _without(at)
    elif isinstance(node, ast.FunctionDef) and node.name.endswith("_bound"):
        yield f"{node.name} is ten times as large", _ten_times
    elif isinstance(node, (ast.Return, ast.Assign)):
        value = node.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "bool":
            value = value.args[0]
        if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.And):
            for at, lost in enumerate(value.values):
                yield f"no longer requires {ast.unparse(lost)}", _without(at)


def _refuses(node: ast.If) -> bool:
    """Whether the body of an ``if`` is a refusal alone."""
    (*before, last) = node.body
    if before or not isinstance(last, ast.Return):
        return False
    value = last.value
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) == "Opaque"
    return isinstance(value, ast.Constant) and value.value in (None, False)


def _ten_times(node: ast.FunctionDef) -> None:
    for inside in ast.walk(node):
        if isinstance(inside, ast.Return):
            value: Any = inside.value
            inside.value = ast.BinOp(value, ast.Mult(), ast.Constant(10))


def _never(node: ast.If) -> None:
    node.test = ast.Constant(False)


def _without(at: int) -> Any:
    """A change that takes one condition out of a list of them."""

    def change(node: Any) -> None:
        holder = "test" if isinstance(node, ast.If) else "value"
        found = getattr(node, holder)
        if isinstance(found, ast.Call):
            found = found.args[0]
        found.values.pop(at)

    return change


class Planter(MetaPathFinder):
    """Imports one module from a changed source."""

    def __init__(self, mistake: Mistake) -> None:
        self.mistake = mistake

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != f"{PACKAGE}.{self.mistake.module}":
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None
        source = self.mistake.source.encode()

        class Loader(SourceFileLoader):
            def path_stats(self, path: str) -> Any:
                raise OSError("no bytecode is read or written")

            def get_data(self, path: str) -> bytes:
                return source

        loader = Loader(name, spec.origin)
        return importlib.util.spec_from_file_location(name, spec.origin, loader=loader)


def run(mistake: Mistake | None, tests: Sequence[str], sender: Any) -> None:
    """In a process of its own: run the tests until one fails, and send its name."""
    import pytest

    if mistake is not None:
        sys.meta_path.insert(0, Planter(mistake))
    failed: list[str] = []

    class Listener:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                failed.append(report.nodeid)

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                failed.append(report.nodeid)

    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    options = ["-x", "-n", "0", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    status = pytest.main([*options, *tests], plugins=[Listener()])
    sender.send(failed[0] if failed else ("" if status == 0 else f"pytest exits with {status}"))


def noticed(mistake: Mistake | None, tests: Sequence[str]) -> str:
    """The first test that fails with a mistake; empty if none does."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(mistake, tests, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(SECONDS) else f"no end after {SECONDS:g} s"
    except EOFError:
        return "the process of the tests ends early"
    finally:
        process.kill()
        process.join()


def all_mistakes(modules: Sequence[str]) -> list[Mistake]:
    """Every mistake that can be planted in these modules of the package."""
    found = []
    for module in modules:
        file = ROOT / PACKAGE / f"{module.replace('.', '/')}.py"
        found += mistakes_in(module, file.read_text(encoding="utf-8"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant the mistakes, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modules", nargs="*", default=MODULES)
    parser.add_argument("--tests", nargs="*", default=TESTS)
    parser.add_argument("--sample", type=int, help="plant so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    import hypothesis  # noqa: F401  (imported once, for all processes)
    import pytest  # noqa: F401
    import torch
    import transformers.integrations.moe  # noqa: F401

    torch.set_num_threads(1)
    if failing := noticed(None, options.tests):
        print(f"without a mistake, {failing} fails", file=sys.stderr)
        return 2
    mistakes = all_mistakes(options.modules)
    if options.sample is not None and options.sample < len(mistakes):
        mistakes = Random(options.seed).sample(mistakes, options.sample)
    missed = 0
    for mistake in mistakes:
        test = noticed(mistake, options.tests)
        missed += not test
        print(f"{mistake.text}\n    {test or 'NOT NOTICED'}", flush=True)
    print(f"{len(mistakes)} mistakes, {missed} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
