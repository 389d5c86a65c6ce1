"""Pairs: a forward and a backward that run overlapped: by a function of the user, or in turns with expert ranks.
Otherwise, pairs are taken apart before a schedule runs, and nothing here is used.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Thread, current_thread
from typing import Any

import torch
from torch import nn

from pipeflow.core.action import Action
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context, in_this_context
from pipeflow.engine.parallel.failure import ActionError
from pipeflow.engine.runtime.stage import Stage, generator_of
from pipeflow.engine.torch_private.modes import TorchDispatchMode


class Half:
    """One half of a pair, to be called once. `action` is what it computes, `module` the module of its stage."""

    __slots__ = ("_run", "action", "done", "module", "thread", "watch")

    def __init__(self, action: Action, call: Callable[[], object], module: nn.Module) -> None:
        self.action = action
        self.module = module
        self._run = in_this_context(call)
        self.done = False
        self.thread: Thread | None = None  # the last one on which it ran; its number may be another's later
        self.watch: Draws | None = None  # watches its draws while it is checked

    def __call__(self) -> None:
        """Runs the half on the calling thread and, on a GPU, on its current stream."""
        self.thread = current_thread()
        try:
            with self.watch or nullcontext():
                self._run()
        except BaseException as error:
            raise ActionError(self.action) from error
        self.done = True


Overlap = Callable[[Half, Half], None]
"""Runs a pair: calls its forward and its backward, each once, and returns when both are done."""


class InTurns:
    """The overlap of pairs whose layers exchange tokens between the expert ranks of `context`: one half computes while
    the tokens of the other are on the way. Its backward begins, because it exchanges tokens first and computes last.
    """

    def __init__(self, context: Context) -> None:
        self._turns, self._device = context.turns, context.device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pipeflow backward")  # it starts with the first pair

    def __call__(self, forward: Half, backward: Half) -> None:
        """On a GPU, both halves compute on one stream, in the order of their turns; exchanges have a stream of their
        own. So memory that one half frees is used by the other afterwards only.
        """
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def first() -> None:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                backward()

        generators = dict.fromkeys([torch.default_generator, generator_of(self._device)])
        self._turns.both(first, forward, self._thread.submit, [*generators])


class Draws(TorchDispatchMode):
    """Records whether anything is drawn from torch's own generator, which all threads share."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch has it
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = {each.name: each.default_value for each in func._schema.arguments}
            given |= dict(zip(given, args, strict=False)) | kwargs
            self.seen |= given.get("generator") is None and given.get("dropout_p") != 0
        return func(*args, **kwargs)


class Both:
    """A pair, as one computation. Whether its backward draws is found out once, as soon as a forward of its `stage` has
    drawn, because a backward draws only when it recomputes a forward. If it does, it may not run on another thread than
    the forward, in any step.
    """

    def __init__(self, forward: Half, backward: Half, stage: Stage, overlap: Overlap) -> None:
        self.forward, self.backward, self.stage, self.overlap = forward, backward, stage, overlap
        self.draws: bool | None = None  # from the generator that threads share; None: unknown

    def __call__(self) -> None:
        forward, backward = self.forward, self.backward
        forward.done = backward.done = False
        if self.stage.draws and self.draws is None:
            backward.watch = Draws()
        self.overlap(forward, backward)
        if not (forward.done and backward.done):
            raise UsageError("overlap(forward, backward) returned before it had called both of them")
        if backward.watch is not None:
            self.draws, backward.watch = backward.watch.seen, None
        if self.draws and forward.thread is not backward.thread:
            error = UsageError(
                "a backward recomputed its forward and drew from torch's own generator while a forward ran on "
                "another thread, so its dropout masks may differ: call pipeflow.tensor.manual_seed(seed) and use "
                "pipeflow.tensor.Dropout inside pipeflow.tensor.checkpoint, or run both halves on one thread"
            )
            raise ActionError(backward.action) from error
