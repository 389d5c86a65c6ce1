"""What a beginner types by mistake: each error says what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.run import error

TABLES = {
    "0F0 0B0": "commas between actions",
    "0F0\t0B0": "commas between actions",
    "rank,actions": "like 2F0",
    "0f0,0b0": "like 2F0",
    "": "one line per rank, with cells like 0F0,0F1,0B0",
}
COMMANDS = {
    "draw interleaved": "'interleaved-1f1b'",
    "draw ScheduleZBVZeroBubble": "'zb-v'",
    "draw 1f1b --stages 4": "--ranks",
    "draw 1f1b --microbatches 0": "at least 1",
    "draw v-min --chunks 3": "it has no options",
    "draw 1f1b -n 4": "--ranks",
    "draw 1f1b --svg": "as in --svg FILE",
    "draw 1f1b --output 1f1b.svg": "--svg",
    "drow 1f1b": "'draw'",
    "compare gpipe,1f1b": "put spaces between names, as in gpipe 1f1b",
    "export 1f1b": "as in --csv FILE",
    "plan gpt3-175b --gpu h100": "--device?",
    "plan meta-llama/Llama-3-8B": "'llama3-8b'",
    "plan gpt3-175b --gpus 64": "--devices",
    "plan gpt3-175b --tp 8": "--tensor",
    "plan gpt3-175b --stages 4": "--pipeline",
    "plan gpt3-175b --devices 64": "with --batch",
    "plan gpt3-175b --devices 64 --batch 64": "with --device or --cluster",
    "plan gpt3-175b --memory 80": "such as 80GiB",
    "explain": "TRACE",
    "explain {folder}": "there are no traces in this folder, which end in .json",
    "explain {folder}/table.csv": "give a trace of torch.profiler, or a timeline",
}


@pytest.mark.parametrize("text", TABLES)
def test_a_table_that_is_none_says_how_to_write_it(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table.csv").write_text(text, encoding="utf-8")
    assert TABLES[text] in error(capsys, "verify", tmp_path / "table.csv")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_none_says_what_to_type(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table.csv").write_text("0F0,0B0\n", encoding="utf-8")
    assert COMMANDS[command] in error(capsys, *command.format(folder=tmp_path).split())
