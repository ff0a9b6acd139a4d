"""The architecture, enforced: imports point downwards, and every library has its owner."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "enjoyln_cli"

LAYERS = (
    ("cli",),
    ("convert", "usage", "arguments", "progress"),
    ("quantizer", "bench"),
    ("cases",),
    ("report", "unfold", "hub", "verify", "loading", "sketch", "draw", "plot"),
    ("card", "repository"),
    ("alike", "budget"),
    ("rows", "measure", "speeds", "variants", "workload"),
    ("sampling",),
    ("timing",),
    ("weights", "centred", "fusion", "config_differences", "nonfinite", "missing_weights"),
    ("compare", "neutral"),
    ("user_data", "embedding"),
    ("norms", "fold", "inputs"),
    ("stream", "keeping", "marker", "offload", "structure"),
    ("blocks", "recipe", "suggest"),
    ("journal",),
    ("kept", "follow"),
    ("placing",),
    ("steps",),
    ("undo",),
    ("asked",),
    ("draft",),
    ("wider", "merging"),
    ("schema",),
    ("template",),
    ("analysis",),
    ("outcome",),
    ("resize",),
    ("ties",),
    ("why", "paper", "classes", "gains", "detect", "merge", "same"),
    ("cut", "layout"),
    ("scales", "widen"),
    ("flow", "sizes"),
    ("trace", "trials", "generation", "rules", "lookups", "products"),
    ("recorder",),
    ("meta_results",),
    ("picks", "probe", "running"),
    ("calls", "edit", "writes", "living", "places", "regions", "sharing"),
    ("plan", "nodes", "examples", "weightless", "norm_modules", "arithmetic", "calltext"),
    ("reachable", "reasons", "questions"),
    ("returned", "specs"),
    ("checkpoint",),
    ("remote",),
    ("config", "shards", "output", "news"),
    ("pipeline",),
    ("files",),
    ("axis", "units", "distances", "corrections", "pictures", "team", "memory", "machine"),
    ("pace",),
    ("clock",),
    ("covered", "scope", "adapters", "holders"),
    ("errors", "console"),
)
"""A module imports modules of later rows only. ``__init__`` and ``__main__`` stand above all."""

OWNERS = {
    "click": {"cli", "usage", "arguments"},
    "rich": {"report", "progress", "console"},
    "torch.export": {"trace", "sizes"},
    "safetensors": {"checkpoint"},
    "huggingface_hub": {"remote", "hub", "repository"},
    "yaml": {"recipe"},
    "networkx": {"cut"},
    "xxhash": {"kept"},
    "grandalf": {"pictures"},
    "PIL": {"draw"},
    "matplotlib": {"plot"},
}


def modules() -> list[str]:
    return sorted(path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__"))


def imported(module: str) -> set[str]:
    """Full dotted names that a module imports anywhere, except for type checking only."""
    names: set[str] = set()
    for node in _runtime_nodes(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively, line {node.lineno}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.export":
            names.add("torch.export")
    return names


def _runtime_nodes(tree: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        found += [child, *_runtime_nodes(child)]
    return found


def own_modules(names: set[str]) -> set[str]:
    return {
        name.split(".")[1]
        for name in names
        if name.startswith("enjoyln_cli.") and name.split(".")[1] in set(modules())
    }


@pytest.mark.parametrize("module", modules())
def test_imports_point_downwards(module: str) -> None:
    rank = {name: row for row, names in enumerate(LAYERS) for name in names}
    assert module in rank, f"give {module} a place in LAYERS"
    for target in own_modules(imported(module)):
        assert rank[module] < rank[target], f"{module} must not import {target}"


@pytest.mark.parametrize("library", OWNERS)
def test_every_library_has_one_owner(library: str) -> None:
    users = {
        module
        for module in modules()
        if any(name == library or name.startswith(library + ".") for name in imported(module))
    }
    assert users <= OWNERS[library]


def test_an_upward_import_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "axis.py").write_text("def f():\n    from enjoyln_cli import plan\n")
    (tmp_path / "plan.py").write_text("")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert own_modules(imported("axis")) == {"plan"}


@pytest.mark.parametrize("module", ["enjoyln_cli", "enjoyln_cli.cli"])
def test_importing_is_cheap(module: str) -> None:
    heavy = "{'torch', 'transformers', 'rich', 'networkx', 'yaml', 'safetensors'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_exports_are_functions_even_after_their_modules_are_imported() -> None:
    code = (
        "import enjoyln_cli.fold, enjoyln_cli.verify; import enjoyln_cli as e; "
        "from enjoyln_cli import analyze, fold, verify, load_recipe; "
        "assert all(callable(f) for f in (analyze, fold, verify, load_recipe, e.fold, e.verify)); "
        "assert set(e.__all__) <= set(dir(e)) | set(e._LAZY)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_kernels_know_nothing_of_the_rest() -> None:
    """Any module may import the package ``kernels``, which imports none of them."""
    for path in (PACKAGE / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("enjoyln_cli"):
                assert str(node.module).startswith("enjoyln_cli.kernels"), path.name
