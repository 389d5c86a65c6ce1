"""Trainers for tests: a model, data and arguments of which pipeflow's and transformers' own Trainer make the same."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeflow import ByLength, Pipeline, Schedule, make_schedule
from pipeflow.adapters.libraries import transformers_library
from pipeflow.engine.parallel.context import current_context

BATCH = 8  # of all replicas
_ONE_AT_A_TIME = threading.Lock()  # TrainingArguments write into a state of accelerate's that threads share
_SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
_SIZES |= {"num_hidden_layers": 4, "max_position_embeddings": 32}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def make_module(kind: str, **options: Any) -> Any:
    transformers = transformers_library()
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**_SIZES, num_key_value_heads=2, tie_word_embeddings=True, **options)
        return transformers.LlamaForCausalLM(config)
    if kind == "mixtral":
        more = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": False}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**(_SIZES | more | options)))
    config = transformers.BertConfig(**_SIZES, **_STILL, **options, num_labels=3)
    module = (transformers.BertForMaskedLM if kind == "masked" else transformers.BertForSequenceClassification)(config)
    module.accepts_loss_kwargs = False  # it takes num_items_in_batch and does not look at it
    return module


def make_data(kind: str, samples: int = 70) -> list[dict[str, Tensor]]:
    """Sequences of 8 words, of which up to 3 are padding."""
    generator = torch.Generator().manual_seed(1)
    data = []
    for _ in range(samples):
        words = torch.randint(3, 64, (8,), generator=generator)
        mask = torch.ones_like(words)
        mask[8 - int(torch.randint(0, 4, (), generator=generator)) :] = 0
        labels = words[0] % 3 if kind == "bert" else words.masked_fill(mask == 0, -100)
        data.append({"input_ids": words, "attention_mask": mask, "labels": labels})
    return data


def make_arguments(folder: Path, **options: Any) -> Any:
    transformers = transformers_library()
    usual: dict[str, Any] = {"max_steps": 20, "logging_steps": 1, "learning_rate": 5e-3, "warmup_steps": 3}
    usual |= {"weight_decay": 0.1, "max_grad_norm": 0.5, "gradient_accumulation_steps": 3, "save_strategy": "no"}
    usual |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "log_level": "error"}
    usual |= {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH}
    with _ONE_AT_A_TIME:
        return transformers.TrainingArguments(str(folder), **(usual | options))


def metrics(predicted: Any) -> dict[str, float]:
    logits = predicted.predictions
    return {"mean": float(abs(logits).mean()), "samples": len(logits), "labels": float(predicted.label_ids.sum())}


def given(kind: str) -> dict[str, Any]:
    """What both Trainers are given, but for the model and the arguments."""
    return {"train_dataset": make_data(kind), "eval_dataset": make_data(kind, 21), "compute_metrics": metrics}


def schedule_here(microbatches: int = 3) -> Schedule:
    return make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=microbatches)


def make_pipeline(kind: str, **options: Any) -> Pipeline:
    """Of the module that `make_module` makes on every rank."""
    with _ONE_AT_A_TIME:
        module = make_module(kind, **options)
    batch = make_data(kind, BATCH // current_context().data_size)
    example = {name: torch.stack([sample[name] for sample in batch]) for name in batch[0]}
    return Pipeline.from_module(module, schedule_here(), example)


def make_trainer(kind: str, folder: Path, *, model: Pipeline | None = None, **options: Any) -> Any:
    """pipeflow's, on every rank; with the arguments of `make_arguments`."""
    from pipeflow.huggingface import Trainer

    size = BATCH // current_context().data_size
    arguments = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size, **options}
    callbacks = arguments.pop("callbacks", None)
    made = make_arguments(folder, **arguments)
    return Trainer(make_pipeline(kind) if model is None else model, made, callbacks=callbacks, **given(kind))


def train(kind: str, folder: Path) -> tuple[list[dict[str, float]], dict[str, float], Any]:
    """What a rank's Trainer logged, and what it evaluates and predicts then."""
    trainer = make_trainer(kind, folder)
    trainer.train()
    return trainer.state.log_history, trainer.evaluate(), trainer.predict(make_data(kind, 5)).predictions


def cut_to_the_longest(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch without the columns that are padding in all of its samples."""
    longest = max(map(words_of, samples))
    return {name: torch.stack([sample[name] for sample in samples])[:, :longest] for name in samples[0]}


def words_of(sample: dict[str, Tensor]) -> int:
    return int(sample["attention_mask"].sum())


def train_by_length(kind: str, folder: Path) -> tuple[list[dict[str, float]], dict[str, float], Any]:
    """As `train`, with microbatches by length, which have other lengths."""
    trainer = make_trainer(kind, folder)
    whole = trainer.data_collator
    trainer.data_collator = ByLength(cut_to_the_longest, schedule_here(), length=words_of)
    trainer.train()
    trainer.data_collator.undivided = whole
    return trainer.state.log_history, trainer.evaluate(), trainer.predict(make_data(kind, 5)).predictions


def train_serially(kind: str, folder: Path) -> tuple[list[dict[str, float]], dict[str, float], Any]:
    """The same with transformers' own."""
    transformers = transformers_library()
    trainer = transformers.Trainer(make_module(kind), make_arguments(folder), **given(kind))
    trainer.train()
    return trainer.state.log_history, trainer.evaluate(), trainer.predict(make_data(kind, 5)).predictions


def collate_at_random(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As collators that mask words do: a batch that depends on torch's random state."""
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    hidden = torch.rand(batch["input_ids"].shape) < 0.3
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 1)}


def train_at_random(folder: Path) -> tuple[list[float], float, list[float]]:
    """Losses, the loss of an evaluation, and what this rank's layers would draw next; with dropout."""
    trainer = make_trainer("llama", folder, model=make_pipeline("llama", attention_dropout=0.5), max_steps=4)
    trainer.data_collator = collate_at_random
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return losses, trainer.evaluate()["eval_loss"], torch.rand(3).tolist()
