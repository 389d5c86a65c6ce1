"""The modules of the pages: lint, size, and who may import whom. In a browser, all of them lie in one folder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import PACKAGE, Fault, Rule, Source, line_of, require

pytestmark = pytest.mark.lint
STATIC, SERVED = (PACKAGE / name / "page" for name in ("draw", "tools/explore"))
MODULES = {path.stem: path for folder in (STATIC, SERVED) for path in folder.glob("*.js")}
FROM = re.compile(r"""(?<!["'])\b(?:from|import)\s*\(?\s*["']([^"']+)["']""")
IMPORT = re.compile(r'^import \{([\w, ]+)\} from "\./([\w-]+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?:async )?(?:const|let|function\*?|class) (\w+)", re.MULTILINE)
CONFIG = Path(__file__).with_name("oxlint.json")
OXLINT = shutil.which("oxlint", path=str(Path(sys.executable).parent))


def lint(folder: Path) -> str:
    """What oxlint says about the modules in a folder."""
    if OXLINT is None:
        pytest.skip("needs oxlint: pip install oxlint")
    words = [OXLINT, "--config", str(CONFIG), "--format", "unix", str(folder)]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def test_the_modules_pass_the_linter(tmp_path: Path) -> None:
    for path in MODULES.values():
        shutil.copy(path, tmp_path)
    assert lint(tmp_path) == ""


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("alert(missing);", "no-undef"),
        ("made = 1;", "no-undef"),
        ("event.preventDefault();", "no-restricted-globals"),
        ("const unused = 1;", "no-unused-vars"),
        ("export function f(x) { let y = x; return y; }", "prefer-const"),
        ("export function f(x) { return x == 1; }", "eqeqeq"),
        ('import {missing} from "./other.js"; alert(missing);', "import(named)"),
        ('import {known} from "./other.js";', "no-unused-vars"),
        ("export const = 1;", "Unexpected token"),
    ],
)
def test_the_linter_sees_what_is_wrong(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "other.js").write_text("export const known = 1;\n", encoding="utf-8")
    (tmp_path / "one.js").write_text(text + "\n", encoding="utf-8")
    assert rule in lint(tmp_path)


def imports_of_what_no_module_exports(source: Source) -> Iterator[Fault]:
    """And those in another form than `import {a, b} from "./module.js";`."""
    for number, line in enumerate(source.text.splitlines(), 1):
        found = IMPORT.fullmatch(line)
        if found is None and FROM.search(line):
            yield number, f"another form of import: {line}"
        if found is not None and found[2] not in MODULES:
            yield number, f"there is no {found[2]}.js"
        elif found is not None:
            for name in set(found[1].split(", ")) - set(EXPORT.findall(MODULES[found[2]].read_text(encoding="utf-8"))):
                yield number, f"{found[2]}.js exports no {name}"


def odd_form(source: Source) -> Iterator[Fault]:
    """Long lines, tabs, no comment that says what the module is."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if len(line) > 130 or "\t" in line:
            yield number, f"{len(line)} characters, more than 130, or a tab"
    if not source.text.startswith("/* "):
        yield 1, "does not say what it is"


def needs_of_a_server(source: Source) -> Iterator[Fault]:
    """Of a module of the static page."""
    if source.name.startswith("draw/"):
        for found in FROM.finditer(source.text):
            if found[1][2:-3] not in {each.stem for each in STATIC.glob("*.js")}:
                yield line_of(source.text, found.start()), f"the static page has no {found[1]}"
        for found in re.finditer(r"\bfetch\(|XMLHttpRequest|WebSocket|EventSource|sendBeacon", source.text):
            yield line_of(source.text, found.start()), f"{found[0]} needs a server"


@pytest.mark.parametrize("rule", [imports_of_what_no_module_exports, odd_form, needs_of_a_server])
def test_no_module_has(rule: Rule) -> None:
    require(rule, map(Source.read, MODULES.values()))


@pytest.mark.parametrize(
    ("rule", "text", "lines"),
    [
        (imports_of_what_no_module_exports, 'import {never} from "./CHART.js";', [1]),
        (imports_of_what_no_module_exports, 'import {never} from "./never.js";', [1]),
        (imports_of_what_no_module_exports, 'import {\n    a,\n} from "./CHART.js";', [3]),
        (imports_of_what_no_module_exports, 'import * as all from "./CHART.js";', [1]),
        (odd_form, "/* so */\n" + "x" * 131 + "\n\tx\n", [2, 3]),
        (odd_form, "x", [1]),
        (needs_of_a_server, 'import {served} from "./SERVED.js";\nfetch("/");\n', [1, 2]),
    ],
)
def test_the_guard_sees(rule: Rule, text: str, lines: list[int]) -> None:
    chart, served = (sorted(folder.glob("*.js"))[0].stem for folder in (STATIC, SERVED))
    source = Source("draw/page/one.js", text.replace("CHART", chart).replace("SERVED", served))
    assert [line for line, _ in rule(source)] == lines


def test_names_of_files_are_unique() -> None:
    names = [path.name for folder in (STATIC, SERVED) for path in folder.iterdir() if path.suffix in {".js", ".css"}]
    assert sorted(names) == sorted(set(names))
