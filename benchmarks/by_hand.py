"""The yardstick: 1F1B and interleaved 1F1B as one would write them by hand for exactly this model.

No schedule as data, no checks, no unknown shapes; receives are posted ahead into buffers that are used again,
sends are asynchronous, and every value has a tag of its own, so that their order does not matter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.task import Contender, Task

AHEAD = 2  # receives posted per direction before they are needed
Groups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]


def loop(task: Task, rank: int, chunks: int = 1, *, two_groups: bool = False) -> Contender:
    """1F1B with one stage a rank, else interleaved: the microbatches must then be a multiple of the ranks.

    With `two_groups` activations and gradients have connections of their own, in the other direction of which only
    the transport's notices travel.
    """
    hops = task.ranks - rank - 1
    warmup = hops if chunks == 1 else 2 * hops + (chunks - 1) * task.ranks
    groups = (dist.new_group(), dist.new_group()) if two_groups else (None, None)
    made = Loop(task, rank, chunks, warmup, groups)
    return Contender("by hand, 2 groups" if two_groups else "by hand", made.step, made.chunks)


class Loop:
    """Warm-up, steady state and cool-down of one rank."""

    def __init__(self, task: Task, rank: int, chunks: int, warmup: int, groups: Groups) -> None:
        self.task, self.rank = task, rank
        self.groups = groups  # for activations, for gradients
        self.stages = task.ranks * chunks
        self.chunks = task.chunks_of(rank, chunks)
        self.forwards = list(self._turns(range(chunks)))
        self.backwards = list(self._turns(range(chunks - 1, -1, -1)))
        self.warmup = min(warmup, len(self.forwards))
        self.spare: list[Tensor] = []

    def _turns(self, chunks: range) -> Iterator[tuple[int, nn.Module, int]]:
        """(stage, module, microbatch) in this rank's order: groups of R microbatches through chunk after chunk."""
        for first in range(0, self.task.microbatches, self.task.ranks if len(chunks) > 1 else 1):
            for chunk in chunks:
                for microbatch in range(first, first + (self.task.ranks if len(chunks) > 1 else 1)):
                    yield chunk * self.task.ranks + self.rank, self.chunks[chunk], microbatch

    def step(self) -> Tensor | None:
        """One training step; the mean loss on the last stage's rank."""
        self.inputs = self.task.inputs.chunk(self.task.microbatches)
        self.labels = self.task.labels.chunk(self.task.microbatches)
        self.alive: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.losses: list[Tensor] = []
        self.sends: list[tuple[dist.Work, Tensor]] = []
        self.activations = self._receives(self.forwards, -1, first=0)
        self.gradients = self._receives(self.backwards, +1, first=self.stages - 1)
        forwards, backwards = iter(self.forwards), iter(self.backwards)
        for _ in range(self.warmup):
            self._forward(*next(forwards))
        for turn in forwards:
            self._forward(*turn)
            self._backward(*next(backwards))
        for turn in backwards:
            self._backward(*turn)
        for work, _ in self.sends:
            work.wait()
        return torch.stack(self.losses).sum() if self.losses else None

    def _receives(self, turns: list[tuple[int, nn.Module, int]], offset: int, first: int) -> Iterator[Tensor]:
        """The values from the neighbouring stages, in the order of `turns`, with the next ones always posted."""
        peer = (self.rank + offset) % self.task.ranks
        group = self.groups[offset > 0]
        posted: deque[tuple[dist.Work, Tensor]] = deque()
        remaining = ((stage, microbatch) for stage, _, microbatch in turns if stage != first)

        def post() -> None:
            for stage, microbatch in remaining:
                buffer = self.spare.pop() if self.spare else torch.empty(self.task.shape)
                work = dist.irecv(buffer, peer, group, self._tag(stage, -offset, microbatch))
                assert work is not None
                posted.append((work, buffer))
                return

        def values() -> Iterator[Tensor]:
            while posted:
                work, buffer = posted.popleft()
                work.wait()
                post()
                yield buffer

        for _ in range(AHEAD):
            post()
        return values()

    def _forward(self, stage: int, module: nn.Module, microbatch: int) -> None:
        hidden = self.inputs[microbatch] if stage == 0 else next(self.activations).detach().requires_grad_()
        output = module(hidden)
        if stage == self.stages - 1:
            output = self.task.criterion(output, self.labels[microbatch]) / self.task.microbatches
            self.losses.append(output.detach())
        else:
            self._send(output.detach(), +1, stage + 1, microbatch)
        self.alive[stage, microbatch] = hidden, output

    def _backward(self, stage: int, module: nn.Module, microbatch: int) -> None:
        hidden, output = self.alive.pop((stage, microbatch))
        if stage == self.stages - 1:
            output.backward()
        else:
            gradient = next(self.gradients)
            output.backward(gradient)
            self.spare.append(gradient)
        if stage > 0:
            assert hidden.grad is not None
            self._send(hidden.grad, -1, stage - 1, microbatch)
            self.spare.append(hidden.detach())

    def _send(self, tensor: Tensor, offset: int, stage: int, microbatch: int) -> None:
        peer, group = (self.rank + offset) % self.task.ranks, self.groups[offset < 0]
        work = dist.isend(tensor, peer, group, self._tag(stage, offset, microbatch))
        assert work is not None
        self.sends.append((work, tensor))

    def _tag(self, stage: int, offset: int, microbatch: int) -> int:
        """The tag of what `stage` receives: an activation that went up (+1) or a gradient that came down (-1)."""
        return (2 * stage + (offset > 0)) * self.task.microbatches + microbatch
