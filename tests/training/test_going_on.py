"""A Trainer, its learning rates, accumulation and checkpoints in an elastic world, of which a rank dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import TensorDataset

from pipeflow import UsageError, execute_pipeline, get_dataloader, load_checkpoint, save_checkpoint
from pipeflow.adapters.ranks import require_whole_activations
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import die, run_threads
from pipeflow.testing.models import PlainModel
from pipeflow.training import Engine, Hook, Trainer
from tests.runtime.going_on import build, of_replica, stages_of

MODEL = PlainModel()


class Kill(Hook):
    """Kills a rank before a step of the Trainer, or in its second batch."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def before_step(self, trainer: Trainer) -> None:
        if (current_context().rank, trainer.engine.steps) == (self.rank, self.step):
            stage: Any = trainer.engine.model.chunks[0]
            stage.forwards = 6  # of the four of a batch


def fitted(dies: int) -> tuple[dict[str, Any], list[float], float]:
    """Two epochs of 3 steps of 2 batches."""
    pipeline = build(MODEL, of_replica(2))
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    engine = Engine(pipeline, optimizer, scheduler=scheduler, clip_grad_norm=0.05, gradient_accumulation=2)
    loader = get_dataloader(TensorDataset(*MODEL.batch(96)), 8, shuffle=True, seed=3)
    trainer = Trainer(engine, [Kill(dies, 1)])
    trainer.fit(loader, 2)
    return stages_of(pipeline), [group["lr"] for group in optimizer.param_groups], trainer.metrics["train"]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
def test_a_trainer_goes_on(rank: int) -> None:
    whole = run_threads(fitted, 4, -1, data=2, deadline=90, timeout=20)
    for mine, its in zip(
        run_threads(fitted, 4, rank, data=2, elastic=True, deadline=90, timeout=20), whole, strict=True
    ):
        if mine is not None:
            for name, each in its[0].items():
                assert numpy.allclose(mine[0][name], each, rtol=1e-9, atol=1e-12), name
            assert mine[1] == its[1]
            assert mine[2] == pytest.approx(its[2], rel=1e-9)


def stepped(pipeline: Any, optimizer: torch.optim.Optimizer, seed: int) -> float | None:
    optimizer.zero_grad()
    batch = MODEL.batch(8, seed=2 * seed + current_context().data_rank)
    loss = execute_pipeline(iter([batch]), pipeline).loss
    optimizer.step()
    return None if loss is None else loss.item()


def saved_after_a_death(folder: str, before_save: bool) -> list[float | None]:
    rank, pipeline = current_context().rank, build(MODEL, of_replica(2))
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.01)
    stepped(pipeline, optimizer, 0)
    if rank == 0 and not before_save:
        die()
    stepped(pipeline, optimizer, 1)
    if rank == 0:
        die()
    save_checkpoint(folder, pipeline, optimizer, step=2)
    return [stepped(pipeline, optimizer, seed) for seed in (2, 3)]


def loaded(folder: str) -> list[float | None]:
    pipeline = build(MODEL, of_replica(2))
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.01)
    assert load_checkpoint(folder, pipeline, optimizer).step == 2
    return [stepped(pipeline, optimizer, seed) for seed in (2, 3)]


@pytest.mark.parametrize("before_save", [False, True], ids=["before a step", "before the save"])
def test_a_checkpoint_that_was_saved_after_a_death_is_one_of_all_ranks(before_save: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": 2, "elastic": True, "deadline": 60, "timeout": 20}
    saved = run_threads(saved_after_a_death, 4, str(tmp_path / "saved"), before_save, **options)
    whole = run_threads(loaded, 4, str(tmp_path / "saved"), data=2, deadline=60, timeout=20)
    assert saved[1] == pytest.approx(whole[1], rel=1e-12)
    assert saved[3] == pytest.approx(whole[3], rel=1e-12)


def test_scripts_of_other_libraries_are_refused() -> None:
    def run() -> None:
        with pytest.raises(UsageError, match="do not go on without ranks that die"):
            require_whole_activations(current_context())

    run_threads(run, 4, data=2, elastic=True, deadline=60, timeout=20)
