"""Subclasses of transformers' Trainer that train a Pipeline: those that compute their own loss, and those that generate
text to be judged.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from pipeflow import Pipeline, UsageError
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from tests.covering import some
from tests.huggingface.trainers import BATCH, given, make_arguments, make_module, make_pipeline, schedule_here

pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

from pipeflow.adapters.libraries import transformers_library  # noqa: E402  # after the skip
from pipeflow.huggingface import Trainer, pipelined  # noqa: E402  # after the skip

transformers: Any = transformers_library()
functional = torch.nn.functional


class Weighted(transformers.Trainer):  # type: ignore[misc]  # transformers has its own types
    """A mean over samples, each weighted by its class."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 2.0, 3.0]))
        return (loss, outputs) if return_outputs else loss


class Focal(transformers.Trainer):  # type: ignore[misc]  # transformers has its own types
    """A sum over words, divided by the number of words of all accumulated batches."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        targets = labels[:, 1:]
        told = functional.log_softmax(outputs.logits[:, :-1], -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        added = -((1 - told.exp()) ** 2 * told * (targets != -100)).sum()
        loss = added / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class Hidden(transformers.Trainer):  # type: ignore[misc]  # transformers has its own types
    """Reads what a block of the first stage returned, from a certain step on."""

    since = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        loss = outputs.loss
        if self.state.global_step >= self.since:
            loss = loss + outputs.hidden_states[1].pow(2).mean()
        return (loss, {"logits": outputs.logits}) if return_outputs else loss


class Late(Hidden):
    """Does not read them in its first step, which is traced."""

    since = 1


def scaled(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss function that a Trainer is given."""
    logits = outputs.logits.transpose(1, 2)[:, :, :-1] / 2
    return functional.cross_entropy(logits, labels[:, 1:], reduction="sum", ignore_index=-100) / num_items_in_batch


class Reduced(transformers.Trainer):  # type: ignore[misc]  # transformers has its own types
    """A sum over samples, or that divided by a number."""

    @staticmethod
    def divided(losses: Any, labels: Any) -> Any:
        return losses.sum()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits
        losses = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        loss = self.divided(losses, labels)
        return (loss, outputs) if return_outputs else loss


class ByCount(Reduced):
    @staticmethod
    def divided(losses: Any, labels: Any) -> Any:
        return losses.sum() / len(labels)


class ByMask(Reduced):
    """A mean over samples of the first two classes."""

    @staticmethod
    def divided(losses: Any, labels: Any) -> Any:
        return (losses * (labels < 2)).sum() / (labels < 2).sum()


class Partly(Focal):
    """Only a part of it is divided by the number of items."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **more: Any
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return loss + outputs.logits.pow(2).mean()


class Both(transformers.Trainer):  # type: ignore[misc]  # transformers has its own types
    """A mean over labels, and one over all words."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        return functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten()) + outputs.logits.pow(2).mean()


CASES: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    "divided by items": ("llama", Focal, {}, {}),
    "weights of classes": ("bert", Weighted, {"gradient_accumulation_steps": 1}, {}),
    "a sum": ("bert", Reduced, {}, {}),
    "a sum over a count": ("bert", ByCount, {}, {}),
    "hidden states": ("bert", Hidden, {"gradient_accumulation_steps": 1}, {}),
    "a function": ("llama", transformers.Trainer, {}, {"compute_loss_func": scaled}),
    "label smoothing": ("llama", transformers.Trainer, {"label_smoothing_factor": 0.1}, {}),
}


def results(trainer: Any) -> tuple[list[float], dict[str, float]]:
    trainer.train()
    evaluated = trainer.evaluate()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return losses, {name: evaluated[name] for name in ("eval_loss", "eval_mean", "eval_labels") if name in evaluated}


