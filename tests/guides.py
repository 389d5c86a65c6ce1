"""What guides show: their blocks, and scripts changed as a guide's difference says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def guide(name: str) -> str:
    """The text of a guide, or of the README."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, kind: str, start: str = "") -> list[str]:
    """The blocks of that kind that start like this, in order."""
    return re.findall(rf"^```{kind}\n({re.escape(start)}.*?)^```", text, re.DOTALL | re.MULTILINE)


def section(text: str, title: str) -> str:
    """What a guide says under a heading of the second level."""
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def commands(console: str) -> list[tuple[str, str]]:
    """The commands of a console block, without what follows `    #`, and what it shows below each."""
    lines = console.replace(" \\\n    ", " ")
    found = re.findall(r"^\$ (.*)\n((?:[^$].*\n|\n)*)", lines, re.MULTILINE)
    return [(re.sub(r"\s{2,}#.*", "", command), shown) for command, shown in found]


def changed(script: str, difference: str) -> str:
    """The script with what the difference adds, each line after the one that stands before it there."""
    lines, at = script.splitlines(), 0
    for sign, line in ((each[:1] or " ", each[1:]) for each in difference.splitlines()):
        if sign == "+":
            lines.insert(at, line)
            at += 1
        else:
            at = lines.index(line, at) + (sign == " ")
            del lines[at : at + (sign == "-")]
    return "\n".join(lines) + "\n"


def side(difference: str, sign: str) -> str:
    """The script before a whole difference (`-`) or after it (`+`)."""
    kept = [line[1:] for line in difference.splitlines() if line[:1] in (sign, " ", "")]
    return "\n".join(kept) + "\n"
