"""The script of docs/huggingface.md and its change: three lines and an import, and the same trained model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pipeflow.huggingface.lazy_import import library
from tests.huggingface.trainers import make_module
from tests.scripts import run_ranks

pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
DOCUMENT = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
SECTION = DOCUMENT[DOCUMENT.index("## Training with transformers' Trainer") :]


def blocks() -> tuple[str, str]:
    """The script, and its difference."""
    found = re.search(r"```python\n(.*?)```.*?```diff\n(.*?)```", SECTION, re.DOTALL)
    assert found is not None
    return found[1], found[2]


def changed(script: str, difference: str) -> str:
    """The script with what the difference adds, each line after the one that stands before it there."""
    lines, at = script.splitlines(), 0
    for sign, line in ((each[0], each[1:]) for each in difference.splitlines()):
        if sign == "+":
            lines.insert(at, line)
            at += 1
        else:
            at = lines.index(line) + (sign == " ")
            del lines[at : at + (sign == "-")]
    return "\n".join(lines)


def test_three_lines_change() -> None:
    added = [line[1:] for line in blocks()[1].splitlines() if line.startswith("+")]
    assert len([line for line in added if not line.startswith("import ")]) == 3
    assert len(added) == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_changed_script_trains_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_module("llama").save_pretrained("model")
    script, difference = blocks()
    exec(script, {})
    expected = library().AutoModelForCausalLM.from_pretrained("trained").state_dict()
    Path("changed.py").write_text(changed(script, difference))
    Path("trained").rename("expected")
    run_ranks(tmp_path / "changed.py", ranks=2, folder=tmp_path, TRANSFORMERS_VERBOSITY="error")
    found = library().AutoModelForCausalLM.from_pretrained("trained").state_dict()
    assert found.keys() == expected.keys()
    start = make_module("llama").state_dict()
    for name, weight in found.items():
        assert torch.allclose(weight, expected[name], atol=1e-5), name
        assert not torch.equal(weight, start[name])
