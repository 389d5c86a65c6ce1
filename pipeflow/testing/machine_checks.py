"""Checks of a machine: what training needs of it, each compared with one process or with numbers known beforehand. All
ranks call a check together, within a context; it returns a note for the report, or raises an error. A rank compares at
the end of a check, because the others go on.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.core.errors import PipelineError, UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.agreement import all_gather_object, finish, start
from pipeflow.engine.parallel.transport.protocol import Channel, Tag
from pipeflow.engine.runtime.pipeline import Pipeline, execute_pipeline
from pipeflow.schedules import SCHEDULES, make_schedule
from pipeflow.testing.models import WIDTH, PlainModel, TiedModel, TinyModel
from pipeflow.training.checkpoint.load import load_checkpoint
from pipeflow.training.checkpoint.save import save_checkpoint

LENGTH = 3  # of a sequence
NEAR = 1e-10  # relative deviation of float64 numbers that were added up in another order
SOON = 5.0  # seconds within which every rank must raise the error of one
MEGABYTES = 64  # of a large transfer


class Check(NamedTuple):
    """A check, and the sizes of the world for which it is run."""

    name: str
    pipeline: int
    tensor: int
    run: Callable[[], str]


def checks(ranks: int) -> Iterator[Check]:
    """The checks for a world of `ranks` processes."""
    yield Check("transfers and sums", ranks, 1, move_large_tensors)
    for name in SCHEDULES:
        sizes = [size for size in range(ranks, 0, -1) if not ranks % size and _makes(name, size)]
        for known in (False, True) if sizes else ():  # some need an even number of ranks
            shapes = "known shapes" if known else "headers"
            yield Check(f"{name}, {shapes}", sizes[0], 1, partial(train_alike, PlainModel, name, known=known))
    yield Check("tied weights", ranks, 1, partial(train_alike, TiedModel, "1f1b", known=False))
    yield Check("CUDA graphs", ranks, 1, partial(train_alike, PlainModel, "1f1b", known=True, graph=True))
    if not ranks % 2:
        yield Check("2 tensor ranks", ranks // 2, 2, split_a_module)
        yield Check("2 replicas", ranks // 2, 1, partial(train_alike, PlainModel, "1f1b", known=False))
    if ranks > 1:
        yield Check("an error on one rank", ranks, 1, tell_of_an_error)
    yield Check("a checkpoint", ranks, 1, resume)


def _makes(name: str, ranks: int) -> bool:
    try:
        _schedule(name, ranks)
    except UsageError:
        return False
    return True


def _schedule(name: str, ranks: int) -> Schedule:
    return make_schedule(name, ranks=ranks, microbatches=2 * ranks)


def move_large_tensors() -> str:
    """A large tensor goes around all ranks, and all ranks sum it. The note has both rates, with the wait for the
    slowest rank.
    """
    world, device = current_context().world, current_context().device
    count = MEGABYTES * 2**20 // 4
    mine, its = torch.full((count,), float(world.rank), device=device), torch.empty(count, device=device)
    there, back = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    if world.size == 1:
        return "one rank has no peer"
    world.connect([Channel(world.rank, there, Tag.ACTIVATION), Channel(back, world.rank, Tag.ACTIVATION)])
    group = world.group(range(world.size))
    group.connect()

    def around() -> None:
        arriving = start(world, back, Tag.ACTIVATION, its, sending=False)
        leaving = start(world, there, Tag.ACTIVATION, mine, sending=True)
        for work in (arriving, leaving):
            finish(work, "moving a large tensor")

    moved = _seconds(around)
    came = its.unique().tolist()
    summed = _seconds(lambda: group.all_reduce(its.fill_(world.rank)).wait())
    total, found = float(sum(range(world.size))), its.unique().tolist()
    _require(came == [float(back)], f"rank {back} sent {float(back)}, but {came[:4]} came")
    _require(found == [total], f"the sum is {found[:4]}, expected {total}")
    rates = (MEGABYTES / 1024 / seconds for seconds in (moved, summed))
    return "{:.1f} GiB/s to the next rank, {:.1f} GiB/s in an all-reduce".format(*rates)


def train_alike(kind: type[TinyModel], name: str, *, known: bool, graph: bool = False) -> str:
    """Steps of a tiny model under a schedule have the loss and the gradients of the plain model. Replicas have their
    own batches. Headers need three steps until receives are posted ahead, and graphs until they are recorded. The note
    has the time of the last step.
    """
    if graph and current_context().device.type != "cuda":
        return "left out: only GPUs have CUDA graphs"
    pipeline, model = _pipeline(kind, name, known=known, graph=graph)
    context = pipeline.context
    samples = 2 * pipeline.schedule.num_microbatches
    batches = [model.batch(samples, seed=replica) for replica in range(context.data_size)]
    before = time.perf_counter()
    for _ in range(6 if graph else 4):
        pipeline.zero_grad()
        _synchronize()
        before = time.perf_counter()
        step = execute_pipeline(iter([batches[context.data_rank]]), pipeline, broadcast_loss=True)
        _synchronize()
    seconds = time.perf_counter() - before
    gradients_here = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
    execute_pipeline(iter([batches[context.data_rank]]), pipeline, forward_only=True, return_outputs=True)
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    loss, gradients = model.plain_step((whole[0], whole[1]))
    _require_near("loss", step.loss, loss)
    for inside, gradient in gradients_here.items():
        outside = inside.split(".", 2)[2]
        _require_near(outside, gradient, gradients[outside])
    return f"{context.data_size} x {context.pipeline_size} ranks, {1000 * seconds:.1f} ms"


def _pipeline(kind: type[TinyModel], name: str, *, known: bool, graph: bool = False) -> tuple[Pipeline, TinyModel]:
    context = current_context()
    schedule = _schedule(name, context.pipeline_size)
    model = kind(layers=schedule.placement.num_stages)
    chunks = model.chunks(schedule, context.pipeline_rank)
    model.tie(chunks, schedule)
    shape = (2, LENGTH, WIDTH) if known else None
    options: dict[str, Any] = {"tensor_shape": shape, "tensor_dtype": model.dtype, "graph": graph}
    return Pipeline(chunks, schedule, criterion=model.criterion, **options), model


class _Perceptron(nn.Module):
    """Two linear layers, which tensor ranks share, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = (nn.Linear(*sizes, dtype=torch.float64) for sizes in ((8, 32), (32, 8)))

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = hidden + self.fc2(functional.gelu(self.fc1(hidden)))
        return result


