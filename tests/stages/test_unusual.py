"""Modules whose forward does more than hand tensors from block to block: what hooks collect, values that decide,
caches, batches that are written to, branches of training alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeflow import UsageError
from pipeflow.engine.stages.plan import CutPlan
from pipeflow.engine.stages.planner import Planner
from pipeflow.engine.stages.stage import ModuleStage
from tests.stages.chain import chained
from tests.stages.models import seeded

CPU = torch.device("cpu")
WIDTH, BLOCKS = 6, 4


class Block(nn.Module):
    """Returns its result, and has a part whose result nobody is told."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.up = nn.Linear(3, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return values + torch.tanh(self.up(torch.tanh(self.gate(values))))


class Stack(nn.Module):
    """Blocks of some kind."""

    def __init__(self, kind: Any = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(BLOCKS))

    def forward(self, values: Tensor) -> Any:
        for block in self.blocks:
            values = block(values)
        return values.sum()


class Hooked(Stack):
    """Its loss is also one of what hooks collect from within its blocks, and of the first one's input."""

    chosen = slice(None)

    def forward(self, values: Tensor) -> Any:
        found: list[Tensor] = []

        def collect(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            found.extend([output] if found else [given[0], output])

        hooks = [block.gate.register_forward_hook(collect) for block in self.blocks]  # type: ignore[union-attr]
        try:
            loss = super().forward(torch.sin(values))
        finally:
            for hook in hooks:
                hook.remove()
        return loss + sum((index + 1) * each.square().sum() for index, each in enumerate(found[self.chosen]))


class Picking(Hooked):
    """Reads one of the collected tensors by its place, which is another one if some were not collected."""

    chosen = slice(2, 3)


class Wrapped(Stack):
    """Collects by putting functions in the place of forwards, and takes them away when all goes well."""

    def forward(self, values: Tensor) -> Any:
        found: list[Tensor] = []

        def wrapped(own: Any) -> Any:
            @wraps(own)
            def collect(*given: Tensor) -> Tensor:
                output: Tensor = own(*given)
                found.append(output)
                return output

            return collect

        own = [block.gate.forward for block in self.blocks]  # type: ignore[union-attr]
        for block in self.blocks:
            block.gate.forward = wrapped(block.gate.forward)  # type: ignore[union-attr]
        loss = super().forward(values)
        for block, forward in zip(self.blocks, own, strict=True):
            block.gate.forward = forward  # type: ignore[union-attr]
        return loss + torch.cat(found).square().sum()


class Experts(nn.Module):
    """Gives each row to the expert that it points to, and calls those to which there is a row."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 5)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, values: Tensor) -> Tensor:
        best = self.router(values).argmax(-1)
        found = torch.zeros_like(values)
        hit = nn.functional.one_hot(best, 6).sum(0).nonzero()
        for expert in hit:
            if expert[0] == 5:
                continue
            rows = torch.where(best == expert[0])[0]
            found.index_add_(0, rows, self.experts[int(expert[0])](values[rows]))
        return values + found


class Ended(Stack):
    """Leaves rows out after its blocks, as many as values say."""

    def forward(self, values: Tensor) -> Any:
        for block in self.blocks:
            values = block(values)
        return values[values.sum(1) > 0].sum()


class Writing(Stack):
    """Writes to its batch."""

    def forward(self, values: Tensor) -> Any:
        values[:, 0] = 0
        return super().forward(values)


@cache
def _table(width: int) -> Tensor:
    return torch.arange(width).double()


class Cached(nn.Module):
    """Keeps a table for all modules of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return torch.tanh(self.inner(values)) * _table(WIDTH)


class Masked(Stack):
    """Puts something of its own in the place of some of its input, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.instead = nn.Parameter(torch.ones(WIDTH))

    def forward(self, values: Tensor) -> Any:
        if self.training:
            values = torch.cat([values[:1] * 0 + self.instead, values[1:]])
        return super().forward(values)


class Drawing(Stack):
    """Draws with NumPy what all blocks are given."""

    def forward(self, values: Tensor) -> Any:
        noise = torch.tensor(np.random.rand(WIDTH))
        for block in self.blocks:
            values = block(values + noise)
        return values.sum()


class Hiding(Stack):
    """Draws with NumPy which of its rows the blocks see."""

    def forward(self, values: Tensor) -> Any:
        hidden = torch.tensor(np.random.rand(len(values)) < 0.5)
        return super().forward(values.masked_fill(hidden[:, None], 0.0))


class Converting(nn.Module):
    """Has parameters of its own converted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        converted: Tensor = self.inner.float()(values.float())
        return converted.double()


class Choosing(Stack):
    """Calls a block or not, as values say."""

    def forward(self, values: Tensor) -> Any:
        for block in self.blocks:
            if values.square().sum() > 0:
                values = block(values)
        return values.sum()


class Counting(Stack):
    """A block counts values that depend on parameters, and the forward branches on the count after all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter()

    def forward(self, values: Tensor) -> Any:
        values, count = self.count(values)
        loss = super().forward(values)
        return 3 * loss if count > 0 else loss


class Counter(Block):
    """Also returns how many of its results are positive, which planning can only guess."""

    def forward(self, values: Tensor) -> Any:
        values = super().forward(values)
        return values, torch.tensor(len((values > 0).nonzero()))


class Tapped(Stack):
    """A hook of a block, made with the module, keeps what the block returned in an attribute of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

        def keep(module: nn.Module, given: Any, output: Tensor) -> None:
            self.found.append(output)

        self.blocks[1].register_forward_hook(keep)

    def forward(self, values: Tensor) -> Any:
        self.found.clear()
        return super().forward(torch.sin(values)) + self.found[0].square().sum()


@dataclass
class State:
    """What blocks pass on; torch's pytrees do not know it."""

    values: Tensor
    skip: Tensor | None = None
    name: str = "a"


class Stepping(Block):
    """Takes and returns a dataclass."""

    def forward(self, state: State) -> State:  # type: ignore[override]  # another block
        values = super().forward(state.values)
        return State(values, values if state.skip is None else values + state.skip, state.name + "b")


class Stepped(Stack):
    """Its blocks pass dataclasses on."""

    def __init__(self) -> None:
        super().__init__(Stepping)

    def forward(self, values: Tensor) -> Any:
        state = State(torch.sin(values))
        for block in self.blocks:
            state = block(state)
        assert state.name == "a" + "b" * BLOCKS
        assert state.skip is not None
        return (state.values * state.skip).sum()


class Packed(nn.Module):
    """Packs sequences of other lengths for each of its recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(1, WIDTH)
        kinds = (nn.GRU, nn.LSTM, nn.RNN, nn.GRU)
        self.blocks = nn.ModuleList(kind(WIDTH, WIDTH, batch_first=True) for kind in kinds)

    def forward(self, values: Tensor) -> Any:
        lengths = values.argmax(1) + 1
        steps = self.lift(values[..., None])
        for block in self.blocks:
            packed = nn.utils.rnn.pack_padded_sequence(steps, lengths, batch_first=True, enforce_sorted=False)
            steps, _ = nn.utils.rnn.pad_packed_sequence(block(packed)[0], batch_first=True, total_length=WIDTH)
        return steps.square().sum()


class Filled(Stack):
    """Writes what it embeds to memory that has values, before its blocks and after them."""

    def forward(self, values: Tensor) -> Any:
        padded = torch.zeros(len(values), WIDTH + 2, dtype=values.dtype)
        padded[:, 1:-1] = self.blocks[0](values)
        values = padded[:, 2:].clone()
        for block in self.blocks[1:]:
            values = block(values)
        padded[:, 0] = values.sum(1)
        return padded.square().sum()


class Tabled(Block):
    """Keeps a table that depends on the length of a row, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, values: Tensor) -> Tensor:
        if self.table is None or len(self.table) != values.shape[1]:
            self.table = torch.arange(values.shape[1], dtype=values.dtype).cos()
        return super().forward(values * self.table)


