"""Modules whose forward takes another way than on the example of the plan: what a stage does not have is never read in
silence, whatever reads it and whatever decides the way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeflow import Pipeline, PipelineError, UsageError, Whole, execute_pipeline, make_schedule
from pipeflow.testing import run_threads

WIDTH, SAMPLES = 6, 4
NAMED = "which this stage does not have"
Read = Callable[[Any, Tensor, Tensor, Tensor], Any]


class Twice(torch.autograd.Function):
    """Doubles a tensor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class Chosen(nn.Linear):
    """The largest entry of each row."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values).argmax(-1)


class Block(nn.Linear):
    """Adds to what it is given."""

    def forward(self, values: Tensor) -> Tensor:
        return values + torch.tanh(super().forward(values))


class Branching(nn.Module):
    """In its second stage, it may read what its first one has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.side, self.chosen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Chosen(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor
        self.calls = 0

    def forward(self, values: Tensor, flag: Any = None) -> Tensor:
        self.calls += 1
        values = self.embed(values)
        side, chosen = self.side(values), self.chosen(values)
        for block in self.blocks:
            values = block(values)
        found: Tensor = self.head(self.late(values, side, chosen, flag))
        return found

    def late(self, values: Tensor, side: Tensor, chosen: Tensor, flag: Any) -> Tensor:
        """Reads by a way of READS whose place is the flag; nothing if that is -1."""
        return values if flag < 0 else [*READS.values()][int(flag)](self, values, side, chosen)


def written(change: Callable[[Tensor, Tensor, Tensor], Any]) -> Read:
    """Reads by a write to a copy of the stage's own tensor."""

    def read(module: Branching, values: Tensor, side: Tensor, chosen: Tensor) -> Tensor:
        values = values.clone()
        change(values, side, chosen)
        return values

    return read


def to_buffer(module: Branching, values: Tensor, side: Tensor, chosen: Tensor) -> Tensor:
    with torch.no_grad():
        module.mean.copy_(side.mean(0))
    return values + module.mean


def counted(module: Branching, values: Tensor, side: Tensor, chosen: Tensor) -> Tensor:
    for _ in range(int(chosen.max()) + 1):
        values = values * 1.5
    return values


def doubled(module: Branching, values: Tensor, side: Tensor, chosen: Tensor) -> Any:
    return values + Twice.apply(side)  # type: ignore[no-untyped-call]  # as torch has it


READS: dict[str, Read] = {
    "sum": lambda module, values, side, chosen: values + side,
    "where": lambda module, values, side, chosen: torch.where(side > 0, values, -values),
    "where_not": lambda module, values, side, chosen: torch.where(values > 0, values, side),
    "nan_to_num": lambda module, values, side, chosen: values + torch.nan_to_num(side),
    "compared": lambda module, values, side, chosen: values * (side > 0),
    "clamped": lambda module, values, side, chosen: values.clamp(max=side),
    "maximum": lambda module, values, side, chosen: torch.fmax(values, side),
    "nansum": lambda module, values, side, chosen: values + side.nansum(),
    "index": lambda module, values, side, chosen: values * values[:, chosen[:1]],
    "gather": lambda module, values, side, chosen: values.gather(1, chosen[:, None].expand(values.shape)),
    "embedding": lambda module, values, side, chosen: values + functional.embedding(chosen, values[:1].mT @ values[:1]),
    "one_hot": lambda module, values, side, chosen: values + functional.one_hot(chosen, WIDTH),
    "mask": lambda module, values, side, chosen: values[side[:, 0] > -9] * 2,
    "topk": lambda module, values, side, chosen: values[:, side.mean(0).topk(WIDTH).indices],
    "nonzero": lambda module, values, side, chosen: values * len(chosen.nonzero()),
    "unique": lambda module, values, side, chosen: values * chosen.unique().numel(),
    "item": lambda module, values, side, chosen: values * side.mean().item(),
    "float": lambda module, values, side, chosen: values * float(side.sum()),
    "tolist": lambda module, values, side, chosen: values * sum(chosen.tolist()),
    "numpy": lambda module, values, side, chosen: values * float(side.detach().numpy().mean()),
    "from_tensors": lambda module, values, side, chosen: values * torch.tensor([side.mean(), side.max()]).sum(),
    "text": lambda module, values, side, chosen: values * float(f"{side.mean():.3f}"),
    "loop": counted,
    "if": lambda module, values, side, chosen: values * 2 if (side > 0).any() else values,
    "equal": lambda module, values, side, chosen: values * (1 + torch.equal(side, side)),
    "in_place": written(lambda values, side, chosen: values.add_(side)),
    "view": written(lambda values, side, chosen: values.view(-1).mul_(side.view(-1))),
    "part": written(lambda values, side, chosen: values[:, 0].copy_(side[:, 0])),
    "item_set": written(lambda values, side, chosen: values.__setitem__((slice(None), 0), side[:, 0])),
    "masked_set": written(lambda values, side, chosen: values.__setitem__(side > 0, 0.5)),
    "scatter": written(lambda values, side, chosen: values.scatter_(1, chosen[:, None], 2.0)),
    "out": lambda module, values, side, chosen: values + torch.sin(side.detach(), out=values.detach().clone()),
    "buffer": to_buffer,
    "function": doubled,
    "checkpoint": lambda module, values, side, chosen: values + checkpoint(torch.tanh, side, use_reentrant=False),
    "attention": lambda module, values, side, chosen: functional.scaled_dot_product_attention(values, values, side),
    "vmap": lambda module, values, side, chosen: values + torch.vmap(torch.sin)(side),
    "own_block": lambda module, values, side, chosen: module.blocks[3](side),
    "other_block": lambda module, values, side, chosen: module.blocks[0](values),
    "weight": lambda module, values, side, chosen: values @ module.embed.weight,
    "norm": lambda module, values, side, chosen: values * module.embed.weight.norm(),
    "instead": lambda module, values, side, chosen: side,
}


class Step(NamedTuple):
    """A step of a batch with this flag."""

    flag: Any
    training: bool = True
    grads: bool = True


def whole(flag: bool | int) -> Whole:
    return Whole(torch.tensor(flag))


def rows() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, WIDTH, generator=made), torch.randn(SAMPLES, 1, generator=made)


