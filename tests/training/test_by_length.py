"""Texts of different lengths in the Trainer: planned batch by batch, with the losses of a plain loop."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from pipeflow import ByLength, CostModel, Output, Pipeline, UsageError, build_stages, get_dataloader, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from pipeflow.training import AccuracyHook, Engine, Hook, Step, Trainer
from tests.runtime.test_divided import WORDS, padded

torch.manual_seed(1)
LAYERS = [nn.Linear(4, 4) for _ in range(4)]  # for threads, which share a random generator
LENGTHS = (3, 1, 2, 9, 2, 4, 1, 2, 30, 2, 5, 3, 2, 2, 7, 1, 4, 2, 12)


class Texts(Dataset[Tensor]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 11, (LENGTHS[index],), generator=generator)


class Losses(Hook):
    def __init__(self) -> None:
        self.found: list[float] = []

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.found.append(float(step.loss))


def train(divides: bool) -> list[float]:
    """Two epochs of batches of 8, 8 and 3 texts."""
    context = current_context()
    schedule = make_schedule("1f1b", ranks=context.pipeline_size, microbatches=4 if divides else 1)
    pipeline = Pipeline.from_module(deepcopy(WORDS), schedule, padded([Texts()[0], Texts()[1]] * 4))
    collate: Any = ByLength(padded, schedule, length=len) if divides else padded
    losses = Losses()
    engine = Engine(pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.5))
    loader = get_dataloader(Texts(), 8 // context.data_size, shuffle=True, collate_fn=collate)
    Trainer(engine, [losses]).fit(loader, 2)
    return losses.found


def test_a_trainer_with_planned_batches_has_the_losses_of_whole_ones() -> None:
    [plain] = run_threads(train, 1, False)
    assert len({*plain}) == 6
    for losses in run_threads(train, 2, True):
        assert losses == pytest.approx(plain, rel=1e-12)


class Counted(Hook):
    """Counts the batches of evaluations."""

    many = 0

    def after_batch(self, trainer: Trainer, output: Output, labels: object) -> None:
        assert labels is None  # they are among the inputs
        self.many += 1


def evaluate(divides: bool) -> tuple[dict[str, float], int]:
    schedule = make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=4)
    pipeline = Pipeline.from_module(deepcopy(WORDS), schedule, padded([Texts()[0], Texts()[1]] * 4))
    collate: Any = ByLength(padded, schedule, length=len) if divides else padded
    engine, counted = Engine(pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.5)), Counted()
    loader = get_dataloader(Texts(), 8, collate_fn=collate)
    return Trainer(engine, [counted]).evaluate(loader), counted.many


def test_an_evaluation_takes_planned_batches() -> None:
    [(plain, many)] = run_threads(evaluate, 1, False)
    for metrics, batches in run_threads(evaluate, 2, True):
        assert metrics == pytest.approx(plain, rel=1e-12)
        assert batches == many == 3


def grade(divides: bool) -> dict[str, float]:
    """The accuracy of a classifier whose batches are planned, or whole."""
    schedule = make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=3)
    pipeline = Pipeline(
        build_stages([deepcopy(layer) for layer in LAYERS]), schedule, criterion=nn.functional.cross_entropy
    )
    engine = Engine(pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.5))
    samples: Any = [(row, index % 4) for index, row in enumerate(torch.eye(4).repeat(3, 1))]
    collate: Any = ByLength(default_collate, schedule, length=lambda sample: 1 + sample[1]) if divides else None
    loader = get_dataloader(samples, 6, collate_fn=collate)
    return Trainer(engine, [AccuracyHook()]).evaluate(loader)


def test_hooks_get_the_labels_of_planned_batches_in_the_order_of_their_outputs() -> None:
    [plain] = run_threads(grade, 1, False)
    assert 0 < plain["accuracy"] < 1
    for metrics in run_threads(grade, 2, True):
        assert metrics == pytest.approx(plain, rel=1e-6)


@pytest.mark.slow
def test_replicas_plan_their_own_batches() -> None:
    plain = run_threads(train, 2, False, data=2)
    for losses in run_threads(train, 4, True, data=2):
        assert losses == pytest.approx(plain[0], rel=1e-12)


def test_what_is_chosen_keeps_no_more_than_the_schedule() -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    texts = [torch.zeros(length) for length in LENGTHS]
    divided = ByLength(nn.utils.rnn.pad_sequence, schedule, length=len)(texts)
    assert divided.schedule is not None
    assert divided.schedule.name == "zb-h1"  # as much as 1f1b; zb-h2 keeps more
    assert sum(part.shape[1] for part in divided if isinstance(part, Tensor)) == len(LENGTHS)
    few = ByLength(nn.utils.rnn.pad_sequence, schedule, CostModel.even(schedule.placement), length=len)(texts[:3])
    assert len(few) == 3
    sliced = make_schedule("1f1b", ranks=4, microbatches=8, slices=4)
    divided = ByLength(nn.utils.rnn.pad_sequence, sliced, length=lambda text: 10 * len(text), quadratic=0.1)(texts)
    assert divided.schedule is not None
    assert (divided.schedule.name, divided.schedule.slices) == ("zb-h1", 4)
    assert divided.cost is not None
    assert 0.9 < divided.cost.attention < 1


def test_a_sample_of_unknown_length_is_refused() -> None:
    by_length = ByLength(list, make_schedule("1f1b", ranks=2, microbatches=2))
    assert len(by_length([{"input_ids": [1, 2]}, {"input_ids": [1]}])) == 2
    assert len(by_length([(torch.zeros(3), 0), (torch.zeros(2), 1)])) == 2
    with pytest.raises(UsageError, match="the length of a int is not known: pass ByLength"):
        by_length([1, 2])
