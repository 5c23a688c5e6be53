"""Benchmarks are run by hand, and claims in the docs name them: what they import from us must be there."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent.parent / "benchmarks").glob("*.py"))


def test_there_are_some() -> None:
    assert len(FILES) > 10


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_a_benchmark_imports_from_us_is_there(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in ("understudy", "tests"):
            continue
        try:
            module = importlib.import_module(node.module or "")
        except ModuleNotFoundError as error:
            if error.name != "triton":  # on a GPU alone
                raise
            continue
        for alias in node.names:
            is_module = not hasattr(module, alias.name) and importlib.util.find_spec(f"{node.module}.{alias.name}")
            assert hasattr(module, alias.name) or is_module, f"{file.name}: {node.module} has no {alias.name}"
