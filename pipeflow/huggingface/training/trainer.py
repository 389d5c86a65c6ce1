"""Trainer: transformers' Trainer for a Pipeline. Loop, arguments, callbacks, learning-rate schedules and metrics are
transformers'; steps, division of the data, clipping, evaluation and checkpoints are the pipeline's.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeflow.checkpoint.load import load_checkpoint
from pipeflow.checkpoint.save import save_checkpoint
from pipeflow.core.errors import UsageError
from pipeflow.huggingface.lazy_import import library
from pipeflow.huggingface.model.adapters import LOADED, has_adapters
from pipeflow.huggingface.model.saving import save_pretrained
from pipeflow.huggingface.training.accelerator import PipelineAccelerator, World
from pipeflow.huggingface.training.random_states import DataRandom, Reading, seed_layers
from pipeflow.huggingface.training.refusals import require_pipeline, require_possible
from pipeflow.huggingface.training.replicas import shared_outputs
from pipeflow.optim.clip import grad_norm as norm_of
from pipeflow.parallel.transport.agreement import all_gather
from pipeflow.runtime.divided import Divided
from pipeflow.runtime.execution import execute_pipeline
from pipeflow.runtime.pipeline import Pipeline

transformers: Any = library()  # its types differ between versions
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

    def __init__(self, model: Pipeline, args: Any = None, *arguments: Any, **options: Any) -> None:
        model = require_pipeline(model)
        args = transformers.TrainingArguments("tmp_trainer") if args is None else args
        given = inspect.signature(transformers.Trainer.__init__).bind(self, model, args, *arguments, **options)
        require_possible(args, model, given.arguments)
        if type(self).compute_loss is not Trainer.compute_loss:
            raise UsageError(f"a pipeline does not call {type(self).__name__}.compute_loss: {_COMPUTES}")
        context = model.context
        local = int(os.environ.get("LOCAL_RANK", context.rank))
        world = World(context.data_size, context.rank, local, context.device)
        args.distributed_state, args._n_gpu = world, int(context.device.type == "cuda")
        vars(args)["_setup_devices"] = context.device
        args.average_tokens_across_devices = False  # `_items_of` adds them up
        self._root = model.chunks[0].root
        for name in ("config", "generation_config", "main_input_name"):
            if not hasattr(model, name) and hasattr(self._root, name):
                setattr(model, name, getattr(self._root, name))
        self._drawing = DataRandom(args.seed)
        super().__init__(model, args, *arguments, **options)
        self._introspect(args)
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
        weigh = self.model.runner.weigh
        self._loss_shifts_labels = getattr(weigh, "skipped", 0) == 1

    @property
    def _base(self) -> Any:
        """The module that was cut, without adapters; it has only the parameters of this rank's stages."""
        inner: Any = getattr(self._root, "get_base_model", None)
        return self._root if inner is None else inner()

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            names = list(inspect.signature(self._base.forward).parameters)
            self._signature_columns = [*names, "label", "label_ids", *self.label_names]

    def create_accelerator_and_postprocess(self) -> None:
        """Makes pipeflow's accelerator, which divides data among replicas, instead of accelerate's."""
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
        """Returns them as they are: each stage copies what it takes to its device, which nothing waits for."""
        return inputs or super()._prepare_inputs(inputs)  # which says what may be wrong with the dataset

    def _get_dataloader(self, *arguments: Any, is_training: bool = False, **options: Any) -> Any:
        """Like transformers', but evaluations read whole batches, also if the collator divides those of training."""
        collator: Any = self.data_collator
        if not is_training:
            self.data_collator = getattr(collator, "undivided", collator)
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

    def compute_loss(self, *_: Any, **__: Any) -> Any:
        """Raises UsageError, since a rank has only a part of the model."""
        raise UsageError(f"a pipeline does not call compute_loss: {_COMPUTES}")

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **options: Any) -> Any:
        """Like transformers', with the same batches on all ranks of a replica."""
        with self.accelerator.reading(dataloader):
            return super().evaluation_loop(Reading(dataloader, self._drawing), *arguments, **options)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluates a batch. Returns loss, logits and labels, the same on every rank of the pipeline."""
        labels = tuple(inputs.get(name) for name in self.label_names)
        inputs = self._prepare_inputs(inputs)
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
            self._drawing = DataRandom(self.args.seed + loaded.step)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Does nothing: `_load_optimizer_and_scheduler` also loads the random states."""

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


_COMPUTES = "give the Pipeline a criterion, as with from_module(criterion=), or let the module compute its loss"


def _samples(inputs: Mapping[str, Any]) -> int:
    """Number of samples in a batch."""
    return next((len(each) for each in inputs.values() if isinstance(each, Tensor) and each.dim()), 0)
