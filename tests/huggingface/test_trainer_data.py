"""The data of a Trainer without a length: how replicas divide it, and how evaluations weigh its batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from pipeflow import UsageError
from pipeflow.testing import run_threads

pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

from pipeflow.adapters.libraries import transformers_library  # noqa: E402  # after the skip
from tests.huggingface.trainers import given, make_arguments, make_data, make_module, make_trainer  # noqa: E402  # same


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


READING = threading.Lock()  # workers are forked, which the thread of another rank must not disturb


@pytest.mark.exhaustive
def test_a_trainer_reads_a_stream_as_it_reads_a_list(tmp_path: Path) -> None:
    """Also with workers, and in the order of the replicas."""

    def rank() -> list[list[Any]]:
        trainer = make_trainer("bert", tmp_path, data_seed=1, dataloader_num_workers=1)
        trainer.eval_dataset = make_data("bert", 21)
        expected = read(trainer.get_eval_dataloader())
        trainer.eval_dataset = Stream(trainer.eval_dataset)
        assert read(trainer.get_eval_dataloader()) == expected
        trainer.train_dataset = trainer.eval_dataset
        assert read(trainer.get_train_dataloader()) == expected
        return expected

    first, second = run_threads(rank, 2, data=2, deadline=200.0)
    assert sorted(len(batch) for batch in first + second) == [2, 3, 4, 4, 4, 4]
    assert first != second


def read(loader: Any) -> list[Any]:
    with READING:
        return [batch["input_ids"].tolist() for batch in loader]


@pytest.mark.parametrize(("replicas", "length"), [(1, 21), (2, 21), (2, 17)])
def test_evaluations_are_means_over_samples(replicas: int, length: int, tmp_path: Path) -> None:
    """The last batch has five samples, or one, which then fills the batch of the other replica; that copy counts
    nothing.
    """
    data = make_data("bert", length)
    plain = transformers_library().Trainer(make_module("bert"), make_arguments(tmp_path), **given("bert"))
    expected, predicted = seen(plain, data)

    def rank() -> Any:
        trainer = make_trainer("bert", tmp_path)
        return [seen(trainer, each) for each in (data, Stream(data))]

    for found in run_threads(rank, replicas, data=replicas, deadline=200.0):
        for metrics, logits in found:
            assert metrics == pytest.approx(expected, abs=1e-6)
            assert logits == pytest.approx(predicted, abs=1e-5)


def seen(trainer: Any, data: Any) -> tuple[dict[str, float], Any]:
    metrics, predicted = trainer.evaluate(data), trainer.predict(data)
    losses = {name: metrics[name] for name in ("eval_loss", "eval_mean", "eval_samples")}
    return {**losses, "test_loss": predicted.metrics["test_loss"]}, predicted.predictions


def test_a_batch_that_replicas_split_is_that_of_all_of_them(tmp_path: Path) -> None:
    def rank() -> Any:
        trainer = make_trainer("bert", tmp_path, accelerator_config={"split_batches": True})
        with pytest.raises(UsageError, match="a batch of 1 samples has none for some of the 2 replicas"):
            trainer.accelerator.prepare(DataLoader(make_data("bert", 9)))  # type: ignore[arg-type]  # a list
        parts = []
        for data in (make_data("bert", 9), Stream(make_data("bert", 9))):
            loader: Any = DataLoader(data, batch_size=5, collate_fn=trainer.data_collator)  # type: ignore[arg-type]  # a list
            parts.append([len(batch["labels"]) for batch in trainer.accelerator.prepare(loader)])
        told = trainer.accelerator
        return parts, told.split_batches, told.even_batches, told.dispatch_batches

    first, second = run_threads(rank, 2, data=2, deadline=200.0)
    assert first == ([[3, 2], [3, 2]], True, True, None)
    assert second == ([[2, 2], [2, 2]], True, True, None)
