"""Actions: the computations that a schedule puts in order, written with the letters of torch.distributed.pipelining.
Must not contain: what an action needs and makes, which is in `dataflow`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from pipeflow.core.errors import ScheduleError


class Kind(StrEnum):
    """The kind of an action: forward, backward or reduction. A backward is one action (B) or two halves (I, then W). R
    sums a stage's weight gradients over the ranks that hold the stage, and S is the optimizer's step of its weights. C,
    O and L save memory: C computes a forward again, so that until then the stage keeps only its input; O copies what a
    forward saved to the host, and L copies it back. U gathers the weights of a stage under fully_shard for the actions
    that follow, and H frees them. The table in `pipeflow.core.dataflow` lists what each kind needs and makes.

    The zero-bubble papers write I as "B".
    """

    F = "F"  # forward
    B = "B"  # full backward
    I = "I"  # input-gradient half  # noqa: E741  # the field's letter
    W = "W"  # weight-gradient half
    R = "R"  # reduction of a stage's weight gradients; its microbatch is the last one it waits for
    C = "C"  # recomputation of what a forward saved
    S = "S"  # the optimizer's step of a stage; its microbatch is the last one of the stage's weight gradients
    O = "O"  # offload, a copy of what a forward saved to the host  # noqa: E741  # the letter of OptPipe
    L = "L"  # load: the copy back to the device
    U = "U"  # unshard: the gather of a stage's weights; its microbatch counts the unshards of the stage
    H = "H"  # reshard: frees what the unshard of this number gathered

    __hash__ = str.__hash__  # that of an Enum is computed in Python, and kinds are keys wherever schedules are followed


_ACTION = re.compile(rf"(\d{{1,9}})([{''.join(Kind)}])(\d{{1,9}})(?:\.(\d{{1,9}}))?", re.ASCII)
_PAIR = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B", re.ASCII)


Work = tuple[int, int, int | None]
"""A stage, and a microbatch or a slice of one."""


@dataclass(frozen=True, slots=True)
class Action:
    """One computation: `kind` for one `microbatch` on one `stage`. Its text is stage, letter, microbatch. In a schedule
    whose microbatches are cut into slices, the slice follows after a point.

    Attributes:
        kind: which computation it is.
        stage: index of the stage, from 0.
        microbatch: index of the microbatch, from 0. For a reduction or an optimizer's step: the last one that
            it waits for. For an unshard or reshard: its number among those of its stage.
        slice: index of the slice of the microbatch, from 0. None: the whole microbatch.

    Raises ScheduleError for a negative stage, microbatch or slice.

    >>> str(Action(Kind.F, stage=2, microbatch=0))
    '2F0'
    >>> Action.parse("2F0")
    Action(kind=<Kind.F: 'F'>, stage=2, microbatch=0, slice=None)
    >>> str(Action(Kind.F, stage=2, microbatch=0, slice=3))
    '2F0.3'
    """

    kind: Kind
    stage: int
    microbatch: int
    slice: int | None = None

    def __post_init__(self) -> None:
        if self.stage.__class__ is self.microbatch.__class__ is int and self.kind.__class__ is Kind:
            if self.stage >= 0 and self.microbatch >= 0:
                if self.slice is not None:
                    _require_slice(self)
                return
            raise ScheduleError(f"action {self}: stage and microbatch count from 0")
        _require_types(self)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.part}"

    @property
    def part(self) -> str:
        """The text of its microbatch and slice, such as "4" or "4.1"."""
        return f"{self.microbatch}" if self.slice is None else f"{self.microbatch}.{self.slice}"

    @property
    def work(self) -> Work:
        """Its stage, microbatch and slice: the work that it is a part of."""
        return self.stage, self.microbatch, self.slice

    def as_kind(self, kind: Kind) -> Action:
        """The action of another kind for the same work."""
        return Action(kind, self.stage, self.microbatch, self.slice)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads the text of one action. Raises ScheduleError for any other text."""
        match = _ACTION.fullmatch(text)
        if match is None:
            letters = " ".join(Kind)
            form = "2F0" + ", and commas between actions" * any(each in text for each in " ;\t")
            raise ScheduleError(f"{text!r} is not an action: write stage, one of {letters}, microbatch, like {form}")
        return cls(Kind(match[2]), int(match[1]), int(match[3]), None if match[4] is None else int(match[4]))


def _require_slice(action: Action) -> None:
    if not isinstance(action.slice, int) or action.slice < 0:
        raise ScheduleError(f"slice of an action must be None or a whole number from 0, got {action.slice!r}")


def _require_types(action: Action) -> None:
    """Raises ScheduleError for a kind that is no Kind, such as its letter, and for numbers that are not whole."""
    kind: object = action.kind
    if not isinstance(kind, Kind):
        kinds = [f"Kind.{each}" for each in Kind]
        write = f"write Kind.{kind}" if f"Kind.{kind}" in kinds else f"the kinds are {' '.join(kinds)}"
        raise ScheduleError(f"the kind of an action must be a Kind, got {kind!r}: {write}")
    for number in (action.stage, action.microbatch):
        if not isinstance(number, int) or number < 0:
            raise ScheduleError(f"stage and microbatch of an action must be whole numbers from 0, got {number!r}")


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a backward that one rank runs overlapped, as in DualPipe. Its text is `(0F4;3B1)OVERLAP_F_B`.

    Attributes:
        forward: an action of kind F.
        backward: an action of kind B or I.

    Raises ScheduleError for actions of other kinds.
    """

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        if self.forward.kind is not Kind.F or self.backward.kind not in (Kind.B, Kind.I):
            raise ScheduleError(f"pair {self}: it takes a forward (F), then a backward (B or I)")

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Entry = Action | Pair
"""An entry of a row."""


def parse_entry(text: str) -> Entry:
    """Reads one cell of a schedule table: an action or a pair. Raises ScheduleError for any other text."""
    pair = _PAIR.fullmatch(text)
    return Pair(Action.parse(pair[1]), Action.parse(pair[2])) if pair else Action.parse(text)


def actions_of(entry: Entry) -> tuple[Action, ...]:
    """The actions of an entry of a row: one, or the forward and the backward of a pair."""
    return (entry,) if isinstance(entry, Action) else (entry.forward, entry.backward)
