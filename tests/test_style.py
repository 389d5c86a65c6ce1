"""What can be counted of the style in CONTRIBUTING.md: sizes, docstrings, reasons for what is switched off."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeflow

PACKAGE = Path(pipeflow.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
SWITCH = re.compile(r"#\s*(?:type: ignore|noqa)\b")
SWITCH_WITH_REASON = re.compile(r"#\s*(?:type: ignore\[[\w, -]+\]|noqa: [A-Z]+\d+)  # \w")
TREES = {path: ast.parse(path.read_text()) for path in MODULES}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def size(function: Function) -> int:
    """The lines of a function besides its docstring."""
    documented = len((ast.get_docstring(function) or "").splitlines())
    return (function.end_lineno or function.lineno) - function.lineno + 1 - documented


def too_long(tree: ast.Module) -> list[str]:
    """The functions of more than 60 lines, with the line at which they begin: a name may stand there twice."""
    return [f"{each.name}, line {each.lineno}" for each in functions(tree) if size(each) > 60]


def without_reason(text: str) -> list[str]:
    """The lines that switch a check off and do not say why."""
    return [line for line in text.splitlines() if SWITCH.search(line) and not SWITCH_WITH_REASON.search(line)]


def of_protocols() -> set[str]:
    """The methods that a protocol describes, for all who keep it."""
    classes = (node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    protocols = (each for each in classes if any(ast.unparse(base) == "Protocol" for base in each.bases))
    return {method.name for protocol in protocols for method in protocol.body if isinstance(method, Function)}


PROTOCOLS = of_protocols()


def without_docstring(tree: ast.Module) -> Iterator[str]:
    """The public classes and functions of a module, and the methods of its public classes, that have no docstring.
    Not asked of properties, which are read like attributes, special methods, and what a base or a protocol describes.
    """
    for node in tree.body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            yield node.name
        if isinstance(node, ast.ClassDef) and not node.bases:
            for method in node.body:
                if not isinstance(method, Function) or method.decorator_list or method.name in PROTOCOLS:
                    continue
                if not method.name.startswith("_") and ast.get_docstring(method) is None:
                    yield f"{node.name}.{method.name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module(path: Path) -> None:
    text, tree = path.read_text(), TREES[path]
    assert text.count("\n") <= 400
    assert too_long(tree) == []
    assert without_reason(text) == []
    assert ast.get_docstring(tree) is not None
    assert list(without_docstring(tree)) == []


def test_the_guard_sees_each_function_of_a_name() -> None:
    long = "def f():\n    'so'\n" + "    pass\n" * 60
    source = f"{long}class A:\n    def f(self): ...\n"
    assert too_long(ast.parse(source)) == ["f, line 1"]


def test_the_guard_sees_what_lacks_a_reason() -> None:
    lines = ["a  # type: ignore[misc]", "b  # noqa", "c  # noqa: N801  # as torch has it", "d  # type: ignore[a]  # so"]
    assert without_reason("\n".join(lines)) == lines[:2]


def test_the_guard_sees_what_lacks_a_docstring() -> None:
    source = "def told(): 'so'\ndef bare(): ...\ndef _own(): ...\nclass A:\n    'so'\n    def of(self): ...\n"
    assert list(without_docstring(ast.parse(source))) == ["bare", "A.of"]
