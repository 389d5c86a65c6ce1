"""Requirements that no import of pipeflow shows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pipeflow
from pipeflow.core.extras import DISTRIBUTION

ROOT = Path(__file__).parent.parent
PACKAGE = Path(pipeflow.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_numpy_is_installed_with_pipeflow() -> None:
    assert "numpy" in {re.split(r"[^\w.-]", requirement)[0] for requirement in PROJECT["dependencies"]}


def test_what_errors_tell_to_install_is_there() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    named = {extra for text in texts for extra in re.findall(r"""\binstall\(["'](\w+)["']\)""", text)}
    assert "exact" in named <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("folder", ["docs", "examples", "README.md", "CONTRIBUTING.md", PACKAGE])
def test_nobody_is_told_to_install_the_package_of_another_project(folder: str | Path) -> None:
    """Which has the name on the public index that this one is imported by."""
    root = ROOT / folder
    files = [root] if root.is_file() else [path for kind in ("*.py", "*.md", "*.js") for path in root.rglob(kind)]
    told = re.compile(r"pip install [^\n`]*\bpipeflow(?![\w.-])")
    assert [str(path) for path in files if told.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False])
def test_torch_warns_of_numpy_where_it_is_missing_and_of_nothing_else(there: bool) -> None:
    """Once torch is silent without numpy, the requirement can go."""
    hidden = "" if there else "import sys; sys.modules['numpy'] = None; "
    source = f"{hidden}import torch, pipeflow; pipeflow.Pipeline"
    said = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stderr
    assert ("Failed to initialize NumPy" in said) == (not there)
    assert there <= (said == "")