@pytest.mark.exhaustive
@pytest.mark.parametrize("replicas", some([1, 2], [2]))
@pytest.mark.parametrize("case", CASES)
def test_losses_of_trainers_are_those_of_one_process(case: str, replicas: int, tmp_path: Path) -> None:
    kind, trains, asked, more = CASES[case]
    options = {"max_steps": 20 if case == "divided by items" else 4, "gradient_accumulation_steps": 2, **asked}
    expected = results(trains(make_module(kind), make_arguments(tmp_path, **options), **given(kind), **more))

    def rank() -> tuple[list[float], dict[str, float]]:
        size = BATCH // current_context().data_size
        sizes = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
        arguments = make_arguments(tmp_path, **options, **sizes)
        return results(pipelined(trains)(make_pipeline(kind), arguments, **given(kind), **more))

    for losses, evaluated in run_threads(rank, 2 * replicas, data=replicas, deadline=200.0):
        assert losses == pytest.approx(expected[0], abs=1e-5)
        assert evaluated == pytest.approx(expected[1], abs=1e-5)


def make_summarizer() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, **sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    )


def summaries() -> list[dict[str, torch.Tensor]]:
    words = torch.randint(2, 64, (20, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "attention_mask": torch.ones_like(each), "labels": each[:4]} for each in words]


def generated(trains: Any, model: Any, folder: Path, judged_together: int) -> tuple[list[float], float, Any]:
    options = {"max_steps": 4, "logging_steps": 1, "learning_rate": 5e-3, "use_cpu": True, "report_to": []}
    options |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": judged_together, "disable_tqdm": True}
    options |= {"predict_with_generate": True, "generation_max_length": 6, "save_strategy": "no"}
    arguments = transformers.Seq2SeqTrainingArguments(str(folder), **options)
    trainer = trains(model, arguments, train_dataset=summaries())
    trainer.train()
    told = trainer.predict(summaries()[:6])
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return losses, told.metrics["test_loss"], told.predictions


@pytest.mark.exhaustive
def test_predictions_are_generated_texts(tmp_path: Path) -> None:
    module = make_summarizer()  # here, since threads share a random generator
    losses, judged, texts = generated(transformers.Seq2SeqTrainer, copy.deepcopy(module), tmp_path, 6)

    def rank() -> tuple[list[float], float, Any]:
        example = {name: torch.stack([each[name] for each in summaries()[:4]]) for name in summaries()[0]}
        model = Pipeline.from_module(copy.deepcopy(module), schedule_here(2), example)
        return generated(pipelined(transformers.Seq2SeqTrainer), model, tmp_path, 4)  # and 2

    for its_losses, its, its_texts in run_threads(rank, 2, deadline=200.0):
        assert its_losses == pytest.approx(losses, abs=1e-5)
        assert its == pytest.approx(judged, abs=1e-5)
        assert numpy.array_equal(its_texts, texts)


@pytest.mark.exhaustive
def test_the_trainer_is_made_as_others_are_and_other_classes_are_refused() -> None:
    assert pipelined(transformers.Trainer) is Trainer
    assert pipelined(Focal) is pipelined(Focal)
    assert pipelined(pipelined(Focal)) is pipelined(Focal)
    with pytest.raises(UsageError, match=r"a subclass of transformers\.Trainer, got <class 'int'>"):
        pipelined(int)


class Twice(transformers.Trainer):  # type: ignore[misc]  # transformers has its own types
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return model(**inputs).loss + model(**inputs).loss


REFUSED = {
    "partly": ("llama", Partly, "Partly.compute_loss divides only a part of its loss by num_items_in_batch"),
    "twice": ("bert", Twice, r"Twice\.compute_loss cannot be computed in stages"),
    "late": (
        "bert",
        Late,
        r"it reads 'hidden_states', of which this stage has 3 of 5 tensors, .* let it always read them",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_cannot_be_computed_in_stages_is_refused(case: str, tmp_path: Path) -> None:
    kind, trains, told = REFUSED[case]

    def rank() -> None:
        with pytest.raises(UsageError, match=told):
            pipelined(trains)(make_pipeline(kind), make_arguments(tmp_path, max_steps=2), **given(kind)).train()

    run_threads(rank, 2, deadline=200.0)
