"""Slices: what each slice of a sequence costs in a causal model, and where to cut it so that all cost the same. Must
not contain: schedules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import sqrt

from pipeflow.core.errors import UsageError


def shares_of(ends: Sequence[float], attention: float) -> tuple[float, ...]:
    """The share of each slice in the work of a sequence, from where slices end. `attention` is the share of causal
    attention in this work: tokens a to b have b - a of the other work, and b^2 - a^2 of attention.
    """
    total = ends[-1]
    places = [0.0, *(end / total for end in ends)]
    return tuple((1 - attention) * (b - a) + attention * (b * b - a * a) for a, b in pairwise(places))


def places_of(slices: int, attention: float) -> tuple[float, ...]:
    """Where each of so many slices of equal cost ends, as a share of the sequence."""
    rest = 1 - attention
    works = [number / slices for number in range(1, slices + 1)]  # rest * x + attention * x^2 of the whole
    return tuple(2 * work / (rest + sqrt(rest * rest + 4 * attention * work)) for work in works)


def attention_of_longer(attention: float, times: float) -> float:
    """The share of attention in the cost of a sequence that is so many times as long as one whose share is known."""
    return attention * times / (1 - attention + attention * times)


def equal_slices(tokens: int, slices: int, *, attention: float = 0.0, multiple_of: int = 1) -> tuple[int, ...]:
    """Where to cut a sequence so that all slices cost the same: the end of each slice, in tokens.

    Args:
        tokens: the length of the sequence.
        slices: the number of slices.
        attention: the share of causal attention in the cost of a sequence of this length; see `attention_share`.
        multiple_of: all ends but the last one are multiples of this.

    Raises UsageError if `attention` is no share, and if there are too few tokens for so many slices.

    >>> equal_slices(4096, 4)
    (1024, 2048, 3072, 4096)
    >>> equal_slices(4096, 4, attention=0.5)
    (1499, 2531, 3370, 4096)
    """
    require_cut(attention, ())
    if tokens < slices * multiple_of or min(slices, multiple_of) < 1:
        each = "a token" if multiple_of == 1 else f"{multiple_of} tokens"
        raise UsageError(f"{tokens} tokens are too few for {slices} slices of at least {each}: use fewer slices")
    ends = list[int]()
    for number, place in enumerate(places_of(slices, attention)[:-1], 1):
        least = multiple_of + (ends[-1] if ends else 0)
        most = (tokens // multiple_of - (slices - number)) * multiple_of
        ends.append(min(max(round(place * tokens / multiple_of) * multiple_of, least), most))
    return (*ends, tokens)


def attention_share(times: Mapping[int, float], tokens: int) -> float:
    """The share of attention in the cost of a sequence of so many tokens, from the measured or planned cost of
    sequences of other lengths: the least squares fit of a part that grows with the length, and one with its square.

    Raises UsageError for fewer than two lengths, and for costs that are not positive.

    >>> attention_share({1000: 2.0, 2000: 6.0}, tokens=1000)
    0.5
    """
    if len(times) < 2 or min(times) < 1 or min(times.values()) <= 0:
        raise UsageError(f"give the cost of at least two lengths, all positive, got {dict(times)}")
    points = [(length / tokens, time) for length, time in times.items()]
    second, third, fourth = (sum(x**power for x, _ in points) for power in (2, 3, 4))
    first, square = (sum(x**power * time for x, time in points) for power in (1, 2))
    linear = first * fourth - square * third  # times the same determinant
    quadratic = square * second - first * third
    return min(max(quadratic / (linear + quadratic), 0.0), 1.0)


def attention_of_slices(works: Sequence[float], ends: Sequence[float]) -> float:
    """The share of attention in the cost of a sequence, from the shares of its slices in this cost, and where they end:
    the least squares fit of `shares_of`. 0 if all shares of attention are those of the tokens.
    """
    tokens, squares = shares_of(ends, 0.0), shares_of(ends, 1.0)
    more = [square - own for own, square in zip(tokens, squares, strict=True)]
    if not any(more):
        return 0.0
    seen = sum((work - own) * each for work, own, each in zip(works, tokens, more, strict=True))
    return min(max(seen / sum(each * each for each in more), 0.0), 1.0)


def require_cut(attention: float, ends: Sequence[float]) -> None:
    """Raises UsageError unless `attention` is a share, and `ends` are positive and grow."""
    if not 0 <= attention <= 1:
        raise UsageError(f"attention is a share of the work of a microbatch, from 0 to 1, got {attention}")
    if any(not a < b for a, b in pairwise((0.0, *ends))):
        raise UsageError(f"slice_ends must grow from slice to slice, from more than 0, got {list(ends)}")
