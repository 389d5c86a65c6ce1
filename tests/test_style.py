"""What can be counted of the style in CONTRIBUTING.md: docstrings, the size of the package, checks switched off."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pkgutil import resolve_name

import pytest

from tests.sources import DOCS, Fault, Rule, Source, require, require_none, sources

pytestmark = pytest.mark.lint
SWITCH = re.compile(r"#\s*(?:type: ignore|noqa)\b")
SWITCH_WITH_REASON = re.compile(r"#\s*(?:type: ignore\[[\w, -]+\]|noqa: [A-Z]+\d+)  # \w")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def checks_off_without_reason(source: Source) -> Iterator[Fault]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if SWITCH.search(line) and not SWITCH_WITH_REASON.search(line):
            yield number, f"no reason for {line.strip()}"


def module_without_docstring(source: Source) -> Iterator[Fault]:
    if ast.get_docstring(source.tree) is None:
        yield 1, "the module has no docstring"


@cache
def methods_of_protocols() -> set[str]:
    """The methods that a protocol describes, for all who keep it."""
    classes = (node for source in sources() for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef))
    protocols = (each for each in classes if any(ast.unparse(base) == "Protocol" for base in each.bases))
    return {method.name for protocol in protocols for method in protocol.body if isinstance(method, Function)}


def public_without_docstring(source: Source) -> Iterator[Fault]:
    """The public classes and functions of a module, and the methods of its public classes, that have no docstring.
    Not asked of properties, which are read like attributes, special methods, and what a base or a protocol describes.
    """
    for node in source.tree.body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            yield node.lineno, f"{node.name} has no docstring"
        if isinstance(node, ast.ClassDef) and not node.bases:
            for method in node.body:
                if not isinstance(method, Function) or method.decorator_list or method.name in methods_of_protocols():
                    continue
                if not method.name.startswith("_") and ast.get_docstring(method) is None:
                    yield method.lineno, f"{node.name}.{method.name} has no docstring"


def words(node: Function | ast.ClassDef) -> int:
    return len(re.findall(r"\S*\w\S*", ast.get_docstring(node) or ""))


def empty_docstrings(source: Source) -> Iterator[Fault]:
    """Docstrings that are too short to say more than the name, such as "Does nothing."."""
    for node in source.tree.body:
        for each in (node, *node.body) if isinstance(node, ast.ClassDef) else (node,):
            if isinstance(each, Function | ast.ClassDef) and 0 < words(each) < 4:
                yield each.lineno, f"the docstring of {each.name} has fewer than 4 words"


STATE = {  # what this process has saved, to notice others; the context
    ("training/checkpoint/save.py", "_ISSUED: dict[Path, int] = {}"),
    ("engine/parallel/context.py", "ContextVar"),
}


def state(source: Source) -> Iterator[Fault]:
    """Context variables, thread-local values, globals that functions assign, and containers that start empty."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("ContextVar", "local"):
                yield node.lineno, called
        if isinstance(node, ast.Global):
            yield node.lineno, "global"
    for statement in source.tree.body:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict | ast.List) and not ast.unparse(value).strip("[]{}"):
            yield statement.lineno, ast.unparse(statement)


RULES = (
    checks_off_without_reason,
    module_without_docstring,
    public_without_docstring,
    empty_docstrings,
)


@pytest.mark.parametrize("rule", RULES)
def test_no_module_breaks(rule: Rule) -> None:
    require(rule, sources())


def test_the_package_keeps_one_state() -> None:
    found = {(source.name, what): line for source in sources() for line, what in state(source)}
    require_none(f"{name}:{line}: {what}" for (name, what), line in found.items() if (name, what) not in STATE)
    assert set(found) >= STATE


SWITCHES = "a  # type: ignore[misc]\nb  # noqa\nc  # noqa: N801  # as torch has it\nd  # type: ignore[a]  # so\n"
PUBLIC = "def told(): 'so'\ndef bare(): ...\ndef _own(): ...\nclass A:\n    'so'\n    def of(self): ...\n"
EMPTY = "def f(): 'Does nothing.'\ndef g(): 'The rank of this process.'\nclass A:\n    def f(self): 'Always.'\n"


