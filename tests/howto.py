"""Follows a how-to page to the letter: writes the files that it shows, changes others as its diffs say, and runs its
commands, whose output must be what the page shows.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"(?:`([^`\n]+)`:\n\n)?```(python|diff|console)\n(.*?)```", re.DOTALL)
PROGRAMS = {
    "pipeflow": [sys.executable, "-m", "pipeflow"],
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}


def follow(page: str, folder: Path, *, runs: bool = True) -> None:
    """Does in `folder` what a page says; without `runs`, only its files and diffs."""
    for file, kind, text in BLOCK.findall(page):
        if kind == "python":
            assert file, f"no file is named for:\n{text}"
            (folder / file).write_text(text, encoding="utf-8")
        elif kind == "diff":
            change(folder / file, text)
        elif runs:
            for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
                run(command, shown, folder)


def change(file: Path, diff: str) -> None:
    """Applies the hunks of a diff, which begin at lines with @@: where the old lines stand, there come the new ones."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
        text = file.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file.name} has not once:\n{old}"
        file.write_text(text.replace(old, new), encoding="utf-8")


def run(command: str, shown: str, folder: Path) -> None:
    """Runs a command; what it prints must begin with the lines that are shown before a line with dots, or be them."""
    program, *arguments = shlex.split(command)
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    done = subprocess.run(
        [*PROGRAMS[program], *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    start, dots, _ = shown.partition("...\n")
    assert done.stdout.startswith(start) if dots or not shown else done.stdout.strip() == shown.strip(), done.stdout
