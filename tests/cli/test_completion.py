from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from pipeflow.schedules import SCHEDULES
from pipeflow.tools.cli.names import SHELLS
from tests.cli.run import error, out

OF_BASH = """
{script}
COMP_WORDS=({words}) COMP_CWORD={last} COMPREPLY=()
_shtab_pipeflow
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def _shtab() -> None:
    pytest.importorskip("shtab", reason="needs shtab: pip install shtab")


@pytest.mark.usefixtures("_shtab")
@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_knows_commands_options_and_schedules(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    script = out(capsys, "completion", shell)
    for word in ("compare", "critical", "microbatches", "bidirectional", "zb-auto"):
        assert word in script


@pytest.mark.slow
@pytest.mark.usefixtures("_shtab")
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("com", {"compare", "completion"}),
        ("draw zb-", {name for name in SCHEDULES if name.startswith("zb-")}),
        ("verify --pl", {"--placement"}),
        ("verify --placement b", {"bidirectional"}),
        ("plan gpt3-17", {"gpt3-175b"}),
        ("explore --li", {"--link"}),
        ("explore hana", {"hanayo"}),
    ],
)
def test_bash_completes(capsys: pytest.CaptureFixture[str], line: str, expected: set[str]) -> None:
    words = ["pipeflow", *line.split()]
    text = OF_BASH.format(script=out(capsys, "completion", "bash"), words=" ".join(words), last=len(words) - 1)
    found = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout.split()
    assert set(found) == expected


def test_without_the_library_the_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert error(capsys, "completion", "bash") == "completion needs shtab: pip install 'pipeflow-torch[completion]'"
    assert error(capsys, "completion", "tcsh").startswith("argument SHELL: invalid choice: 'tcsh'")