@pytest.mark.parametrize(
    ("rule", "text", "lines"),
    [
        (checks_off_without_reason, SWITCHES, [1, 2]),
        (module_without_docstring, "a = 1\n", [1]),
        (public_without_docstring, PUBLIC, [2, 6]),
        (empty_docstrings, EMPTY, [1, 4]),
        (state, "a = ContextVar('a')\nb: list[int] = []\nc = [1]\ndef f():\n    global c\n", [1, 5, 2]),
    ],
)
def test_the_guard_sees(rule: Rule, text: str, lines: list[int]) -> None:
    assert [line for line, _ in rule(Source("colossalai/one.py", text))] == lines


def without_encoding(source: Source) -> Iterator[Fault]:
    """Text that is read or written in the encoding of the machine, which may not be UTF-8."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or any(each.arg in ("encoding", None) for each in node.keywords):
            continue
        match node.func:
            case ast.Attribute(attr="read_text"):
                is_text = not node.args
            case ast.Attribute(attr="write_text"):
                is_text = len(node.args) < 2
            case ast.Name(id="open"):
                is_text = is_text_mode(node, 1)
            case ast.Attribute(attr="open"):
                is_text = len(node.args) == 1 and is_text_mode(node, 0)
            case _:
                is_text = False
        if is_text:
            yield node.lineno, f"{ast.unparse(node)[:40]}: say encoding="


def is_text_mode(call: ast.Call, place: int) -> bool:
    """Whether a call of `open` has no mode, or one of text; one that is no literal is taken for another argument."""
    named = [each.value for each in call.keywords if each.arg == "mode"]
    mode = named[0] if named else (call.args[place] if len(call.args) > place else ast.Constant("r"))
    return isinstance(mode, ast.Constant) and re.fullmatch(r"[rwax]\+?t?", str(mode.value)) is not None


def test_text_has_an_encoding() -> None:
    root = DOCS.parent
    files = [path for folder in ("tests", "docs", "examples", "benchmarks") for path in (root / folder).rglob("*.py")]
    require(without_encoding, [*sources(), *(Source.read(path, root) for path in files)])


def test_the_guard_sees_text_without_an_encoding() -> None:
    text = """
path.read_text()
path.write_text(value)
open(path)
open(path, "w+")
path.open("a")
path.read_text("utf-8")
path.read_text(encoding="utf-8")
open(path, "rb")
archive.open("name")
browser.open(url)
path.write_text(value, **options)
"""
    assert [line for line, _ in without_encoding(Source("one.py", text))] == [2, 3, 4, 5, 6]


def patched_nowhere(source: Source) -> Iterator[Fault]:
    """Names in a text that `setattr` gets, such as those of a module that was renamed. Neither a type checker nor the
    tests that are left to `make test-all` tell of them at once.
    """
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(ast.Attribute(attr="setattr"), [ast.Constant(str(name)), *_]) if name.startswith("pipeflow."):
                try:
                    resolve_name(name)
                except (AttributeError, ImportError):
                    yield node.lineno, f"there is no {name}"


def test_what_a_test_patches_exists() -> None:
    root = DOCS.parent
    require(patched_nowhere, [Source.read(path, root) for path in sorted((root / "tests").rglob("*.py"))])


def test_the_guard_sees_what_is_patched_nowhere() -> None:
    text = """
patch.setattr("pipeflow.core.schedule.Schedule.actions", 1)
patch.setattr("pipeflow.core.schedule.Timetable", 1)
patch.setattr("pipeflow.core.timetable.Schedule", 1)
patch.setattr("torch.nothing", 1)
"""
    assert [line for line, _ in patched_nowhere(Source("one.py", text))] == [3, 4]


def test_a_failure_lists_every_offender() -> None:
    files = [Source("one.py", SWITCHES), Source("two.py", "b  # noqa\n")]
    with pytest.raises(pytest.fail.Exception) as failure:
        require(checks_off_without_reason, files)
    assert [line.partition(": ")[0] for line in str(failure.value).splitlines()] == ["one.py:1", "one.py:2", "two.py:1"]


def test_the_package_is_no_larger_than_the_changelog_says() -> None:
    """What grows says so: write the new number into the newest entry, and say there what users have of it."""
    lines = sum(source.text.count("\n") for source in sources())
    told = re.search(r"([\d,]+) lines of Python", (DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert told, "the newest entry of the changelog says how many lines the package has"
    limit = int(told[1].replace(",", ""))
    assert lines <= limit, f"the package has {lines:,} lines of Python, the changelog says {limit:,}"
