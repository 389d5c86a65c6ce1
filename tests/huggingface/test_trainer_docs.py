"""The script of docs/huggingface.md and its change: four lines and an import, and the same trained model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeflow.adapters.libraries import transformers_library
from tests.guides import blocks, changed, guide, section
from tests.huggingface.trainers import make_module
from tests.scripts import run_ranks

pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
SECTION = section(guide("docs/huggingface.md"), "Training with transformers' Trainer")
[LENGTHS] = blocks(section(guide("docs/huggingface.md"), "Texts of different lengths"), "diff")


def shown() -> tuple[str, str]:
    """The script, and its difference."""
    [script], [difference] = blocks(SECTION, "python"), blocks(SECTION, "diff")
    return script, difference


def test_four_lines_change() -> None:
    added = [line[1:] for line in shown()[1].splitlines() if line.startswith("+")]
    assert len([line for line in added if not line.startswith("import ")]) == 4
    assert len(added) == 5


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by_length", [False, True])
def test_the_changed_script_trains_the_same_model(
    by_length: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_module("llama").save_pretrained("model")
    script, difference = shown()
    exec(script, {})
    expected = transformers_library().AutoModelForCausalLM.from_pretrained("trained").state_dict()
    script = changed(script, difference)
    Path("changed.py").write_text(changed(script, LENGTHS) if by_length else script, encoding="utf-8")
    Path("trained").rename("expected")
    run_ranks(tmp_path / "changed.py", ranks=2, folder=tmp_path, TRANSFORMERS_VERBOSITY="error")
    found = transformers_library().AutoModelForCausalLM.from_pretrained("trained").state_dict()
    assert found.keys() == expected.keys()
    start = make_module("llama").state_dict()
    for name, weight in found.items():
        assert torch.allclose(weight, expected[name], atol=1e-5), name
        assert not torch.equal(weight, start[name])
