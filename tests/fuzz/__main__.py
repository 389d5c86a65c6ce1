"""`python -m tests.fuzz 7` compares the configuration of seed 7 with plain torch, and `python -m tests.fuzz 0:1000` a
thousand of them. Prints those that differ.
"""

from __future__ import annotations

import sys
import traceback

from tests.fuzz.configuration import drawn
from tests.fuzz.train import compare


def main(argument: str) -> int:
    """Compares what the argument says; returns how many configurations differ."""
    first, _, end = argument.partition(":")
    failures = 0
    for seed in range(int(first), int(end or int(first) + 1)):
        try:
            compare(drawn(seed))
        except Exception:
            failures += 1
            print(f"--- python -m tests.fuzz {seed}\n{drawn(seed)}\n{traceback.format_exc()}", flush=True)  # noqa: T201
    return failures


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1]), 1))
