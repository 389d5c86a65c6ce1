"""Pairs: a forward and a backward that a function of the user's runs, overlapped. Without such a function a schedule is
run with its pairs taken apart, and nothing here is needed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import in_this_context
from pipeflow.parallel.failure import ActionError
from pipeflow.runtime.program.operations import Backward, Compute, Forward


class Half:
    """One half of a pair, to be called once. `action` says what it computes, `module` is its stage's."""

    __slots__ = ("_run", "action", "done", "module")

    def __init__(self, compute: Compute, module: nn.Module) -> None:
        self.action = compute.action
        self.module = module
        self._run = in_this_context(compute)
        self.done = False

    def __call__(self) -> None:
        """Runs it, on the calling thread and, on a GPU, on its current stream."""
        try:
            self._run()
        except BaseException as error:
            raise ActionError(self.action) from error
        self.done = True


Overlap = Callable[[Half, Half], None]
"""Runs a pair: calls its forward and its backward, each once, and returns when both are done."""


class Both(Compute):
    """A pair, as one computation."""

    __slots__ = ("backward", "forward", "overlap")

    def __init__(self, forward: Forward, backward: Backward, overlap: Overlap, module: nn.Module) -> None:
        super().__init__(forward.action)
        self.forward = Half(forward, forward.stage.module)
        self.backward = Half(backward, module)
        self.overlap = overlap

    def __call__(self) -> None:
        forward, backward = self.forward, self.backward
        forward.done = backward.done = False
        self.overlap(forward, backward)
        if not (forward.done and backward.done):
            raise UsageError("overlap(forward, backward) returned before it had called both of them")
