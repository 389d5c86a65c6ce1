"""Requirements that no import of pipeflow shows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeflow.core.distributions import DISTRIBUTION
from tests.sources import PACKAGE, Fault, Source, require

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.lint
def test_numpy_is_installed_with_pipeflow() -> None:
    assert "numpy" in {re.split(r"[^\w.-]", requirement)[0] for requirement in PROJECT["dependencies"]}


@pytest.mark.lint
def test_what_errors_tell_to_install_is_there() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    told = re.compile(r"""\b(?:install\(|needed\("\w+", )["'](\w+)["']""")
    named = {extra for text in texts for extra in told.findall(text)}
    assert "exact" in named <= set(PROJECT["optional-dependencies"])


def installs_of_another_project(source: Source) -> Iterator[Fault]:
    """Which has the name on the public index that this one is imported by."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if re.search(r"pip install [^\n`]*\bpipeflow(?![\w.-])", line):
            yield number, line.strip()


@pytest.mark.lint
def test_nobody_is_told_to_install_the_package_of_another_project() -> None:
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder in (ROOT / "docs", ROOT / "examples", PACKAGE):
        files += [path for path in folder.rglob("*") if path.suffix in {".py", ".md", ".js"}]
    require(installs_of_another_project, (Source.read(path, ROOT) for path in files))


@pytest.mark.lint
def test_the_guard_sees_who_tells_it() -> None:
    text = "pip install pipeflow-torch\npip install 'pipeflow[exact]'\nimport pipeflow\npip install -U pipeflow\n"
    assert [line for line, _ in installs_of_another_project(Source("one.md", text))] == [2, 4]


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False])
def test_torch_warns_of_numpy_where_it_is_missing_and_of_nothing_else(there: bool) -> None:
    """Once torch is silent without numpy, the requirement can go."""
    hidden = "" if there else "import sys; sys.modules['numpy'] = None; "
    source = f"{hidden}import torch, pipeflow; pipeflow.Pipeline"
    said = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stderr
    assert ("Failed to initialize NumPy" in said) == (not there)
    assert there <= (said == "")
