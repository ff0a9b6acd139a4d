"""The architecture, enforced: imports point one way, libraries have owners, names are unique."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "enjoyln_cli"

FOLDERS = (
    "version",
    "text",
    "errors",
    "clock",
    "garbage",
    "fs",
    "events",
    "plan",
    "edits",
    "checkpoint",
    "kernels",
    "models",
    "calls",
    "graph",
    "trace",
    "proof",
    "rotation",
    "analysis",
    "recipe",
    "rewrite",
    "runtime",
    "comparison",
    "scaling",
    "verification",
    "report",
    "publish",
    "conversion",
    "train",
    "onnx_export",
    "quantisers",
    "quantisation",
    "rotation_search",
    "cli",
)
"""Each imports itself and folders before it, for type checking too."""

MOST_FILES = 12

OWNERS = {
    "click": {
        "cli.convert_commands",
        "cli.early_checks",
        "cli.group",
        "cli.help",
        "cli.main",
        "cli.measure_commands",
        "cli.options",
        "cli.push_command",
        "cli.report_command",
    },
    "compressed_tensors": {"quantisers.quantised_checkpoints"},
    "huggingface_hub": {
        "checkpoint.download",
        "publish.push",
        "publish.repository",
        "publish.written_card",
    },
    "llmcompressor": {
        "quantisation.llm_compressor_modifier",
        "quantisers.quantised_checkpoints",
    },
    "networkx": {"proof.min_cut"},
    "olive": {"quantisation.olive_pass"},
    "onnxruntime": {"onnx_export.runtimes", "quantisers.onnxruntime_quantiser"},
    "onnxscript": {"onnx_export.onnx_program"},
    "openvino": {"onnx_export.runtimes", "quantisers.openvino_programs"},
    "pydantic": {"plan.schema"},
    "rich": {"cli.console", "cli.progress", "cli.output_lines"},
    "torchao": {"quantisers.quantised_checkpoints"},
    "yaml": {"recipe.yaml_text"},
}
"""Each library, and the modules that may import it."""


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Every module by its name inside the package; a folder's ``__init__`` has the folder's."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return {name: path for name, path in found.items() if name not in ("", "__main__")}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path) -> set[str]:
    """Full dotted names that a module imports anywhere, for type checking too."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively, line {node.lineno}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_imports(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Each module, and the modules of the package that it imports."""
    known = modules(package)
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        names = {n.removeprefix("enjoyln_cli.") for n in imported(path) if "enjoyln_cli." in n}
        targets = {n if n in known else n.rpartition(".")[0] for n in names}
        found[module] = {target for target in targets if target in known} - {module}
    return found


def wrong_way(imports: dict[str, set[str]]) -> list[str]:
    rank = {folder: row for row, folder in enumerate(FOLDERS)}
    return [
        f"{module} must not import {target}"
        for module, targets in imports.items()
        for target in sorted(targets)
        if rank[target.split(".")[0]] > rank[module.split(".")[0]]
    ]


def circle(imports: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_folder_has_its_place() -> None:
    assert {module.split(".")[0] for module in modules()} == set(FOLDERS)


def test_imports_point_one_way() -> None:
    assert wrong_way(own_imports()) == []


def test_no_modules_import_each_other() -> None:
    assert circle(own_imports()) == []


def repeated(names: list[str]) -> set[str]:
    return {name for name, number in Counter(names).items() if number > 1}


def type_aliases(module: ast.Module) -> list[str]:
    """The names in title case that a module assigns to."""
    found = [
        node.targets[0].id
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]
    return [name for name in found if name[0].isupper() and not name.isupper()]


def test_a_name_of_a_class_or_module_means_one_thing() -> None:
    paths = [path for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")]
    nodes = [node for path in paths for node in ast.walk(parsed(path))]
    aliases = [name for path in paths for name in type_aliases(parsed(path))]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    assert len(aliases) > 30
    assert not repeated([*classes, *aliases])
    folders = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()]
    stems = [path.stem for path in paths if path.stem != path.parent.name]
    assert len(folders) > 10 and len(stems) > 100
    assert not repeated(folders + stems)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_taken_in_at_a_glance(folder: str) -> None:
    files = [name for name in modules() if name.startswith(f"{folder}.")]
    assert len(files) <= MOST_FILES


@pytest.mark.parametrize("library", OWNERS)
def test_every_library_has_its_owners(library: str) -> None:
    users = {
        module
        for module, path in modules().items()
        if any(name == library or name.startswith(library + ".") for name in imported(path))
    }
    assert users <= OWNERS[library]


def test_tests_mirror_the_folders_and_import_no_other_test() -> None:
    found = sorted(TESTS.glob("*/**/test_*.py"))
    beside = {"checkpoints", "scripts", "support", "system"}
    assert {path.relative_to(TESTS).parts[0] for path in found} <= {*FOLDERS, *beside}
    for path in found:
        assert not [name for name in imported(path) if name.startswith("test_")], path


def test_names_of_tests_are_short() -> None:
    for path in TESTS.rglob("test_*.py"):
        nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)]
        names = [node.name for node in nodes if node.name.startswith("test_")]
        assert not [name for name in names if len(name) > 60], path


def test_type_aliases_are_seen() -> None:
    module = ast.parse("Shape = tuple[int, ...]\nLIMIT = 3\n_Own = int\nitem = Shape\n")
    assert type_aliases(module) == ["Shape"]


def test_wrong_imports_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "cli").mkdir()
    (tmp_path / "plan" / "axis.py").write_text("def f():\n    from enjoyln_cli.cli import main\n")
    (tmp_path / "cli" / "main.py").write_text(
        "if TYPE_CHECKING:\n    from enjoyln_cli.plan.axis import f\n"
    )
    imports = own_imports(tmp_path)
    assert wrong_way(imports) == ["plan.axis must not import cli.main"]
    assert set(circle(imports)) == {"plan.axis", "cli.main"}


@pytest.mark.parametrize("module", ["enjoyln_cli", "enjoyln_cli.cli.main"])
def test_importing_is_cheap(module: str) -> None:
    heavy = "{'torch', 'pydantic', 'transformers', 'rich', 'networkx', 'yaml', 'safetensors'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_every_public_name_is_there() -> None:
    code = "import enjoyln_cli as e; assert all(callable(getattr(e, name)) for name in e.__all__)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b""
