"""The modules of the pages: lint, size, and who may import whom. In a browser, all of them lie in one folder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pipeflow

STATIC, SERVED = (Path(pipeflow.__file__).parent / name / "page" for name in ("draw", "explore"))
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
    (tmp_path / "other.js").write_text("export const known = 1;\n")
    (tmp_path / "one.js").write_text(text + "\n")
    assert rule in lint(tmp_path)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_what_another_exports(name: str) -> None:
    text = MODULES[name].read_text()
    imports = [(names.split(", "), module) for names, module in IMPORT.findall(text)]
    assert [module for _, module in imports] == [path[2:-3] for path in FROM.findall(text)]  # in no other form
    for names, module in imports:
        assert set(names) <= set(EXPORT.findall(MODULES[module].read_text()))
    assert max(map(len, text.splitlines())) <= 130
    assert "\t" not in text
    assert text.startswith("/* ")  # what it is


@pytest.mark.parametrize("path", sorted(STATIC.glob("*.js")), ids=lambda path: path.stem)
def test_a_module_of_the_static_page_needs_no_server(path: Path) -> None:
    text = path.read_text()
    assert {name[2:-3] for name in FROM.findall(text)} <= {each.stem for each in STATIC.glob("*.js")}
    assert not re.search(r"\bfetch\(|XMLHttpRequest|WebSocket|EventSource|sendBeacon", text)


def test_names_of_files_are_unique() -> None:
    names = [path.name for folder in (STATIC, SERVED) for path in folder.iterdir() if path.suffix in {".js", ".css"}]
    assert sorted(names) == sorted(set(names))
