"""One name, one thing: no two classes and no two modules of the package have the same name."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "enjoyln_cli"
MODULES = [path for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")]


def repeated(names: list[str]) -> set[str]:
    return {name for name, number in Counter(names).items() if number > 1}


def test_a_class_name_means_one_thing() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in MODULES]
    classes = [n.name for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    assert len(classes) > 100
    assert not repeated(classes)


def test_a_module_name_means_one_thing() -> None:
    folders = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()]
    modules = [path.stem for path in MODULES if path.stem != path.parent.name]
    assert len(folders) > 10 and len(modules) > 100
    assert not repeated(folders + modules)
