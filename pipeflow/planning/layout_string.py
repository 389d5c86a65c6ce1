"""Layout strings: the layers of each stage, as Megatron-LM's option --pipeline-model-parallel-layout has them. Must
not contain: what stages cost.

The letters are E (embedding), t (transformer layer), m (multi-token prediction, MTP) and L (head and loss). `|` stands
between two stages, and commas mean nothing. `*N` repeats the letter, the `|` or the group in parentheses before it.
Stage i is on rank i modulo the number of pipeline ranks. A stage may be empty. Sources:
NVIDIA/Megatron-LM/megatron/core/transformer/pipeline_parallel_layer_layout.py and
NVIDIA/Megatron-LM/docs/source/api-guide/pipeline_parallel_layout.md.

Megatron-LM refuses groups within groups, which are read here but never written. It always embeds in the first stage
and computes the loss in the last one (`get_model` in NVIDIA/Megatron-LM/megatron/training/training.py), so plans refuse
E and L in other stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Part

MEANINGS = {"E": "embedding", "t": "transformer layer", "m": "MTP layer", "L": "head and loss"}
BORDER = "|"
LARGEST = 100_000  # letters and borders of a string whose repetitions are written out


class Symbol(NamedTuple):
    """A letter or a border, and its position in the string, from 1."""

    letter: str
    position: int


@dataclass(frozen=True, slots=True)
class LayoutString:
    """The letters of each stage. Layouts with the same stages are equal, however their strings are written.

    >>> layout = LayoutString.read("Et*2|(t*2|)*2,tL")
    >>> layout.stages
    ('Ett', 'tt', 'tt', 'tL')
    >>> str(layout), layout.cut(7)
    ('Ett|tt|tt|tL', [(0, 2), (2, 4), (4, 6), (6, 7)])

    Attributes:
        stages: per stage, its letters.
    """

    stages: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> LayoutString:
        """The layout that a string describes. Raises UsageError for a string that is none, with the position in it."""
        symbols = [Symbol(letter, position) for position, letter in enumerate(text, 1) if letter != ","]
        found = _Repetitions(symbols).read()
        _require_order([symbol for symbol in found if symbol.letter != BORDER])
        return cls(tuple("".join(symbol.letter for symbol in found).split(BORDER)))

    @classmethod
    def of(cls, parts: Sequence[Part], mtp: int = 0) -> LayoutString:
        """The layout of stages with these layers [start, end), and so many MTP layers in the last one."""
        stages = ["t" * (end - start) for start, end in parts]
        stages[0] = "E" + stages[0]
        stages[-1] += "m" * mtp + "L"
        return cls(tuple(stages))

    def __str__(self) -> str:
        """A short string for the layout, without groups within groups."""
        written = []
        for stage, alike in groupby(self.stages[:-1]):
            count, each = len(list(alike)), _letters(stage) + BORDER
            written.append(min((each * count, f"({each})*{count},"), key=len))
        return "".join(written) + _letters(self.stages[-1])

    def chunks(self, ranks: int) -> int:
        """The number of stages per rank. Raises UsageError unless the stages divide evenly among the ranks."""
        stages = len(self.stages)
        if stages % ranks:
            near = [number for number in range(1, stages + 1) if stages % number == 0]
            raise UsageError(
                f"the layout has {stages} stages, which do not divide among {ranks} pipeline ranks: "
                f"use {', '.join(map(str, near))} ranks, or add or remove a '|'"
            )
        return stages // ranks

    @property
    def mtp(self) -> int:
        """The number of its MTP layers."""
        return "".join(self.stages).count("m")

    def cut(self, layers: int) -> list[Part]:
        """Per stage its layers [start, end), for a model with so many layers. Raises UsageError for another number of
        layers, and for E in another stage than the first, or MTP layers or L in another one than the last.
        """
        self._require_ends()
        if self.stages[-1].count("m") < self.mtp:
            raise UsageError("plans have MTP layers in the last stage alone: move 'm' there, before 'L'")
        sizes = [stage.count("t") for stage in self.stages]
        if sum(sizes) != layers:
            raise UsageError(f"the layout has {sum(sizes)} layers ('t'), but the model has {layers}")
        return list(pairwise(accumulate(sizes, initial=0)))

    def _require_ends(self) -> None:
        last = len(self.stages) - 1
        for letter, wanted, name in (("E", 0, "first"), ("L", last, "last")):
            [stage] = (number for number, letters in enumerate(self.stages) if letter in letters)
            if stage != wanted:
                raise UsageError(
                    f"{letter!r} is in stage {stage} of the layout's stages 0 to {last}, but Megatron-LM has the "
                    f"{MEANINGS[letter]} in the {name} stage whatever its string says: move {letter!r} there"
                )


class _Repetitions:
    """Writes out the repetitions of a string, from its first symbol to its last."""

    def __init__(self, symbols: list[Symbol]) -> None:
        self._symbols, self._next = symbols, 0

    def read(self, opened: Symbol | None = None) -> list[Symbol]:
        """The letters and borders up to the end of the string, or of the group that `opened` begins."""
        found: list[Symbol] = []
        while symbol := self._taken():
            if symbol.letter == ")" and opened is not None:
                return found
            piece = [symbol]
            if symbol.letter == "(":
                piece = self.read(symbol)
                if not piece:
                    raise UsageError(f"the group from position {symbol.position} of the layout is empty")
                if not self._is_next("*"):
                    raise UsageError(
                        f"the group from position {symbol.position} of the layout is not repeated: write '*N' after it"
                    )
            elif symbol.letter not in {*MEANINGS, BORDER}:
                raise _unexpected(symbol)
            found += self._repeated(piece, len(found))
        if opened is not None:
            raise UsageError(f"the '(' at position {opened.position} of the layout has no ')'")
        return found

    def _repeated(self, piece: list[Symbol], before: int) -> list[Symbol]:
        if not self._is_next("*"):
            return piece
        star, digits = self._taken(), ""
        assert star is not None
        while self._next < len(self._symbols) and self._symbols[self._next].letter in "0123456789":
            digits += self._symbols[self._next].letter
            self._next += 1
        if not digits:
            raise UsageError(f"the '*' at position {star.position} of the layout has no number after it")
        if len(digits) > 6 or before + len(piece) * int(digits) > LARGEST:
            raise UsageError(f"the '*{digits}' at position {star.position} of the layout makes over {LARGEST} symbols")
        return piece * int(digits)

    def _taken(self) -> Symbol | None:
        """The next symbol, which counts as read; None at the end."""
        if self._next == len(self._symbols):
            return None
        self._next += 1
        return self._symbols[self._next - 1]

    def _is_next(self, letter: str) -> bool:
        return self._next < len(self._symbols) and self._symbols[self._next].letter == letter


def _unexpected(symbol: Symbol) -> UsageError:
    where = f"at position {symbol.position} of the layout"
    if symbol.letter == ")":
        return UsageError(f"the ')' {where} has no '('")
    if symbol.letter == "*" or symbol.letter.isdigit():
        return UsageError(f"the {symbol.letter!r} {where} repeats nothing: '*N' comes after a letter, '|' or ')'")
    known = ", ".join(f"{letter} ({meaning})" for letter, meaning in MEANINGS.items())
    return UsageError(f"unknown letter {symbol.letter!r} {where}: the letters are {known}")


def _require_order(letters: list[Symbol]) -> None:
    """Raises UsageError unless E is first, L last, both are there once, and no transformer layer follows an MTP
    layer.
    """
    for wanted, end, name in (("E", 0, "begin"), ("L", -1, "end")):
        places = [symbol.position for symbol in letters if symbol.letter == wanted]
        if not places:
            raise UsageError(f"the layout has no {wanted!r} ({MEANINGS[wanted]}): it must {name} with one")
        if len(places) > 1:
            raise UsageError(f"the {wanted!r} at position {places[1]} of the layout is one too many: it must have one")
        if letters[end].letter != wanted:
            raise UsageError(
                f"the layout must {name} with {wanted!r}, not with the {letters[end].letter!r} at position "
                f"{letters[end].position}"
            )
    for one, other in pairwise(letters):
        if (one.letter, other.letter) == ("m", "t"):
            raise UsageError(
                f"the 't' at position {other.position} of the layout comes after an 'm': MTP layers are last"
            )


def _letters(stage: str) -> str:
    """The letters of a stage, with repetitions where these are shorter."""
    runs = ((letter, len(list(alike))) for letter, alike in groupby(stage))
    return "".join(min((letter * count, f"{letter}*{count}"), key=len) for letter, count in runs)
