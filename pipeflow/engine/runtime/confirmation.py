"""The optimizer's steps that a rank has taken without waiting for the others, how all ranks confirm them, and the norm
of the gradients for an optimizer that scales them itself. Must not contain: how weights are stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import chain, compress
from operator import not_
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from pipeflow.core.errors import PipeflowError, UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.control.rescue import aside
from pipeflow.engine.parallel.sharding import local_part
from pipeflow.engine.parallel.transport.agreement import all_gather, told_alike
from pipeflow.engine.parallel.transport.protocol import LinkError, Work
from pipeflow.engine.runtime.loss import AgreementRow, is_host, require_alike
from pipeflow.engine.runtime.program.ahead import Ahead
from pipeflow.engine.runtime.stage import Stage
from pipeflow.engine.torch_private.tensors import foreach_copy_, foreach_mul, foreach_mul_


class Clipping:
    """The result of `clip_grad_norm_` for an optimizer that scales the gradients of `parameters` in float32 in its
    step, such as MasterWeights; `clip_grad_norm_` then leaves those gradients unchanged.

    Attributes:
        parameters: the parameters whose gradients the optimizer scales.
        norm: norm of the gradients of the next step; None if it was not computed.
        factor: factor by which the optimizer must multiply the gradients, a scalar tensor on the same device as the
            norm; None for 1.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = frozenset(parameters)
        self.norm: Tensor | None = None
        self.factor: Tensor | None = None
        self._seen: list[tuple[TensorWeakRef, int]] = []  # the gradients that were clipped, with their versions

    def add(self, norm: Tensor, factor: Tensor) -> None:
        """Stores the norm, and clips by `factor` in addition to `pending`."""
        pending = self.pending
        self.norm, self.factor = norm, factor if pending is None else pending * factor
        self._seen = [(TensorWeakRef(gradient), gradient._version) for gradient in self._gradients()]

    @property
    def pending(self) -> Tensor | None:
        """The factor by which the current gradients must still be multiplied because they were clipped before."""
        if self.factor is None:
            return None
        now = self._gradients()
        same = len(now) == len(self._seen) and all(
            seen() is gradient and gradient._version == version
            for gradient, (seen, version) in zip(now, self._seen, strict=True)
        )
        return self.factor if same else None

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def taken(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the norm and the factor for one step, and resets both."""
        norm, factor, self.norm, self.factor, self._seen = self.norm, self.factor, None, None, []
        return norm, factor


@torch.no_grad()
def scale_gradients(gradients: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiplies gradients in place by a number, in float32 at least: for a 16-bit product, a GPU would round it."""
    # those of a sparse one itself, which would get new values
    parts = [each._values() if each.is_sparse else local_part(each) for each in gradients]
    is_half = [each.device.type != "cpu" and each.dtype in (torch.bfloat16, torch.float16) for each in parts]
    wide, narrow = [*compress(parts, map(not_, is_half))], [*compress(parts, is_half)]
    if wide:
        foreach_mul_(wide, factor)
    if narrow:
        foreach_copy_(narrow, foreach_mul([each.float() for each in narrow], factor))


class Stepper(Protocol):
    """Steps the weights of a rank's stages within the engine's steps."""

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next step may begin before the step just taken is confirmed. It is the same on all ranks."""

    @property
    def can_undo(self) -> bool:
        """Whether it keeps what it needs to undo a step. It is the same on all ranks."""

    def begin(self) -> None:
        """Call before a step. Raises UsageError if it cannot work now."""

    def step(self, stage: int) -> None:
        """Steps the weights of a stage, whose gradients are complete."""

    def norms(self) -> Tensor:
        """Two numbers, float64, of this rank's gradients that other ranks need to confirm the step."""

    def judge(self, norms: Tensor) -> bool:
        """Confirms the step, given the `norms` of every rank, [ranks, 2]. Returns False if forwards since then ran with
        wrong weights. Raises an error on all ranks if the gradients are not finite.
        """

    def undo(self) -> None:
        """Undoes the step that is not confirmed, or its stages that were stepped. Does nothing if there are none."""


class Taken:
    """A step that this rank has taken. It is told to the other ranks as soon as its norms are computed, for which the
    host does not wait: so each of them can confirm it at any time, alone.

    Attributes:
        number: number of steps before it.
        stands: whether the weights that it left are right; None as long as that is not known.
    """

    def __init__(self, context: Context, number: int, told: AgreementRow, norms: Tensor) -> None:
        self.number = number
        self.stands: bool | None = None
        self._context, self._told, self._norms = context, told, _on_host(norms)
        self._rows = torch.empty(context.world_size, len(told), dtype=torch.float64, device="cpu")
        self._telling: Future[Work] | None = None

    @property
    def told(self) -> AgreementRow:
        """The row that this rank sends to the others."""
        counted, elsewhere = self._norms()
        return self._told._replace(counted=counted, elsewhere=elsewhere)

    def tell(self) -> None:
        """Begins to tell the others, without waiting for them; off CPUs on a thread, which waits for the norms. The
        group passes on what it is told, so that no rank must come to do it.
        """
        group = self._context.world.group(range(self._context.world_size), on_host=True)

        def begin() -> Work:
            return group.all_gather(self._rows, torch.tensor([self.told], dtype=torch.float64, device="cpu"))

        if is_host(self._context.device):
            self._telling = Future()
            self._telling.set_result(begin())
        else:
            self._telling = aside(begin, "pipeflow telling of a step")

    def rows(self) -> list[AgreementRow]:
        """The rows of all ranks, once all have ended the step. Raises LinkError."""
        assert self._telling is not None
        self._telling.result().wait()
        return [AgreementRow(*row) for row in self._rows.tolist()]


def _on_host(numbers: Tensor) -> Callable[[], list[float]]:
    """A function that returns `numbers` when they are computed. It waits for nothing that a GPU is given later."""
    if not numbers.is_cuda:
        return numbers.tolist
    copy = torch.empty_like(numbers, device="cpu", pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    copied = torch.cuda.current_stream(numbers.device).record_event()

    def read() -> list[float]:
        copied.synchronize()
        return copy.tolist()

    return read


class Confirmation:
    """The optimizer's steps of this rank.

    Args:
        context: context of this rank.

    Attributes:
        stepper: steps the weights; None if schedules do not.
        pending: the step that is not confirmed, or that this rank alone has confirmed.
    """

    def __init__(self, context: Context) -> None:
        self.stepper: Stepper | None = None
        self.pending: Taken | None = None
        self._context = context
        self._last: list[Taken] = []  # the last two steps
        self._failed = False  # whether a call has failed since

    def use(self, stepper: Stepper) -> None:
        """Steps with `stepper` from now on. Confirms the last step of the one before; all ranks call it together."""
        self.confirm()
        self.stepper = stepper

    def begin(self, ahead: Ahead, stages: Sequence[Stage]) -> int:
        """Begins a step that steps the weights. While the last one is not confirmed, runs the operations that run
        `ahead`, then confirms it. Returns the number of operations that it ran. Raises UsageError if it cannot step.
        """
        assert self.stepper is not None  # a schedule with such steps is refused otherwise
        self.stepper.begin()
        if self.pending is None:
            return 0
        ahead.run(stages, self._context.device, self.confirm_all)
        return len(ahead.first)

    def step(self, stage: int) -> None:
        """Steps the weights of a stage. Programs call it, which may outlive a stepper."""
        assert self.stepper is not None  # a schedule with such steps is refused otherwise
        self.stepper.step(stage)

    def take(self, told: AgreementRow, *, alone: bool) -> Taken:
        """Notes a step that this rank has taken. It is `pending` if the rank can end the step `alone` and go on before
        it is confirmed; otherwise all ranks end it together.
        """
        assert self.stepper is not None
        number = self._last[-1].number + 1 if self._last else 0
        taken = Taken(self._context, number, told, self.stepper.norms())
        self._last = [*self._last[-1:], taken]
        if alone and self.stepper.may_run_ahead:
            self.pending = taken
            taken.tell()
        return taken

    def confirm(self) -> bool:
        """Whether the last step stands, once all ranks have ended it. After a failed call, all ranks call it together.
        Raises LinkError, and the errors of the step.
        """
        self.recover()
        if self.pending is None:
            return True
        if self.pending.stands is None:
            rows = self.pending.rows()
            with told_alike(self._context.world):
                require_alike(rows, self._context)
            self.pending.stands = self.judge(rows)
        return self.pending.stands

    def confirm_all(self) -> bool:
        """Like `confirm`, where all ranks call it together, and go on with the right weights."""
        stands, self.pending = self.confirm(), None
        return stands

    def judge(self, rows: Sequence[AgreementRow]) -> bool:
        """Whether a step stands as it was taken. All ranks come to the same result."""
        assert self.stepper is not None
        norms = torch.tensor([(row.counted, row.elsewhere) for row in rows], dtype=torch.float64, device="cpu")
        try:
            return self.stepper.judge(norms.to(self._context.device))
        except PipeflowError:
            self.pending = None
            with suppress(LinkError):  # a rank reports only after all have found the error
                all_gather(self._context.world, [0.0])
            raise

    def forget(self) -> None:
        """Call after a failed step. Undoes a step that this rank has begun and not ended."""
        if self.stepper is not None:
            self._failed = True
            if self.pending is None:
                self.stepper.undo()

    def recover(self) -> None:
        """After a failed call, lets all ranks have taken the same steps: some may have ended one that others have not,
        and undo it. All ranks call it together. Raises UsageError if they cannot.
        """
        if not self._failed:
            return
        self._failed = False
        width = len(AgreementRow._fields)
        empty = [-1.0, *[0.0] * width]
        mine = [[float(each.number), *each.told] for each in self._last]
        everyones = all_gather(self._context.world, [*chain(*[empty, empty, *mine][-2:])])
        steps = [{int(row[0]): row[1 : 1 + width], int(row[1 + width]): row[2 + width :]} for row in everyones]
        common = min(map(max, steps))
        ahead, pending = bool(self._last) and self._last[-1].number > common, self.pending
        with told_alike(self._context.world):
            if self.stepper is not None and max(map(max, steps)) > common and not self.stepper.can_undo:
                raise UsageError(
                    f"some ranks have taken the optimizer's step {common + 1}, in which others failed, and nothing was "
                    "kept to undo it: load a checkpoint, or check gradients with non_finite='stop'"
                )
        if ahead and self.stepper is not None:
            self.stepper.undo()
            del self._last[-1]
        elif pending is not None and pending.stands is None:
            self.judge([AgreementRow(*each[common]) for each in steps])
        self.pending = None
