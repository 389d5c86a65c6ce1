"""Trainer: transformers' Trainer for a Pipeline. Loop, arguments, callbacks, learning-rate schedules and metrics are
transformers'; steps, division of the data, clipping and evaluation are the pipeline's. Must not contain: checkpoints.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.huggingface.lazy_import import library
from pipeflow.huggingface.training.accelerator import PipelineAccelerator
from pipeflow.huggingface.training.checkpoints import Checkpoints
from pipeflow.huggingface.training.metrics import share_metrics
from pipeflow.huggingface.training.own_loss import Chunks, OwnLoss, computes_own
from pipeflow.huggingface.training.places import place_arguments, shifts_labels, show_attributes
from pipeflow.huggingface.training.random_states import DataRandom, Reading, seed_layers
from pipeflow.huggingface.training.reference import Reference, require_reference
from pipeflow.huggingface.training.refusals import require_pipeline, require_possible
from pipeflow.optim.clip import grad_norm as norm_of
from pipeflow.parallel.transport.agreement import all_gather
from pipeflow.parallel.trees import shared_outputs
from pipeflow.runtime.divided import Divided
from pipeflow.runtime.execution import execute_pipeline
from pipeflow.runtime.pipeline import Pipeline

transformers: Any = library()  # its types differ between versions


class Trainer(Checkpoints):
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
            require_reference(given)
        context = model.context
        self._root = model.chunks[0].root
        show_attributes(model)
        self._drawing = DataRandom(args.seed)
        super().__init__(*bound.args, **bound.kwargs)
        self._loss = OwnLoss(self, model) if computes_own(self, transformers.Trainer) else None
        self._introspect(args)
        self._reference = Reference(self) if "ref_model" in takes.parameters else None
        self._preprocess, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        transformers.set_seed(args.seed)
        seed_layers(args.seed, context)

    def _introspect(self, args: Any) -> None:
        """Sets the attributes that transformers reads from a model, from the module that was cut."""
        base = self._base
        takes = inspect.signature(base.forward).parameters.values()
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes)
        self.model_accepts_loss_kwargs = getattr(base, "accepts_loss_kwargs", takes_any)
        self.label_names = transformers.utils.find_labels(type(base)) if args.label_names is None else args.label_names
        self.can_return_loss = transformers.utils.can_return_loss(type(base))
        skipped = getattr(self.model.runner.weigh, "skipped", 0) == 1
        self._loss_shifts_labels = shifts_labels(base) if self._loss is not None else skipped

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
        self.accelerator = PipelineAccelerator(self.model, state, seed, split_batches=bool(config.split_batches))
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = self.is_fsdp_enabled = self.is_tp_enabled = False

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Does nothing: a Pipeline is on its device already."""

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Returns the names, in the whole module, of this rank's parameters that get weight decay."""
        decay = super().get_decay_parameter_names
        return [name for chunk in self.model.chunks for name in decay(chunk.root)]

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
        context = self.model.context
        with context.alarm.raised_everywhere():
            everyones = all_gather(context.world, [float(items)])
        return sum(of_replica for [of_replica] in everyones[:: len(everyones) // context.data_size])

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
        schedule = self.model.schedule
        if not isinstance(inputs, Divided) and 0 < (samples := _samples(inputs)) < schedule.num_microbatches:
            schedule = schedule.first(samples)
        output = execute_pipeline(
            iter([inputs]),
            self.model,
            broadcast_loss=True,
            reduce=self.accelerator.sync_gradients,
            schedule=schedule,
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
            return super().evaluation_loop(Reading(dataloader, self._drawing), *arguments, **options)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluates a batch. Returns loss, logits and labels, the same on every rank of the pipeline."""
        inputs = self._prepare_inputs(inputs)
        if self._loss is not None:
            return self._judged(inputs, prediction_loss_only, ignore_keys)
        if getattr(self.args, "predict_with_generate", False) and not prediction_loss_only:
            loss, texts, targets = super().prediction_step(self._loss_alone, inputs, prediction_loss_only, ignore_keys)
            return loss, texts, targets
        labels = tuple(inputs.get(name) for name in self.label_names)
        has_labels = bool(labels) and all(each is not None for each in labels)
        makes_loss = has_labels or (not labels and bool(inputs.get("return_loss", self.can_return_loss)))
        own_loss = makes_loss and "labels" not in inputs
        told = execute_pipeline(
            iter([inputs]),
            self.model,
            forward_only=True,
            return_outputs=own_loss or not prediction_loss_only,
            broadcast_loss=makes_loss and not own_loss,
        )
        loss = told.loss if makes_loss else None
        logits: Any = None
        if own_loss or not prediction_loss_only:
            with self.model.alarm.raised_everywhere():
                logits, mean = self._shared(told.outputs, labels, ignore_keys, _samples(inputs))
            loss = mean if own_loss else loss
        if prediction_loss_only:
            return loss, None, None
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
            logits, _ = self._shared(outputs, (), ignore_keys, 0)
        return told.loss, logits, labels[0] if len(labels) == 1 else labels or None

    def _shared(self, outputs: Any, labels: Any, ignore_keys: list[str] | None, samples: int) -> Any:
        """Sends the last stage's logits and the module's own mean loss to all ranks of the pipeline."""
        if outputs is None:
            return shared_outputs(None, self.model.context)
        ignored = ["loss", *(self._ignored if ignore_keys is None else ignore_keys)]
        mean = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if mean is not None:
            sizes = [len(part) for part in torch.arange(samples).tensor_split(len(mean))]
            adds = getattr(self.model.runner.weigh, "adds", False)
            mean = mean.sum() if adds else (mean * mean.new_tensor(sizes)).sum() / samples
        logits = outputs
        if isinstance(outputs, Mapping):
            logits = tuple(value for key, value in outputs.items() if key not in ignored)
        elif isinstance(outputs, tuple | list) and labels:
            logits = tuple(outputs[1:])
        logits = logits[0] if isinstance(logits, tuple) and len(logits) == 1 else logits
        if self._preprocess is not None:
            prepared = self._prepare_input(labels)
            logits = self._preprocess(logits, prepared[0] if len(prepared) == 1 else prepared)
        return shared_outputs((logits, mean), self.model.context)

    @property
    def _ignored(self) -> list[str]:
        return getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"])


def _samples(inputs: Mapping[str, Any]) -> int:
    """Number of samples in a batch."""
    return next((len(each) for each in inputs.values() if isinstance(each, Tensor) and each.dim()), 0)


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
