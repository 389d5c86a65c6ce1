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

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Part
from pipeflow.core.placement import Placement

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
        found = _written_out(text)
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

    def placed(self, layers: int, mtp: int, placement: Placement) -> list[Part]:
        """The cut for the stages of a placement, and a model with so many layers and MTP layers. Raises UsageError as
        `cut`, for another number of MTP layers, and unless the placement has as many stages, with stage i on rank i
        modulo its ranks.
        """
        ranks, stages, there = placement.num_ranks, len(self.stages), placement.num_stages
        parts = self.cut(layers)
        if self.mtp != mtp:
            raise UsageError(f"the layout has {self.mtp} MTP layers ('m'), but the model has {mtp}")
        if there != stages:
            raise UsageError(f"the layout has {stages} stages, but the schedule has {there} on {ranks} ranks")
        if stages % ranks or placement != Placement.looped(ranks, stages // ranks):
            raise UsageError(
                f"the layout has {stages} stages, each on the rank of its number modulo {ranks}, but the schedule has "
                f"{there} stages on other ranks: leave out --schedule, or use --cut"
            )
        return parts

    def _require_ends(self) -> None:
        last = len(self.stages) - 1
        for letter, wanted, name in (("E", 0, "first"), ("L", last, "last")):
            [stage] = (number for number, letters in enumerate(self.stages) if letter in letters)
            if stage != wanted:
                raise UsageError(
                    f"{letter!r} is in stage {stage} of the layout's stages 0 to {last}, but Megatron-LM has the "
                    f"{MEANINGS[letter]} in the {name} stage whatever its string says: move {letter!r} there"
                )


def _written_out(text: str) -> list[Symbol]:
    """The letters and borders of a string, with its repetitions written out."""
    found: list[list[Symbol]] = [[]]  # of the string, and of each group that is open
    opened: list[Symbol] = []
    piece: list[Symbol] = []  # what a '*' after it repeats
    for token in re.finditer(r"\*[\d,]*|[^,]", text, re.ASCII):
        symbol = Symbol(token[0][0], token.start() + 1)
        if symbol.letter == "(":
            opened.append(symbol)
            found.append([])
            piece = []
        elif symbol.letter == ")" and opened:
            begin, piece = opened.pop().position, found.pop()
            if not piece:
                raise UsageError(f"the group from position {begin} of the layout is empty")
            if not text[token.end() :].lstrip(",").startswith("*"):
                raise UsageError(f"the group from position {begin} of the layout is not repeated: write '*N' after it")
            found[-1] += piece
        elif symbol.letter == "*" and piece:
            before = len(found[-1]) - len(piece)
            found[-1][before:] = piece * _times(symbol, token[0][1:].replace(",", ""), len(piece), before)
            piece = []
        elif symbol.letter in {*MEANINGS, BORDER}:
            piece = [symbol]
            found[-1] += piece
        else:
            raise _unexpected(symbol)
    if opened:
        raise UsageError(f"the '(' at position {opened[-1].position} of the layout has no ')'")
    return found[0]


def _times(star: Symbol, digits: str, length: int, before: int) -> int:
    """How often a piece of a `length` is repeated, `before` which there are so many symbols."""
    if not digits:
        raise UsageError(f"the '*' at position {star.position} of the layout has no number after it")
    if len(digits) > 6 or before + length * int(digits) > LARGEST:
        raise UsageError(f"the '*{digits}' at position {star.position} of the layout makes over {LARGEST} symbols")
    return int(digits)


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
