"""Requirements that no import of pipeflow shows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_numpy_is_installed_with_pipeflow() -> None:
    assert "numpy" in {re.split(r"[^\w.-]", requirement)[0] for requirement in PROJECT["dependencies"]}


@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False])
def test_torch_warns_of_numpy_where_it_is_missing_and_of_nothing_else(there: bool) -> None:
    """Once torch is silent without numpy, the requirement can go."""
    hidden = "" if there else "import sys; sys.modules['numpy'] = None; "
    source = f"{hidden}import torch, pipeflow; pipeflow.Pipeline"
    said = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stderr
    assert ("Failed to initialize NumPy" in said) == (not there)
    assert there <= (said == "")
