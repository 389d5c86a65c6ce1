"""Every key of a configuration that the tutorials have does what it says: each test fails where its key is ignored."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeflow import PipelineError, UsageError
from pipeflow.colossalai import initialize, launch_from_torch
from pipeflow.colossalai.amp import AMP_TYPE
from pipeflow.colossalai.core import global_context as gpc
from pipeflow.colossalai.trainer import Trainer
from pipeflow.colossalai.utils import get_dataloader
from pipeflow.engine.parallel.context import current_context
from pipeflow.optim import MasterWeights
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import PlainModel
from pipeflow.training import read_config
from pipeflow.training.config import KEYS
from pipeflow.training.launch import keep_config
from tests.colossalai.work import MODEL, initialized, samples

HALF = PlainModel(dtype=torch.float32)
TESTED: set[str] = set()


def tries(*keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Notes which keys a test is of."""
    TESTED.update(keys)
    return lambda test: test


def stepped(config: dict[str, Any], chunks: int | None = None, samples: int = 8, model: PlainModel = MODEL) -> Any:
    """An engine that has taken a step."""
    engine, *_ = initialized(config, chunks=chunks, model=model)
    batch = model.batch(samples)
    for _ in range(engine.gradient_accumulation):
        engine.zero_grad()
        engine.execute_schedule(iter([batch]))
        engine.step()
    return engine


