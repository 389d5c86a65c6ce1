"""Options: what the options of schedules mean and which values they take, for code that shows them to users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

from pipeflow.schedules.registry import SCHEDULES, options_of

MEANINGS = {  # an option without an entry is described by its schedules alone
    "bytes_cap": "most bytes of saved and deferred values kept on a rank",
    "chunks": "stages per rank",
    "extra_warmup": "additional forwards in the warm-up",
    "group": "microbatches that go through a chunk together",
    "kinds": "what may save memory under a cap: copies to the host, recomputation, or both (default: none)",
    "memory_cap": "most activations kept on a rank, in microbatches",
    "objective": "what the search makes small (default: makespan)",
    "waves": "how often the stages go down the ranks and back up",
}


class Option(NamedTuple):
    """An option of schedules.

    Attributes:
        name: its name.
        takers: the schedules that have it.
        meaning: what it sets; empty if that is not described.
        choices: the words it takes; empty if it takes numbers.
        per_rank: whether it also takes one number per rank.
    """

    name: str
    takers: tuple[str, ...]
    meaning: str
    choices: tuple[str, ...]
    per_rank: bool

    @classmethod
    def named(cls, name: str) -> Option:
        """The option with this name, as the first schedule that has it declares it."""
        takers = tuple(each for each in SCHEDULES if name in options_of(each))
        hint = get_type_hints(SCHEDULES[takers[0]])[name]
        choices = tuple(get_args(hint)) if get_origin(hint) is Literal else ()
        per_rank = any(get_origin(part) is Sequence for part in get_args(hint))
        return cls(name, takers, MEANINGS.get(name, ""), choices, per_rank)


def family_options() -> list[str]:
    """The names of all schedules' options, without costs, which have options of their own."""
    return sorted({option for name in SCHEDULES for option in options_of(name)} - {"cost"})
