"""A forward that is computed again counts once: buffers, attributes, lists, objects and random numbers of its module
are those of a step without recomputation, and so are gradients.
"""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from pipeflow import Pipeline, Schedule, UsageError, execute_pipeline, make_schedule, with_optimizer_step
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.optim import PipelinedOptimizer, clip_grad_norm_
from pipeflow.testing import RankError, run_threads
from tests.runtime import kinds

WIDTH = 4


class Normalized(nn.Module):
    """Running statistics, which batch_norm writes on a CPU without changing their versions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.norm(hidden)
        return output


class Codes(nn.Module):
    """A table that follows its inputs, written through `.data` and used after."""

    table: Tensor

    def __init__(self, rows: int = 3) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(2)))

    def forward(self, hidden: Tensor) -> Tensor:
        nearest = torch.cdist(hidden.detach(), self.table).argmin(1)
        self.table.data.mul_(0.9)[nearest] += 0.1 * hidden.detach()
        return hidden + self.table[nearest].clone() * hidden


class Counted(nn.Module):
    """Counts in a buffer that scales, in attributes, and in what they hold."""

    count: Tensor
    history: list[float]
    by_size: dict[int, int]
    pairs: tuple[list[int], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.history, self.by_size, self.meter, self.pairs = 0, [], {}, Meter(), ([], torch.zeros(2))

    def forward(self, hidden: Tensor) -> Tensor:
        self.count += 1
        self.calls += 1
        self.history.append(float(hidden.detach()[0, 0]))
        self.by_size[len(hidden)] = self.by_size.get(len(hidden), 0) + 1
        self.meter.total += self.calls
        self.meter.seen.append(self.calls)
        self.pairs[0].append(self.calls)
        self.pairs[1].add_(1)
        return hidden * self.count.clone() / (1 + self.calls) + self.pairs[1][0]


@dataclass
class Meter:
    total: int = 0
    seen: list[int] = field(default_factory=list)


class Recurrent(nn.Module):
    """Carries a state from call to call, and a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.state is not None:
            hidden = hidden + 0.5 * self.state + self.mean
        self.state = hidden.detach().mean(0)
        self.mean = 0.5 * self.mean + self.state
        return torch.tanh(hidden)


class Masked(nn.Module):
    """Draws masks from torch's generator and from its own ones, and keeps one over several calls."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = torch.Generator().manual_seed(3), random.Random(4)
        self.mask: Tensor | None = None
        self.age = 0

    def forward(self, hidden: Tensor) -> Tensor:
        if self.mask is None or self.age == 2:
            self.mask, self.age = (torch.rand(WIDTH, generator=self.own) < 0.7).to(hidden.dtype), 0
        self.age += 1
        return hidden * self.mask * (1 + self.other.random())


class Hooked(nn.Module):
    """A layer of torch whose hook counts on it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        vars(self.linear)["calls"] = 0
        self.linear.register_forward_pre_hook(_count)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.linear(hidden) * vars(self.linear)["calls"]
        return output


def _count(layer: Any, _: object) -> None:
    layer.calls += 1


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.linear(hidden)
        return output


KEEPERS: dict[str, Any] = {
    "batch norm": Normalized,
    "spectral norm": Spectral,
    "codes": Codes,
    "wide codes": partial(Codes, 5000),
    "large codes": partial(Codes, 50000),
    "counters": Counted,
    "recurrent": Recurrent,
    "masks": Masked,
    "hooks": Hooked,
}


class Block(nn.Module):
    def __init__(self, keeper: nn.Module) -> None:
        super().__init__()
        self.first, self.keeper, self.last = nn.Linear(WIDTH, WIDTH), keeper, nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.last(self.keeper(self.first(hidden))))


@cache
def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(KEEPERS[kind]()) for _ in range(4))).double()


def batches(steps: int, replica: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1 + replica)
    return [tuple(torch.randn(2, 16, WIDTH, dtype=torch.float64, generator=generator)) for _ in range(steps)]


Results = tuple[dict[str, Tensor], list[dict[str, Tensor]], list[Any]]