def split_a_module() -> str:
    """A module that is cut into stages and split over two tensor ranks has the loss of the whole module."""
    context = current_context()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = nn.Sequential(*(_Perceptron() for _ in range(context.pipeline_size)))
    generator = torch.Generator().manual_seed(1)
    samples = 2 * context.pipeline_size
    inputs, labels = (torch.randn(samples, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = functional.mse_loss(whole(inputs), labels).detach()
    schedule = make_schedule("1f1b", ranks=context.pipeline_size, microbatches=context.pipeline_size)
    pipeline = Pipeline.from_module(whole, schedule, (inputs, labels), criterion=functional.mse_loss)
    for _ in range(3):
        loss = execute_pipeline(iter([(inputs, labels)]), pipeline, broadcast_loss=True).loss
    held = sum(parameter.numel() for parameter in pipeline.parameters())
    _require(held < sum(map(torch.numel, _Perceptron().parameters())), f"a rank holds all {held} parameters of a stage")
    _require_near("loss", loss, expected)
    return f"{context.pipeline_size} x {context.tensor_size} ranks"


def tell_of_an_error() -> str:
    """An error in the last rank's forward is raised on every rank soon, and the next step works."""
    pipeline, model = _pipeline(PlainModel, "1f1b", known=False)
    context, batch = pipeline.context, model.batch(2 * pipeline.schedule.num_microbatches)
    execute_pipeline(iter([batch]), pipeline)
    culprit = context.pipeline_size - 1
    hooks = [pipeline.chunks[0].register_forward_pre_hook(_fail)] if context.pipeline_rank == culprit else []
    started, found = time.perf_counter(), "no error was raised"
    try:
        execute_pipeline(iter([batch]), pipeline)
    except PipelineError as error:
        found = f"rank {error.rank} was named, and as dead {error.died}"
    seconds = max(of_all(time.perf_counter() - started))
    for hook in hooks:
        hook.remove()
    execute_pipeline(iter([batch]), pipeline)
    expected = f"rank {culprit} was named, and as dead None"
    _require(found == expected, f"{found}; expected: {expected}")
    _require(seconds < SOON, f"the error was raised after {seconds:.1f} s")
    return f"raised after {seconds:.2f} s"


def _fail(*_: object) -> None:
    raise ValueError("on purpose")


def resume() -> str:
    """A run that is saved and loaded goes on with the same loss."""
    context = current_context()
    with tempfile.TemporaryDirectory() as made:
        folder = of_all(made)[0]
        if not all(of_all(Path(folder).exists())):
            return "left out: the machines share no temporary folder (set TMPDIR to one)"
        losses = []
        for loads in (False, True):
            pipeline, model = _pipeline(PlainModel, "1f1b", known=True)
            optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
            batch = model.batch(2 * pipeline.schedule.num_microbatches)
            if loads:
                load_checkpoint(Path(folder, "saved"), pipeline, optimizer)
            else:
                _step(pipeline, optimizer, batch)
                save_checkpoint(Path(folder, "saved"), pipeline, optimizer)
            _step(pipeline, optimizer, batch)
            losses.append(_step(pipeline, optimizer, batch))
        of_all(None)  # before the folder is removed
    _require(losses[0] == losses[1], f"the loss is {losses[1]} after loading, {losses[0]} without")
    return f"{context.world_size} files"


def _step(pipeline: Pipeline, optimizer: torch.optim.Optimizer, batch: tuple[Any, Any]) -> float:
    optimizer.zero_grad()
    loss = execute_pipeline(iter([batch]), pipeline, broadcast_loss=True).loss
    optimizer.step()
    assert loss is not None
    return float(loss)


def of_all(value: object) -> list[Any]:
    """The values of all ranks, also after an error: its alarm opens the channels."""
    context = current_context()
    with context.alarm.raised_everywhere():
        return all_gather_object(context.world, value)


def _seconds(work: Callable[[], object]) -> float:
    """The time of `work` when it runs for the second time, on the slowest rank."""
    work()
    of_all(None)
    _synchronize()
    started = time.perf_counter()
    work()
    _synchronize()
    slowest: float = max(of_all(time.perf_counter() - started))
    return slowest


def _synchronize() -> None:
    device = current_context().device
    torch.get_device_module(device).synchronize(device)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _require_near(name: str, found: Tensor | None, expected: Tensor) -> None:
    if found is None:
        raise AssertionError(f"there is no {name}")
    error = float((found.detach().cpu() - expected).abs().max() / expected.abs().max())
    _require(error < NEAR, f"{name} deviates by {error:.1e}")