def calls_of_a_batch(config: dict[str, Any]) -> int:
    """How often the criterion is called for a batch: once for each microbatch, besides checks without gradients."""
    calls = 0

    def criterion(output: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        return MODEL.criterion(output, labels)

    engine, *_ = initialized(config, criterion=criterion)
    engine.execute_schedule(iter([MODEL.batch(8)]))
    return calls


@tries("NUM_MICRO_BATCHES")
def test_microbatches() -> None:
    assert run_threads(calls_of_a_batch, 2, {"NUM_MICRO_BATCHES": 4}) == [0, 4]
    assert run_threads(calls_of_a_batch, 2, {"NUM_MICRO_BATCHES": 8}) == [0, 8]


def other_chunks(config: dict[str, Any]) -> str:
    stepped({"NUM_CHUNKS": 2}, chunks=2)
    with pytest.raises((UsageError, PipelineError)) as raised:
        stepped(config, chunks=2)
    return str(raised.value)


@tries("NUM_CHUNKS", "model.num_chunks")
@pytest.mark.parametrize("config", [{"NUM_CHUNKS": 1}, {"model": {"num_chunks": 1}}], ids=["NUM_CHUNKS", "model"])
def test_chunks(config: dict[str, Any]) -> None:
    for message in run_threads(other_chunks, 2, config):
        assert "NUM_CHUNKS is 1, but the model has 2" in message


def under_shape(shape: tuple[int | None, ...], samples: int) -> str:
    try:
        stepped({"TENSOR_SHAPE": shape, "NUM_MICRO_BATCHES": 4}, samples=samples)
    except (UsageError, PipelineError) as error:
        return str(error)
    return ""


@tries("TENSOR_SHAPE")
def test_shape() -> None:
    assert run_threads(under_shape, 2, (2, 3, 6), 8) == ["", ""]
    assert run_threads(under_shape, 2, (None, 3, 6), 6) == ["", ""]
    assert all("(2, 3, 6)" in said for said in run_threads(under_shape, 2, (2, 3, 6), 4))
    assert all("6" in said for said in run_threads(under_shape, 2, (2, 3, 7), 8))


def norm_of_change(clip: float) -> float:
    engine, *_ = initialized({"clip_grad_norm": clip})
    before = [parameter.detach().clone() for parameter in engine.model.parameters()]
    engine.execute_schedule(iter([MODEL.batch(8)]))
    engine.step()
    after = engine.model.parameters()
    changes = [(one.detach() - other) / 0.1 for one, other in zip(after, before, strict=True)]
    return float(torch.stack([change.square().sum() for change in changes]).sum())


@tries("clip_grad_norm")
def test_clipping() -> None:
    """The norm is that of both stages."""
    assert sum(run_threads(norm_of_change, 2, 0.01)) ** 0.5 == pytest.approx(0.01, rel=1e-5)
    assert sum(run_threads(norm_of_change, 2, 0.0)) ** 0.5 > 0.05


def steps_of_epochs() -> tuple[int, int, int]:
    """How many steps the optimizer, and a rate by steps, take in an epoch of 5 batches."""

    def rates(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    loader = get_dataloader(samples(10), 2)
    engine, loader, _, scheduler = initialized({"gradient_accumulation": 2}, loader, rates=rates)
    batches = iter(loader)
    for _ in range(len(loader)):
        engine.zero_grad()
        engine.execute_schedule(batches)
        engine.step()
        scheduler.step()
    return len(loader), engine.steps, scheduler.last_epoch


@tries("gradient_accumulation")
def test_accumulation() -> None:
    """That the gradient is of the mean loss is in `test_engine.py`."""
    assert run_threads(steps_of_epochs, 2) == [(4, 2, 2)] * 2


def precision(config: dict[str, Any]) -> tuple[torch.dtype, bool, torch.dtype]:
    engine = stepped({**config, "TENSOR_SHAPE": (4, 3, 6)}, model=HALF)
    outputs = Trainer(engine).predict(HALF.batch(8)[0])
    dtype = outputs.dtype if isinstance(outputs, Tensor) else torch.float64
    return next(engine.model.parameters()).dtype, isinstance(engine.optimizer, MasterWeights), dtype


@tries("fp16", "bf16")
@pytest.mark.parametrize(("key", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_precision(key: str, dtype: torch.dtype) -> None:
    assert run_threads(precision, 2, {})[1] == (torch.float32, False, torch.float32)
    assert run_threads(precision, 2, {key: {"mode": AMP_TYPE.NAIVE}})[1] == (dtype, True, dtype)
    assert run_threads(precision, 2, {key: {"mode": AMP_TYPE.TORCH}})[1][:2] == (torch.float32, True)


def linear_under_autocast() -> torch.dtype:
    module = torch.nn.Linear(4, 4)
    seen: list[torch.dtype] = []

    def criterion(output: Tensor, _: Tensor) -> Tensor:
        seen.append(output.dtype)
        return output.float().square().mean()

    keep_config(read_config({"fp16": {"mode": AMP_TYPE.TORCH}}))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine, *_ = initialize(module, optimizer, criterion, verbose=False)
    batch = torch.ones(2, 4), torch.ones(2, 4)
    engine.execute_schedule(iter([batch]))
    engine.step()
    seen.append(engine(batch[0]).dtype)
    return seen[0] if seen[0] is seen[1] else torch.float64


def test_autocast_computes_in_16_bits() -> None:
    assert run_threads(linear_under_autocast, 1) == [torch.float16]


def loads() -> tuple[list[int], int]:
    keep_config(read_config({"BATCH_SIZE": 4, "NUM_EPOCHS": 3, "NUM_MICRO_BATCHES": 2}))
    sizes = [len(inputs) for inputs, _ in get_dataloader(samples(8))]
    engine, loader, *_ = initialized({"NUM_EPOCHS": 3}, get_dataloader(samples(8), 4))
    trainer = Trainer(engine)
    trainer.fit(loader)
    assert gpc.config.NUM_EPOCHS == 3
    return sizes, trainer.cur_epoch


@tries("BATCH_SIZE", "NUM_EPOCHS")
def test_batches_and_epochs() -> None:
    """By default, where a program does not pass them."""
    assert run_threads(loads, 1) == [([4, 4], 3)]


def launched(folder: str) -> tuple[tuple[int, int, int], tuple[int, float], list[str]]:
    current_context().close()
    parallel = {"pipeline": 2, "tensor": {"mode": "1d", "size": 2}}
    config = {"parallel": parallel, "seed": 5, "LOG_PATH": folder}
    context = launch_from_torch(config, backend="gloo", verbose=False)
    logging.getLogger("pipeflow").info("said by rank %d", context.rank)
    sizes = (context.data_size, context.pipeline_size, context.tensor_size)
    kept = Path(folder, f"rank_{context.rank}.log").read_text(encoding="utf-8").splitlines()
    found = (torch.initial_seed(), random.Random(5 + 1024 * context.pipeline_rank).random() - random.random())
    context.close()
    return sizes, found, [line.partition("pipeflow: ")[2] for line in kept]


@tries("parallel.pipeline", "parallel.tensor", "seed", "LOG_PATH")
@pytest.mark.exhaustive
def test_launch(tmp_path: Path) -> None:
    for rank, (sizes, seeds, said) in enumerate(run_processes(launched, 4, str(tmp_path))):
        assert sizes == (1, 2, 2)
        assert seeds == (5 + 1024 * (rank // 2), 0.0)
        assert said == [f"said by rank {rank}"]


@tries("parallel.tensor.mode", "parallel.tensor.depth")
def test_a_grid_is_counted() -> None:
    """One process cannot be two squares."""
    grid = {"mode": "2.5d", "size": 8, "depth": 2}
    with pytest.raises(UsageError, match="replicas of 8"):
        launch_from_torch({"parallel": {"tensor": grid}}, backend="gloo", verbose=False)
    with pytest.raises(UsageError, match="tensor_depth=2, such as 8 or 18, got tensor=4"):
        launch_from_torch({"parallel": {"tensor": {**grid, "size": 4}}}, backend="gloo", verbose=False)


@tries("parallel.experts")
def test_expert_ranks_are_counted() -> None:
    """One process cannot be two replicas."""
    with pytest.raises(UsageError, match="2 expert ranks do not divide"):
        launch_from_torch({"parallel": {"experts": 2}}, backend="gloo", verbose=False)


@tries("parallel.context")
def test_context_ranks_are_counted() -> None:
    """One process cannot be two context ranks."""
    with pytest.raises(UsageError, match="context 2"):
        launch_from_torch({"parallel": {"context": 2}}, backend="gloo", verbose=False)


def mixed(config: dict[str, Any]) -> tuple[list[bool], list[str]]:
    """Whether a batch of training, and one that is evaluated, are as they are in the data set; and what is said."""
    seen: list[bool] = []

    def criterion(output: Tensor, labels: Tensor) -> Tensor:
        seen.append(len(labels.unique()) <= 2)
        return torch.nn.functional.cross_entropy(output, labels)

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # a handler of a test
    logging.getLogger("pipeflow").addHandler(handler)
    images, labels = torch.eye(4).repeat(2, 1), torch.arange(8) % 4
    data = torch.utils.data.TensorDataset(images, labels)
    module = torch.nn.Linear(4, 4)
    keep_config(read_config(config))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train, test = get_dataloader(data, 8), get_dataloader(data, 8)
    engine, train, test, _ = initialize(module, optimizer, criterion, train, test, verbose=False)
    logging.getLogger("pipeflow").removeHandler(handler)
    [(inputs, _)], [(others, _)] = list(train), list(test)
    *_, loss = engine.execute_schedule(iter(train))
    engine.step()
    *_, evaluated = engine.execute_schedule(iter(test), forward_only=True)
    assert loss is not None
    assert evaluated is not None
    assert loss.isfinite()
    assert evaluated.isfinite()
    assert len(seen) == (3 if gpc.config.mixup_alpha else 2)  # the loss of both labels, then that of one
    return [bool((batch == images).all()) for batch in (inputs, others)], said


@tries("dali.mixup_alpha", "dali.gpu_aug")
def test_mixup_and_augmentation() -> None:
    assert run_threads(mixed, 1, {}) == [([True, True], [])]
    [(same, said)] = run_threads(mixed, 1, {"dali": {"gpu_aug": True, "mixup_alpha": 0.8}})
    assert same == [False, True]
    assert [each for each in said if "gpu_aug has no effect here" in each] == said != []


def test_every_key_is_here() -> None:
    assert set(KEYS) == TESTED