class Carrying(Stack):
    """Adds what its last call ended with."""

    kept: Tensor | float = 0.0

    def forward(self, values: Tensor) -> Any:
        values = values + self.kept
        for block in self.blocks:
            values = block(values)
        self.kept = values.detach()
        return values.sum()


def rows() -> Tensor:
    return torch.randn(7, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def in_stages(module: nn.Module, stages: int, **options: Any) -> tuple[Any, CutPlan]:
    """What stages make of the rows, one after the other."""
    return chained(module, {"values": rows()}, stages, **options)


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}


MODULES: dict[str, Any] = {
    "hooked": Hooked,
    "picking": Picking,
    "wrapped": Wrapped,
    "experts": lambda: Stack(Experts),
    "ended": Ended,
    "writing": Writing,
    "cached": lambda: Stack(Cached),
    "masked": Masked,
    "counting": Counting,
    "tapped": Tapped,
    "stepped": Stepped,
    "packed": Packed,
    "filled": Filled,
    "tabled": lambda: Stack(Tabled),
}


@pytest.mark.some(len(MODULES))
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", MODULES)
def test_stages_compute_what_the_module_does(name: str, stages: int) -> None:
    _table.cache_clear()
    module = seeded(MODULES[name]().double(), 0)
    loss, _ = in_stages(module, stages)
    found = gradients(module, loss)
    expected_loss = module(rows())
    expected = gradients(module, expected_loss)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-12)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[key], expected[key], rtol=1e-12) for key in found)