def plainly(module: nn.Module, steps: Sequence[Step]) -> list[float]:
    """The losses of the module itself, microbatch by microbatch."""
    values, labels = rows()
    found = []
    for flag, training, grads in steps:
        flags = flag.chunk(2) if isinstance(flag, Tensor) else [flag.value if isinstance(flag, Whole) else flag] * 2
        module.train(training)
        with torch.set_grad_enabled(grads):
            parts = zip(values.chunk(2), flags, labels.chunk(2), strict=True)
            losses = [functional.mse_loss(module(part, its), label).item() for part, its, label in parts]
        found.append(sum(losses) / 2)
    return found


def in_stages(module: nn.Module, steps: Sequence[Step]) -> list[float | str]:
    """The losses of two stages, or the errors of a rank."""
    values, labels = rows()
    schedule = make_schedule("gpipe", ranks=2, microbatches=2)
    batches = [({"values": values, "flag": step.flag}, labels) for step in steps]
    model = Pipeline.from_module(copy.deepcopy(module), schedule, batches[0], criterion=nn.MSELoss())
    found: list[float | str] = []
    for batch, (_, training, grads) in zip(batches, steps, strict=True):
        model.train(training)
        try:
            loss = execute_pipeline(iter([batch]), model, broadcast_loss=True, forward_only=not grads).loss
            found.append(float("nan") if loss is None else loss.item())
        except (UsageError, PipelineError) as error:
            found.append(str(error))
    return found


def require(found: Sequence[float | str], expected: Sequence[float], named: Sequence[int], message: str) -> None:
    for place, (mine, its) in enumerate(zip(found, expected, strict=True)):
        if place in named:
            assert isinstance(mine, str), place
            assert message in mine
        else:
            assert mine == pytest.approx(its, rel=1e-5), place


@cache
def by_flags() -> tuple[list[list[float | str]], list[float]]:
    """Steps in which each of READS reads, with one in which none does before and after; on both ranks, and plainly."""
    torch.manual_seed(0)
    module = Branching()
    steps = [Step(whole(-1)), *(Step(whole(flag)) for place in range(len(READS)) for flag in (place, -1))]
    return run_threads(in_stages, 2, module, steps), plainly(copy.deepcopy(module), steps[:1])


@pytest.mark.parametrize("name", READS)
def test_no_operator_reads_what_a_stage_does_not_have(name: str) -> None:
    """All ranks raise the error, and the next step is right."""
    ranks, right = by_flags()
    place = 1 + 2 * [*READS].index(name)
    for found in ranks:
        require(found[place : place + 2], right * 2, [0], NAMED)


class Tensors(Branching):
    """Reads if its flag is a tensor, or true."""

    def late(self, values: Tensor, side: Tensor, chosen: Tensor, flag: Any) -> Tensor:
        return values if flag is None or flag is False else values + side * flag


class Counting(Branching):
    """Reads from its third call on."""

    def late(self, values: Tensor, side: Tensor, chosen: Tensor, flag: Any) -> Tensor:
        return values + side if self.calls > 2 else values


class Graded(Branching):
    """Reads without gradients, also a weight of the first stage."""

    def late(self, values: Tensor, side: Tensor, chosen: Tensor, flag: Any) -> Tensor:
        return values if torch.is_grad_enabled() else values @ self.embed.weight + side


class Evaluated(Branching):
    """Reads in evaluation."""

    def late(self, values: Tensor, side: Tensor, chosen: Tensor, flag: Any) -> Tensor:
        return values if self.training else values @ self.embed.weight + side


class Routing(Branching):
    """Reads those rows that have a number."""

    def late(self, values: Tensor, side: Tensor, chosen: Tensor, flag: Any) -> Tensor:
        rows = flag.nonzero()[:, 0]
        return values.index_add(0, rows, side[rows]) if len(rows) else values