def trained(kind: str, schedule: Schedule) -> Results:
    """The state, the gradients of each step, and the attributes, after some steps of a rank."""
    found = batches(3, current_context().data_rank)
    model = Pipeline.from_module(copy.deepcopy(made(kind)), schedule, example=found[0], criterion=nn.MSELoss())
    optimizer, gradients = torch.optim.SGD(model.parameters(), lr=10), []
    pipelined = kinds.steps_optimizer(schedule) and PipelinedOptimizer(model, optimizer, clip_grad_norm=1e-3)
    for batch in found:
        execute_pipeline(iter([batch]), model)
        if not pipelined:
            gradients.append(kinds.gradients_of(model))
            clip_grad_norm_(model, 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    if pipelined:
        pipelined.confirm()
        assert pipelined.undone > 0
    state = {name: each.clone() for name, each in model.state_dict().items()}
    return state, gradients, [attributes_of(chunk.root) for chunk in model.chunks if isinstance(chunk, ModuleStage)]


def attributes_of(root: nn.Module) -> list[Any]:
    own = vars(nn.Module())
    return [
        {name: _comparable(value) for name, value in vars(layer).items() if name not in own and name != "deferral"}
        for layer in root.modules()
        if type(layer).__module__ == __name__ or "calls" in vars(layer)
    ]


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    return value.getstate() if isinstance(value, random.Random) else repr(value)


def differing(found: list[Results], expected: list[Results]) -> list[str]:
    """What is not the same in every bit, of all ranks."""
    wrong = []
    for (state, gradients, attributes), (state_then, gradients_then, attributes_then) in zip(
        found, expected, strict=True
    ):
        wrong += [f"{name} of the state" for name in state_then if not torch.equal(state[name], state_then[name])]
        for mine, its in zip(gradients, gradients_then, strict=False):
            wrong += [f"gradient of {name}" for name in its if not torch.equal(mine[name], its[name])]
        wrong += ["attributes"] * (attributes != attributes_then)
    return wrong


ONE = make_schedule("1f1b", ranks=2, microbatches=4)
CHUNKS = make_schedule("interleaved-1f1b", ranks=2, microbatches=4, chunks=2)
SPLIT = make_schedule("zb-h2", ranks=2, microbatches=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KEEPERS)
def test_a_recomputed_forward_counts_once(kind: str) -> None:
    made(kind)  # threads share torch's generator
    expected = {base.name: run_threads(trained, 2, kind, base) for base in (ONE, CHUNKS)}
    for base, use in ((ONE, "recomputed"), (CHUNKS, kinds.MIXED), (ONE, "offloaded")):
        found = run_threads(trained, 2, kind, kinds.with_kinds(base, use))
        assert differing(found, expected[base.name]) == [], use


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KEEPERS][1:])
def test_a_forward_that_was_taken_back_counts_once(kind: str) -> None:
    made(kind)
    expected = run_threads(trained, 2, kind, SPLIT)
    for schedule in (SPLIT, kinds.with_kinds(SPLIT, "recomputed")):
        assert differing(run_threads(trained, 2, kind, with_optimizer_step(schedule)), expected) == []


@pytest.mark.slow
def test_replicas_and_recomputation() -> None:
    made("counters")
    expected = run_threads(trained, 4, "counters", ONE, data=2)
    found = run_threads(trained, 4, "counters", kinds.with_kinds(ONE, "recomputed"), data=2)
    assert differing(found, expected) == []


def test_plain_torch_has_the_same_state() -> None:
    """Of a module whose state decides its outputs."""
    for kind in ("recurrent", "spectral norm"):
        plain, [(inputs, labels), *_] = copy.deepcopy(made(kind)), batches(1, 0)
        for part, its in zip(inputs.chunk(4), labels.chunk(4), strict=True):
            (nn.functional.mse_loss(plain(part), its) / 4).backward()
        gradients = {name: each.grad for name, each in plain.named_parameters()}
        for _, steps, _ in run_threads(trained, 2, kind, kinds.with_kinds(ONE, "recomputed")):
            for name, gradient in steps[0].items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-12)


class Table(nn.Module):
    """A large table of integers, written after `quiet` calls; integers are not copied beforehand."""

    table: Tensor

    def __init__(self, quiet: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(200_000, dtype=torch.int64))
        self.quiet = quiet
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.quiet -= 1
        if self.quiet < 0:
            self.table += 1
        return torch.exp(hidden * self.weight)


def test_a_large_table_that_was_not_copied() -> None:
    def run() -> None:
        for quiet in (9, 1):
            model = Pipeline(Table(quiet), Schedule.from_csv("0F0,0F1,0C0,0B0,0C1,0B1"), criterion=nn.MSELoss())
            with pytest.raises(UsageError, match=message) if quiet == 1 else nullcontext():
                execute_pipeline(iter([(torch.ones(2, 3), torch.ones(2, 3))]), model)

    message = "a forward wrote Table.table of stage 0, a tensor of 1 MB that the forwards"
    run_threads(run, 1)


class Scaled(nn.Module):
    """Saves a buffer for the backward, which each forward writes before."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.count += 1
        return hidden * self.weight * self.count


def test_a_buffer_that_was_saved_and_written() -> None:
    def run(csv: str) -> Any:
        model = Pipeline(Scaled(), Schedule.from_csv(csv), criterion=nn.MSELoss())
        execute_pipeline(iter([(torch.arange(2.0), torch.ones(2))]), model)
        return kinds.gradients_of(model), [each.item() for each in model.buffers()]

    [expected] = run_threads(run, 1, "0F0,0B0,0F1,0B1")
    for csv in (
        "0F0,0C0,0B0,0F1,0B1",
        "0F0,0F1,0C0,0B0,0C1,0B1",
        "0F0,0F1,0C1,0B1,0C0,0B0",
        "0F0,0F1,0C0,0O0,0L0,0B0,0B1",
    ):
        assert run_threads(run, 1, csv) == [expected], csv
    with pytest.raises(RankError, match=r"was written in place afterwards: if it is a buffer .* use buffer.clone\(\)"):
        run_threads(run, 1, "0F0,0O0,0F1,0L0,0B0,0B1")
