"""Writes the list of models in models.md from the families that the tests train: `make gallery`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # so that the tests are found from anywhere

from tests.stages.families import HEADS, KNOWN, SEEN, WRITTEN  # noqa: E402  # after the path
from tests.stages.family import Family  # noqa: E402  # after the path

PAGE = "docs/models.md"
BEGIN, END = "<!-- docs/tried.py writes from here -->", "<!-- to here -->"


def items() -> str:
    """The list: an item for each kind of test and tolerance."""
    parts = [
        (
            "Each cut in two, and one block per stage; with enough blocks 1F1B, interleaved 1F1B, ZB-V and DualPipeV",
            [*KNOWN.values()],
        ),
        ("Other heads, and models without a head: the same tests", [*HEADS.values()]),
        (
            "Models that were not used to develop pipeflow: each cut in two, and one block per stage",
            [*WRITTEN.values(), *SEEN.values()],
        ),
    ]
    alone = [each for _, families in parts for each in families if each.is_alone]
    parts = [(what, [each for each in families if not each.is_alone]) for what, families in parts]
    parts.append(("Each cut in two, with the stages run one after the other in one process", alone))
    lines = []
    for what, families in parts:
        for tolerance in sorted({each.tolerance for each in families}):
            own = [each for each in families if each.tolerance == tolerance]
            why = sorted({each.why for each in own if each.why})
            note = f" ({', '.join(why)} in float32)" if why else ""
            lines.append(f"- **{what}.** Gradients within {tolerance:.0e}{note}: {names(own)}")
    return "\n".join(lines)


def names(families: Iterable[Family]) -> str:
    """The names of the classes, in order and without duplicates."""
    return ", ".join(f"`{name}`" for name in dict.fromkeys(each.model for each in families))


def written(page: str) -> str:
    """The page with a new list."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{items()}\n\n{END}{after}"


if __name__ == "__main__":
    (ROOT / PAGE).write_text(written((ROOT / PAGE).read_text(encoding="utf-8")), encoding="utf-8")
