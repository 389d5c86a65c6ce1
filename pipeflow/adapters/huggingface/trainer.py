"""Trainer: transformers' Trainer for a Pipeline. Loop, arguments, callbacks, learning-rate schedules and metrics are
transformers'; steps, division of the data, clipping, evaluation and checkpoints are the pipeline's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeflow.adapters.batches import samples_of
from pipeflow.adapters.cut_model import evaluate, whole_outputs
from pipeflow.adapters.huggingface.accelerator import PipelineAccelerator, place_arguments
from pipeflow.adapters.huggingface.classes import show_attributes
from pipeflow.adapters.huggingface.own_loss import (
    Chunks,
    OwnLoss,
    Reference,
    computes_own,
    require_reference,
    share_metrics,
)
from pipeflow.adapters.huggingface.peft_adapters import LOADED, has_adapters
from pipeflow.adapters.huggingface.pretrained import save_pretrained
from pipeflow.adapters.huggingface.refusals import require_pipeline, require_possible
from pipeflow.adapters.libraries import transformers_library
from pipeflow.adapters.random_states import RandomLoader, random_of_data, seed_of_layers
from pipeflow.adapters.ranks import numbers_of_all, shared_outputs
from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.microbatch import Divided
from pipeflow.engine.runtime.pipeline import Pipeline, execute_pipeline
from pipeflow.training.checkpoint.load import load_checkpoint
from pipeflow.training.checkpoint.save import save_checkpoint
from pipeflow.training.optim.clip import grad_norm as norm_of

transformers: Any = transformers_library()  # its types differ between versions
STATE = "pipeflow"
"""The folder in a checkpoint that `pipeflow.load_checkpoint` reads."""


class Trainer(transformers.Trainer):  # type: ignore[misc]  # as above
    """transformers' Trainer for a Pipeline, with its arguments, callbacks, logs, learning rates, metrics and
    checkpoints. Every rank makes one with the same arguments, and makes the same calls.

    Losses and gradients are means over all accumulated batches of all replicas, weighted by what the module's loss
    counts, such as tokens. Logits and metrics are the same on every rank. Rank 0 logs. All ranks write a checkpoint
    together, to a folder on storage that they share; besides transformers' files it has a folder that
    `pipeflow.load_checkpoint` reads.

    Args:
        model: a Pipeline made by `from_module`, `from_pretrained` or `from_config`.
        args: transformers' TrainingArguments. Here a device is a replica: `per_device_train_batch_size` is the number
            of samples in a batch of one pipeline, which its schedule splits into microbatches.
        arguments, options: further arguments of transformers' Trainer.

    Raises UsageError that names the argument if it is not possible with a pipeline.
    """

    model: Pipeline
    data_collator: Any
    preprocess_logits_for_metrics: Any
    _signature_columns: list[str] | None
    _loss: OwnLoss | None = None
    _reference: Reference | None = None

    def __init__(self, model: Pipeline, *arguments: Any, **options: Any) -> None:
        model = require_pipeline(model)
        takes = inspect.signature(super().__init__)
        bound = takes.bind(model, *arguments, **options)
        given = bound.arguments
        args = given["args"] = given.get("args") or transformers.TrainingArguments("tmp_trainer")
        require_possible(args, model, given)
        if "ref_model" in takes.parameters:
            require_reference(given, model)
        self._root = model.chunks[0].root
        show_attributes(model)
        self._drawing = random_of_data(args.seed)
        super().__init__(*bound.args, **bound.kwargs)
        self._loss = OwnLoss(self, model) if computes_own(self, transformers.Trainer) else None
        self._introspect(args)
        self._reference = Reference(self) if "ref_model" in takes.parameters else None
        self._preprocess, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        transformers.set_seed(args.seed)
        torch.manual_seed(seed_of_layers(args.seed, model.context))

    def _introspect(self, args: Any) -> None:
        """Sets the attributes that transformers reads from a model, from the module that was cut."""
        base = self._base
        takes = inspect.signature(base.forward).parameters.values()
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes)
        self.model_accepts_loss_kwargs = getattr(base, "accepts_loss_kwargs", takes_any)
        self.label_names = transformers.utils.find_labels(type(base)) if args.label_names is None else args.label_names
        self.can_return_loss = transformers.utils.can_return_loss(type(base))
        self._loss_shifts_labels = _shifts_labels(base)

    @property
    def _base(self) -> Any:
        """The module that was cut, without adapters; it has only the parameters of this rank's stages."""
        inner: Any = getattr(self._root, "get_base_model", None)
        return self._root if inner is None else inner()

    def _set_signature_columns_if_needed(self) -> None:
        own = transformers.Trainer._set_signature_columns_if_needed
        if super()._set_signature_columns_if_needed.__func__ is not own:
            super()._set_signature_columns_if_needed()
        elif self._signature_columns is None:
            names = list(inspect.signature(self._base.forward).parameters)
            self._signature_columns = [*names, "label", "label_ids", *self.label_names]

    def create_accelerator_and_postprocess(self) -> None:
        """Makes pipeflow's accelerator, which divides data among replicas, instead of accelerate's."""
        place_arguments(self.args, self.model.context)
        config, seed = self.args.accelerator_config, self.args.data_seed
        seed = self.args.seed if seed is None else seed
        state = self.args.distributed_state
        self.accelerator = PipelineAccelerator(self.model, state, seed, config)
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = self.is_fsdp_enabled = self.is_tp_enabled = False

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Does nothing: a Pipeline is on its device already."""

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Returns the names, in the whole module, of this rank's parameters that get weight decay."""
        decay = super().get_decay_parameter_names
        return [name for chunk in self.model.chunks for name in decay(chunk.root)]

    def _get_learning_rate(self) -> float:
        """Returns the rate of rank 0's first group, which is logged; other ranks may have other groups."""
        return numbers_of_all(self.model.context, super()._get_learning_rate())[0]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return norm_of(self.model).float() if grad_norm is None else grad_norm

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *others: Any) -> Any:
        """Like transformers', with random states that all ranks of a replica share, and the items of all replicas."""
        with self._drawing():
            batches, _ = super().get_batch_samples(epoch_iterator, num_batches, *others)
        return batches, self._items_of(batches) if len(batches) > 1 else None

    def _get_num_items_in_batch(self, *_: object) -> None:
        """Counts nothing: `_items_of` does it where it is needed."""

    def _items_of(self, batches: list[Any]) -> float | None:
        """The number of items that the loss counts in these batches of all replicas; None if the loss does not count.
        It is computed on the host, so that no step waits for a GPU.
        """
        parts = [part for batch in batches for part in (batch if isinstance(batch, Divided) else [batch])]
        items = super()._get_num_items_in_batch(parts, torch.device("cpu"))
        if items is None:
            return None
        everyones = numbers_of_all(self.model.context, items)
        return sum(everyones[rank] for rank in self.model.context.readers)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Returns them as they are: each stage copies what it takes to its device, which nothing waits for. What a
        reference model gives is added.
        """
        if not inputs:
            return super()._prepare_inputs(inputs)  # which says what may be wrong with the dataset
        return inputs if self._reference is None else self._reference.added(inputs)

    def _get_dataloader(self, *arguments: Any, is_training: bool = False, **options: Any) -> Any:
        """Like transformers', but evaluations read whole batches, also if the collator divides those of training."""
        collator: Any = self.data_collator
        if not is_training:
            self.data_collator = getattr(collator, "undivided", collator)
        if self._loss is not None and self.data_collator is collator:
            self.data_collator = Chunks(collator, self.model)
        try:
            return super()._get_dataloader(*arguments, is_training=is_training, **options)
        finally:
            self.data_collator = collator

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs one batch through the pipeline. Returns its share of the mean loss of the accumulated batches."""
        self.model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        part = self._part_of(inputs, num_items_in_batch)
        inputs = self._prepare_inputs(inputs)
        if self._loss is None:
            return self._trained(inputs, part)
        items = self._items_of([inputs]) if num_items_in_batch is None else num_items_in_batch
        batch = self._loss.batch(inputs, items, outputs=False)
        with self._loss.computing(batch):
            is_sum = self._loss.divides or (self._loss.adds and num_items_in_batch is not None)
            return self._trained(batch, 1.0 if is_sum else part)

    def _trained(self, inputs: Any, part: float) -> Tensor:
        output = execute_pipeline(
            iter([inputs]),
            self.model,
            broadcast_loss=True,
            reduce=self.accelerator.sync_gradients,
            gradient_scale=part,
        )
        assert output.loss is not None
        return output.loss * part

    def _part_of(self, inputs: Any, num_items_in_batch: Any) -> float:
        """The batch's share of the accumulated batches of all replicas, as a fraction."""
        batches = int(self.current_gradient_accumulation_steps)
        if batches == 1 or num_items_in_batch is None:
            return 1 / batches
        items = self._items_of([inputs])
        assert items is not None
        return items / float(num_items_in_batch)

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Like transformers', with what the last stage counted while it computed the trainer's own loss."""
        if self._loss is not None:
            share_metrics(self, self.model.context)
        super().log(logs, *arguments, **options)

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **options: Any) -> Any:
        """Like transformers', with the same batches on all ranks of a replica."""
        with self.accelerator.reading(dataloader):
            return super().evaluation_loop(RandomLoader(dataloader, self._drawing), *arguments, **options)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluates a batch. Returns loss, logits and labels, the same on every rank of the pipeline."""
        loss, *others = self._predicted(self._prepare_inputs(inputs), prediction_loss_only, ignore_keys)
        return (None if loss is None else _weighing(loss, samples_of(inputs)), *others)

    def _predicted(
        self, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[Tensor | None, Any, Any]:
        if self._loss is not None:
            return self._judged(inputs, prediction_loss_only, ignore_keys)
        if getattr(self.args, "predict_with_generate", False) and not prediction_loss_only:
            loss, texts, targets = super().prediction_step(self._loss_alone, inputs, prediction_loss_only, ignore_keys)
            return loss, texts, targets
        labels = tuple(inputs.get(name) for name in self.label_names)
        has_labels = bool(labels) and all(each is not None for each in labels)
        makes_loss = has_labels or (not labels and bool(inputs.get("return_loss", self.can_return_loss)))
        is_named, returns = "labels" in inputs, not prediction_loss_only
        told = evaluate(inputs, self.model, is_named=is_named, makes_loss=makes_loss, return_outputs=returns)
        loss = told.loss if makes_loss else None
        if prediction_loss_only:
            return loss, None, None
        with self.model.alarm.raised_everywhere():
            logits = self._shared(whole_outputs(told.outputs, inputs, self.model), labels, ignore_keys)
        prepared = self._prepare_input(labels) if has_labels else None
        return loss, logits, prepared[0] if prepared is not None and len(prepared) == 1 else prepared

    def _loss_alone(self, **inputs: Any) -> dict[str, Any]:
        """What a trainer that generates text calls in place of the model, for the loss of its labels."""
        told = execute_pipeline(iter([inputs]), self.model, forward_only=True, broadcast_loss=True)
        return {"loss": told.loss}

    def _judged(self, inputs: Any, loss_only: bool, ignore_keys: list[str] | None) -> tuple[Tensor | None, Any, Any]:
        """Loss, logits and labels of a batch, where the trainer computes the loss."""
        assert self._loss is not None
        batch = self._loss.batch(inputs, self._items_of([inputs]), outputs=not loss_only)
        with self._loss.computing(batch):
            told = execute_pipeline(
                iter([batch]), self.model, forward_only=True, return_outputs=not loss_only, broadcast_loss=True
            )
        if loss_only:
            return told.loss, None, None
        labels = () if isinstance(inputs, Divided) else tuple(inputs.get(name) for name in self.label_names)
        labels = tuple(each for each in labels if each is not None)
        with self.model.alarm.raised_everywhere():
            outputs = None if told.outputs is None else told.outputs[1]  # type: ignore[index]  # compute_loss returns a pair
            outputs = outputs[1:] if isinstance(outputs, tuple | list) else outputs  # a tuple starts with the loss
            logits = self._shared(outputs, (), ignore_keys)
        return told.loss, logits, labels[0] if len(labels) == 1 else labels or None

    def _shared(self, outputs: Any, labels: Any, ignore_keys: list[str] | None) -> Any:
        """Sends the last stage's logits to all ranks of the pipeline."""
        if outputs is None:
            return shared_outputs(None, self.model.context)[0]
        ignored = ["loss", *(self._ignored if ignore_keys is None else ignore_keys)]
        logits = outputs
        if isinstance(outputs, Mapping):
            logits = tuple(value for key, value in outputs.items() if key not in ignored)
        elif isinstance(outputs, tuple | list) and labels:
            logits = tuple(outputs[1:])
        logits = logits[0] if isinstance(logits, tuple) and len(logits) == 1 else logits
        if self._preprocess is not None:
            prepared = self._prepare_input(labels)
            logits = self._preprocess(logits, prepared[0] if len(prepared) == 1 else prepared)
        return shared_outputs((logits,), self.model.context)[0]

    @property
    def _ignored(self) -> list[str]:
        return getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"])

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model to a folder that transformers reads. All ranks call it together."""
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        save_pretrained(self.model, folder)
        if not self.args.should_save:
            return
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(
            Path(output_dir, STATE),
            self.model,
            self.optimizer,
            scheduler=self.lr_scheduler,
            step=self.state.global_step,
        )

    def _save_rng_state(self, output_dir: str) -> None:
        """Does nothing: `_save_optimizer_and_scheduler` also saves the random states."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_checkpoint(self._state_in(resume_from_checkpoint), self.model)

    def _state_in(self, checkpoint: str) -> Path:
        path = Path(checkpoint, STATE)
        if not path.exists():
            made = "make the Pipeline with pipeflow.huggingface.from_pretrained(folder)"
            raise UsageError(
                f"{checkpoint} has no folder {STATE!r}, perhaps because of save_only_model=True: "
                f"{LOADED if has_adapters(Path(checkpoint)) else made}, and train without resume_from_checkpoint"
            )
        return path

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            loaded = load_checkpoint(self._state_in(checkpoint), self.model, self.optimizer, self.lr_scheduler)
            self._drawing = random_of_data(self.args.seed + loaded.step)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Does nothing: `_load_optimizer_and_scheduler` also loads the random states."""

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def _shifts_labels(module: Any) -> bool:
    """True if a module's loss does not count the first label of each sequence, by transformers' own table."""
    losses = transformers.loss.loss_utils
    is_shifted = losses.LOSS_MAPPING.get(getattr(module, "loss_type", None)) is losses.ForCausalLMLoss
    return is_shifted and not getattr(module.config, "is_encoder_decoder", False)


def _weighing(loss: Tensor, samples: int) -> Tensor:
    """The loss of a batch of so many samples. transformers' loop repeats a loss as often as a whole batch has samples;
    this one repeats itself as often as its own batch has, so that the mean over all is that over samples.
    """
    weighing = loss.detach().clone()
    weighing.repeat = lambda *_: loss.repeat(samples)  # type: ignore[method-assign]  # of this tensor alone
    return weighing


@cache
def pipelined(kind: Any) -> Any:
    """A subclass of a trainer class that trains a Pipeline, such as `pipelined(trl.SFTTrainer)`.

    `pipeflow.huggingface.Trainer` is `pipelined(transformers.Trainer)`; its documentation says what differs from a
    trainer in one process. If the class computes its loss itself, each stage runs its `compute_loss` up to the stage's
    last block, and the last stage computes the loss. `compute_loss` must call its model once.

    Args:
        kind: transformers' Trainer or a subclass, such as Seq2SeqTrainer, TRL's SFTTrainer or one of your own.

    Raises UsageError for another class.
    """
    if not (isinstance(kind, type) and issubclass(kind, transformers.Trainer)):
        raise UsageError(f"pipelined takes a subclass of transformers.Trainer, got {kind!r}")
    if issubclass(kind, Trainer):
        return kind
    return Trainer if kind is transformers.Trainer else type(kind.__name__, (Trainer, kind), {"__doc__": kind.__doc__})
