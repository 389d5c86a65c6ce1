"""Moves: an order made a little different where its longest path runs, the only place where it can gain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from random import Random
from typing import NamedTuple

from pipeflow.orders.list_scheduling import Candidate, mail
from pipeflow.orders.problem import Problem, Word


class Clocks(NamedTuple):
    """When the words of all ranks run: per rank the start of each letter, and its end."""

    starts: list[list[float]]
    ends: list[float]

    def candidate(self, words: Sequence[Word]) -> Candidate:
        """`words` with their measures."""
        span = max(end - row[0] for row, end in zip(self.starts, self.ends, strict=True))
        return Candidate(span, max(self.ends), list(words))


def clocks(given: Problem, words: Sequence[Word]) -> Clocks | None:
    """Each letter as soon as its rank is free and its value there, as `simulate` does; None when some never run."""
    durations, ranks = given.durations, range(len(words))
    boxes, users = mail(given)
    done, free = [0] * len(durations), [0.0] * len(words)
    starts: list[list[float]] = [[] for _ in ranks]
    waits: list[list[float] | None] = [None for _ in ranks]
    ready = list(ranks)
    while ready:
        rank = ready.pop()
        row, now = starts[rank], free[rank]
        for letter in islice(words[rank], len(row), None):
            if letter % 3 < 2:
                box, microbatch = boxes[letter], done[letter]
                if microbatch == len(box):
                    waits[rank] = box
                    break
                if box[microbatch] > now:
                    now = box[microbatch]
                done[letter] = microbatch + 1
                row.append(now)
                now += durations[letter]
                user = users[letter]
                if user is not None:
                    user.box.append(now + user.delay)
                    if waits[user.rank] is user.box:
                        waits[user.rank] = None
                        ready.append(user.rank)
            else:
                row.append(now)
                now += durations[letter]
        free[rank] = now
    whole = all(len(row) == len(word) for row, word in zip(starts, words, strict=True))
    return Clocks(starts, free) if whole else None


def fits(given: Problem, rank: int, word: Word) -> bool:
    """Whether a rank's word keeps within its slots, and every F precedes its I and that its W."""
    alive, done = 0, [0] * len(given.source)
    for letter in word:
        done[letter] += 1
        if letter % 3 == 0:
            alive += 1
            if alive > given.slots[rank]:
                return False
        elif done[letter] > done[letter - 1]:
            return False
        elif letter % 3 == 1:
            alive -= 1
    return True


class Block(NamedTuple):
    """Letters `first` to `last` of a rank's word, run without a pause on the longest path."""

    rank: int
    first: int
    last: int


def critical_blocks(given: Problem, words: Sequence[Word], times: Clocks) -> list[Block]:
    """The blocks of two letters or more on a longest path to the end of a rank of the largest span."""
    places: list[list[int]] = [[] for _ in given.source]  # per letter, its positions
    for word in words:
        for position, letter in enumerate(word):
            places[letter].append(position)
    spans = [end - row[0] for row, end in zip(times.starts, times.ends, strict=True)]
    rank = spans.index(max(spans))
    last = first = len(words[rank]) - 1
    blocks = []
    while True:
        word, starts = words[rank], times.starts[rank]
        while first and starts[first - 1] + given.durations[word[first - 1]] >= starts[first]:
            first -= 1
        if first < last:
            blocks.append(Block(rank, first, last))
        letter = word[first]
        if first == 0 or given.source[letter] < 0:
            return blocks
        maker = given.source[letter]
        position = places[maker][places[letter].index(first)]
        rank, first, last = given.ranks[maker // 3], position, position


def neighbour(given: Problem, words: Sequence[Word], blocks: Sequence[Block], random: Random) -> list[Word] | None:
    """`words` with one letter of a block moved within it, mostly to one of its ends (E. Balas and A. Vazacopoulos,
    Guided local search with shifting bottleneck for job shop scheduling, 1998); None when the move is not sound.
    """
    rank, first, last = random.choice(blocks)
    place = random.randint(first, last)
    target = random.choice((first, first, last, last, random.randint(first, last)))
    word = words[rank].copy()
    word.insert(target, word.pop(place))
    if word == words[rank] or not fits(given, rank, word):
        return None
    return [*words[:rank], word, *words[rank + 1 :]]
