"""The Trainer's checkpoints: transformers reads them, runs go on from them, and the best one comes back."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from pipeflow import UsageError
from pipeflow.adapters.libraries import transformers_library
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from tests.covering import some
from tests.huggingface.trainers import given, make_arguments, make_data, make_module, make_trainer

pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SAVING: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def trained(folder: Path, resume: Path | None = None, **options: Any) -> tuple[list[dict[str, float]], Any, Any]:
    """What was logged at each step, the logits of 5 samples, and what the Trainer knows of the run."""
    trainer = make_trainer("llama", folder, **(SAVING | options))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    steps = [each for each in trainer.state.log_history if "loss" in each]
    return steps, trainer.predict(make_data("llama", 5)).predictions, trainer.state


def logits_in_transformers(folder: Path) -> Any:
    model = transformers_library().AutoModelForCausalLM.from_pretrained(folder)
    batch = {
        name: torch.stack([each[name] for each in make_data("llama", 5)]) for name in ("input_ids", "attention_mask")
    }
    with torch.no_grad():
        return model(**batch).logits.numpy()


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", some([2, 1], [1]))
def test_a_run_goes_on_from_its_checkpoint_under_any_layout(ranks: int, tmp_path: Path) -> None:
    whole = run_threads(trained, 2, tmp_path / "run", deadline=200.0)
    for steps, predicted, _ in whole:
        assert numpy.allclose(predicted, logits_in_transformers(tmp_path / "run" / "checkpoint-4"), atol=1e-5)
        assert [each["step"] for each in steps] == [1, 2, 3, 4]
    again = run_threads(trained, ranks, tmp_path / "again", tmp_path / "run" / "checkpoint-2", deadline=200.0)
    for steps, predicted, state in again:
        assert state.global_step == 4
        assert len(steps) == 4  # those of the checkpoint are in its state
        for step, before in zip(steps, whole[0][0], strict=True):
            assert step == pytest.approx(before, abs=1e-5)
        assert numpy.allclose(predicted, whole[0][1], atol=1e-5)


@pytest.mark.exhaustive
def test_the_best_checkpoint_comes_back(tmp_path: Path) -> None:
    best: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    best |= {"metric_for_best_model": "mean", "greater_is_better": False}  # logits grow
    results = run_threads(lambda: trained(tmp_path, **best), 4, data=2, deadline=200.0)
    kept = [each.name for each in tmp_path.glob("checkpoint-*")]
    assert kept == ["checkpoint-2"]
    expected = logits_in_transformers(tmp_path / "checkpoint-2")
    for _, predicted, state in results:
        assert state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
        assert numpy.allclose(predicted, expected, atol=1e-5)


@pytest.mark.exhaustive
def test_a_checkpoint_of_the_model_only_is_read_by_transformers_and_not_resumed(tmp_path: Path) -> None:
    for _, predicted, _ in run_threads(lambda: trained(tmp_path, save_only_model=True), 2, deadline=200.0):
        assert numpy.allclose(predicted, logits_in_transformers(tmp_path / "checkpoint-4"), atol=1e-5)

    def resumed() -> None:
        with pytest.raises(UsageError, match="save_only_model"):
            trained(tmp_path, tmp_path / "checkpoint-2")

    run_threads(resumed, 2, deadline=200.0)


class Killed(transformers_library().TrainerCallback):  # type: ignore[misc]  # transformers has its own types
    """Kills the last rank at the beginning of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step and current_context().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


Run = tuple[list[float], list[list[int]]]
WHOLE: dict[str, Any] = {**SAVING, "max_steps": 6}


def watched(trainer: Any, folder: Path | None = None) -> Run:
    """The losses of all steps, and the samples that were read."""
    collate: Any = trainer.data_collator
    read: list[list[int]] = []

    def noted(samples: list[dict[str, Any]]) -> Any:
        read.extend(each["input_ids"].tolist() for each in samples)
        return collate(samples)

    trainer.data_collator = noted
    trainer.train(resume_from_checkpoint=None if folder is None else str(folder))
    return [each["loss"] for each in trainer.state.log_history if "loss" in each], read


def killed(folder: Path) -> None:
    with suppress(Exception):  # of the rank that lives on
        watched(make_trainer("llama", folder, callbacks=[Killed(3)], **WHOLE))


def resumed(folder: Path) -> Run:
    return watched(make_trainer("llama", folder, **WHOLE), folder / "checkpoint-2")


@pytest.mark.exhaustive
def test_a_killed_run_goes_on_and_reads_every_sample_once(tmp_path: Path) -> None:
    serial = transformers_library().Trainer(
        make_module("llama"), make_arguments(tmp_path / "serial", **WHOLE), **given("llama")
    )
    losses, read = watched(serial)
    data = sorted(each["input_ids"].tolist() for each in make_data("llama"))
    assert [sorted(read[epoch : epoch + 70]) for epoch in (0, 70)] == [data] * 2
    run_processes(killed, 2, tmp_path / "run", may_die=(1,), deadline=200.0)
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["checkpoint-2"]
    for its_losses, its_read in run_processes(resumed, 2, tmp_path / "run", deadline=200.0):
        assert its_losses == pytest.approx(losses, abs=1e-5)
        assert its_read == read[2 * 3 * 8 :]