class Keeping(Branching):
    """Reads what it kept in the call before."""

    kept: Tensor

    def late(self, values: Tensor, side: Tensor, chosen: Tensor, flag: Any) -> Tensor:
        values = values + self.kept if flag else values
        self.kept = side
        return values


class Catching(Branching):
    """Catches all errors."""

    def late(self, values: Tensor, side: Tensor, chosen: Tensor, flag: Any) -> Tensor:
        try:
            return values * side.mean().item() if flag else values
        except Exception:
            return values


class Repeating(Branching):
    """May call a block of its first stage once more."""

    def late(self, values: Tensor, side: Tensor, chosen: Tensor, flag: Any) -> Tensor:
        found: Tensor = self.blocks[0](values) if flag else values
        return found


class Filling(Branching):
    """Writes to memory that has values before its second stage, and may read that."""

    def forward(self, values: Tensor, flag: Any = None) -> Tensor:
        values = self.embed(values)
        padded = torch.zeros(len(values), WIDTH + 1)
        padded[:, :-1] = values
        for block in self.blocks:
            values = block(values)
        found: Tensor = self.head(torch.where(padded[:, 1:] > 0, values, -values) if flag else values)
        return found


class Told(nn.Linear):
    """Returns also its flag: as an int, or a tensor if it is true."""

    as_int = True

    def forward(self, values: Tensor, flag: Any) -> Any:  # type: ignore[override]  # another layer
        values = super().forward(values)
        return values, int(flag) if self.as_int else values * 2 if flag else None


class Telling(Branching):
    """Its first stage returns an int."""

    as_int = True

    def __init__(self) -> None:
        super().__init__()
        self.side = Told(WIDTH, WIDTH)
        self.side.as_int = self.as_int

    def forward(self, values: Tensor, flag: Any = None) -> Tensor:
        values, told = self.side(self.embed(values), flag)
        for block in self.blocks:
            values = block(values)
        found: Tensor = self.head(values if told is None else values + told)
        return found


class Perhaps(Telling):
    """Its first stage returns a tensor or None."""

    as_int = False


NUMBERS = torch.zeros(SAMPLES, dtype=torch.long)
OTHER = "when the forward was planned, and later stages take it for that"
NOW_TENSOR = "flag is a tensor of (2, 1), torch.float32 and was None in the example"
WAYS: dict[str, tuple[type[Branching], list[Step], list[int], str]] = {
    "counter": (Counting, [Step(None)] * 2, [1], NAMED),
    "gradients": (Graded, [Step(None), Step(None, grads=False), Step(None)], [], ""),
    "training": (Evaluated, [Step(None), Step(None, training=False), Step(None)], [], ""),
    "evaluation": (Evaluated, [Step(None), Step(None, training=False, grads=False), Step(None)], [], ""),
    "evaluation first": (Evaluated, [Step(None, training=False), Step(None)], [], ""),
    "rows": (Routing, [Step(NUMBERS), Step(NUMBERS + 1), Step(NUMBERS)], [1], NAMED),
    "tensor, none": (Tensors, [Step(torch.ones(SAMPLES, 1)), Step(None), Step(torch.ones(SAMPLES, 1))], [], ""),
    "none, tensor": (
        Tensors,
        [Step(None), Step(torch.ones(SAMPLES, 1)), Step(None)],
        [1],
        NOW_TENSOR,
    ),
    "true, false": (Tensors, [Step(True), Step(False), Step(True)], [], ""),
    "false, true": (Tensors, [Step(False), Step(True), Step(False)], [1], "flag is True and was False in the example"),
    "kept": (Keeping, [Step(whole(False)), Step(whole(True)), Step(whole(False))], [1], NAMED),
    "caught": (Catching, [Step(whole(False)), Step(whole(True)), Step(whole(False))], [1], NAMED),
    "repeated": (Repeating, [Step(whole(False)), Step(whole(True)), Step(whole(False))], [1], NAMED),
    "filled": (Filling, [Step(whole(False)), Step(whole(True)), Step(whole(False))], [1], NAMED),
    "int": (Telling, [Step(whole(1)), Step(whole(2)), Step(whole(1))], [1], f"side returned 2, but 1 {OTHER}"),
    "none or tensor": (Perhaps, [Step(whole(0)), Step(whole(1)), Step(whole(0))], [1], f"a tensor, but None {OTHER}"),
    "tensor or none": (Perhaps, [Step(whole(1)), Step(whole(0)), Step(whole(1))], [1], f"None, but a tensor {OTHER}"),
}


@pytest.mark.some(6)
@pytest.mark.parametrize("name", WAYS)
def test_whatever_decides_the_way_a_loss_is_right_or_an_error_is_raised(name: str) -> None:
    kind, steps, named, message = WAYS[name]
    torch.manual_seed(0)
    module = kind()
    expected = plainly(copy.deepcopy(module), steps)
    for found in run_threads(in_stages, 2, module, steps):
        require(found, expected, named, message)