def test_what_is_collected_is_sent_to_who_needs_it_and_nothing_else() -> None:
    _, plan = in_stages(seeded(Hooked().double(), 0), 3, cuts=["blocks.0", "blocks.2"])
    needed = [[(plan.trace.calls[each.call].name, each.leaf) for each in stage.receives] for stage in plan.stages]
    collected = [("blocks.0.gate", -1), ("blocks.0.gate", 0), ("blocks.1.gate", 0), ("blocks.2.gate", 0)]
    assert needed[1] == [("blocks.0", 0)]
    assert sorted(needed[2]) == sorted([("blocks.2", 0), *collected])


def test_a_stage_runs_no_hook_of_a_module_that_it_lacks() -> None:
    """But for hooks that collect what a later stage needs."""
    seen: list[Tensor] = []
    module = seeded(Stack().double(), 0)
    for block in module.children():
        for each in block.children():
            each.register_forward_hook(lambda *call: seen.append(call[2]))
    in_stages(module, 4)
    planned, seen[:] = len(seen), []
    in_stages(module, 4)
    assert len(seen) == planned
    assert sum(type(each) is Tensor and not each.isnan().any() for each in seen) == BLOCKS


def test_a_module_that_is_planned_in_evaluation_can_be_trained() -> None:
    module = seeded(Masked().double(), 0).eval()
    planner = Planner(module, 2)
    plan = planner.plan({"values": rows()})
    assert ["instead" in stage.owned for stage in plan.stages] == [True, False]
    first = ModuleStage(module, 0, planner, plan, CPU)
    evaluated = first(values=rows())
    assert not torch.allclose(first.train()(values=rows()), evaluated)


def test_a_stage_may_draw_another_mask_than_the_trace_did() -> None:
    plan = Planner(seeded(Hiding().double(), 0), 2).plan({"values": rows()})
    assert [len(stage.receives) for stage in plan.stages] == [0, 1]


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "drawing": (Drawing, {}, "depends on random numbers that the forward draws before blocks.1 ends"),
    "choosing": (Choosing, {}, "the module's own forward branches on the values of a tensor that depends on"),
    "within experts": (lambda: Stack(Experts), {"cuts": ["blocks.1.experts.0"]}, "blocks.1 branches on the values"),
    "carrying": (Carrying, {}, "depends on what it keeps in kept, which other stages do not have: take it"),
    "converting": (lambda: Stack(Converting), {}, "blocks.0.inner converts its parameters from torch.float64 when it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make, options, message = REFUSED[name]
    stages = 2
    with pytest.raises(UsageError, match=message):
        in_stages(seeded(make().double(), 0), stages, **options)


def test_planning_leaves_the_generators_of_python_and_numpy_alone() -> None:
    np.random.seed(0)
    expected = np.random.rand()
    np.random.seed(0)
    with pytest.raises(UsageError):
        in_stages(Drawing(), 2)
    assert np.random.rand() == expected


class Pooling(nn.Module):
    """Returns its result and, as a view with other strides than a copy of it, that of the first word."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        made = self.linear(values)
        return made, made[:, 0]


class Pools(nn.Module):
    """Uses the first pooled result after all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pooling() for _ in range(BLOCKS))

    def forward(self, values: Tensor) -> Tensor:
        values, first = self.blocks[0](values)
        for block in self.blocks[1:]:
            values, _ = block(values)
        made: Tensor = values.sum(1) + first
        return made


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_view_is_sent_as_a_copy_with_strides_of_its_own(stages: int) -> None:
    module, values = seeded(Pools(), 1), torch.randn(3, 2, WIDTH)
    found, _ = chained(module, {"values": values}, stages)
    assert torch.equal(found, module(values))


class Shuffles(nn.Module):
    """Its blocks reverse features, and then draw an order of them from NumPy, another one in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Drawn() for _ in range(BLOCKS))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        return values


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        values = self.linear(values)[:, torch.tensor(range(WIDTH)[::-1])]
        return values[:, torch.tensor(np.random.permutation(WIDTH).tolist())]


@pytest.mark.parametrize("stages", [1, 2])
def test_numbers_that_blocks_draw_may_differ_between_stages(stages: int) -> None:
    found, _ = chained(Shuffles(), {"values": torch.randn(3, WIDTH)}, stages)
    assert found.shape == (3, WIDTH)
