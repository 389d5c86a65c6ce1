"""Turns: of the two halves of a pair, one computes at a time, and passes its turn on while an exchange with other ranks
is under way. Must not contain: what halves compute and exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Condition
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Turns:
    """The turns of a rank. Outside of a pair there are none, and `pass_on` does nothing.

    Two calls run on a thread each. Only one of them runs at any time: the other waits until it passes the turn on or
    ends. So who runs when depends on the calls alone, not on how long anything takes: ranks whose calls pass turns on
    at the same places start all their collectives in the same order. Each call finds random generators as it left them,
    so a backward that computes a forward again may set them back meanwhile.

    Attributes:
        waited: seconds that this rank's calls have waited for exchanges, besides which nothing was computed.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self._changed = Condition()
        self._turn = 0  # whose turn it is
        self._running = 0  # how many of the two calls have not ended
        self._errors: list[BaseException] = []
        self._generators: Sequence[torch.Generator] = ()
        self._states = [list[Tensor]()] * 2  # of the generators, for each call

    def both(
        self,
        first: Callable[[], object],
        second: Callable[[], object],
        aside: Callable[..., object],
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        """Runs two calls in turns. The first has the first turn and runs on the thread to which `aside` hands a
        function; the second runs on this one. If one of them fails, the other ends when it gets its next turn. Both
        find `generators` as they are, which are left as the second leaves them. Raises the first error of the two.
        """
        self._turn, self._running, self._errors = 0, 2, []
        self._generators = generators
        self._states = [[each.get_state() for each in generators]] * 2
        aside(lambda: self._run(0, first))
        self._run(1, second)
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        self._set_generators(1)
        if self._errors:
            raise self._errors[0]

    def finish(self, exchange: Callable[[], T]) -> T:
        """The result of an exchange that is under way. `exchange` waits for it, after the other call had its turn."""
        self.pass_on()
        start = perf_counter()
        result = exchange()
        self.waited += perf_counter() - start
        return result

    def pass_on(self) -> None:
        """Lets the other call run, if there is one, until it passes the turn on or ends."""
        if self._running < 2:
            return
        mine = self._turn
        with self._changed:
            self._end_turn(mine)
            self._wait(mine)

    def _end_turn(self, mine: int) -> None:
        self._states[mine] = [each.get_state() for each in self._generators]
        self._turn = 1 - mine
        self._changed.notify_all()

    def _wait(self, mine: int) -> None:
        self._changed.wait_for(lambda: self._turn == mine)
        if self._errors:
            raise _OtherFailedError
        self._set_generators(mine)

    def _set_generators(self, mine: int) -> None:
        for generator, state in zip(self._generators, self._states[mine], strict=True):
            generator.set_state(state)

    def _run(self, mine: int, call: Callable[[], object]) -> None:
        try:
            with self._changed:
                self._wait(mine)
            call()
        except BaseException as error:  # raised by `both`
            self._errors.append(error)
        with self._changed:
            self._running -= 1
            self._end_turn(mine)


class _OtherFailedError(Exception):
    """Ends a call whose partner has failed."""
