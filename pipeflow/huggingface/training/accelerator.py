"""PipelineAccelerator: the object that transformers' Trainer uses instead of accelerate's. accelerate would wrap the
model in DistributedDataParallel and give each process other data. PipelineAccelerator gives each replica its part of
the data and leaves the model and its gradients to the Pipeline. Must not contain: the training loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import DistributedType
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import BatchSampler, DataLoader

from pipeflow.huggingface.training.sampler import ReplicaBatchSampler
from pipeflow.optim.clip import clip_grad_norm_
from pipeflow.parallel.context import Context
from pipeflow.parallel.transport.agreement import all_gather
from pipeflow.parallel.trees import gathered, padded
from pipeflow.runtime.pipeline import Pipeline


@dataclass
class World:
    """This rank's place, with the attributes that TrainingArguments needs. transformers' processes are replicas here;
    only rank 0 of the world writes and logs.

    Attributes:
        num_processes: number of replicas.
        process_index: rank in the world.
        local_process_index: rank on this machine.
        device: this rank's device.
    """

    num_processes: int
    process_index: int
    local_process_index: int
    device: torch.device
    distributed_type: DistributedType = DistributedType.NO

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0


class _Gradients:
    """Flags: whether the next step ends an accumulation, and whether a loader is at its last batch."""

    def __init__(self) -> None:
        self.sync_gradients = True
        self.plugin_kwargs: dict[str, Any] = {}
        self.loader: Any = None

    def _set_sync_gradients(self, sync: bool) -> None:
        self.sync_gradients = sync

    @property
    def end_of_dataloader(self) -> bool:
        return bool(self.loader is not None and self.loader.end_of_dataloader)


class PipelineAccelerator:
    """Replaces accelerate's Accelerator, with the methods that the Trainer uses.

    Args:
        model: the Pipeline to train.
        world: this rank's place.
        seed: seed of the order of the samples.
        split_batches: True if a loader's batch is the batch of all replicas together.
    """

    distributed_type = DistributedType.NO
    mixed_precision = "no"
    scaler = None
    parallelism_config = None
    optimizer_step_was_skipped = False
    should_save_model = True

    def __init__(self, model: Pipeline, world: World, seed: int, *, split_batches: bool) -> None:
        self._model = model
        self._models = [model]
        self._seed = seed
        self._split = split_batches
        self.world = world
        self.device = world.device
        self.num_processes = world.num_processes
        self.process_index = world.process_index
        self.local_process_index = world.local_process_index
        self.is_main_process, self.is_local_main_process = world.is_main_process, world.is_local_main_process
        self.gradient_state = _Gradients()
        self._is_alone = False
        self.state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None, torch_tp_plugin=None)

    @property
    def _context(self) -> Context:
        return self._model.context

    @property
    def sync_gradients(self) -> bool:
        return self.gradient_state.sync_gradients

    def prepare(self, *given: Any) -> Any:
        """Returns its arguments; loaders are divided, so that they read this replica's part of the data."""
        made = tuple(self._divided(each) if isinstance(each, DataLoader) else each for each in given)
        return made[0] if len(made) == 1 else made

    def prepare_model(self, model: Any, **_: object) -> Any:
        """Returns the model: a Pipeline needs no preparation."""
        return model

    def unwrap_model(self, model: Any, **_: object) -> Any:
        """Returns the model: nothing wraps it."""
        return model

    def _divided(self, loader: DataLoader[Any]) -> Any:
        index = self._context.data_rank
        if isinstance(loader.worker_init_fn, partial) and "rank" in loader.worker_init_fn.keywords:
            loader.worker_init_fn = partial(loader.worker_init_fn, rank=index)
        dividing = self.num_processes > 1
        if dividing and isinstance(loader.batch_sampler, BatchSampler):
            whole = loader.batch_sampler
            samples = whole.batch_size if self._split else whole.batch_size * self.num_processes
            part = ReplicaBatchSampler(whole.sampler, samples, whole.drop_last, self.num_processes, index)
            vars(loader)["batch_sampler"], dividing = part, False  # a loader does not let it be assigned
        return prepare_data_loader(
            loader,
            num_processes=self.num_processes if dividing else 1,
            process_index=index if dividing else 0,
            split_batches=self._split,
            put_on_device=False,
            rng_types=None,
            dispatch_batches=False,
            even_batches=True,
            use_seedable_sampler=True,
            data_seed=self._seed,
        )

    def no_sync(self, *_: object, **__: object) -> Any:
        """Does nothing: the Trainer tells each step whether it reduces gradients."""
        return nullcontext()

    def clip_grad_norm_(self, _: object, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the whole model's gradient, whatever parameters are passed. Returns the norm before clipping."""
        return clip_grad_norm_(self._model, max_norm, norm_type).float()

    def gather(self, tree: Any) -> Any:
        """Concatenates the tensors of all replicas along dim 0; within `alone`, scalars become tensors of one entry."""
        if self._is_alone:
            return tree_map_only(Tensor, lambda tensor: tensor if tensor.dim() else tensor[None], tree)
        return gathered(tree, self._context)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the `with` block, nothing is gathered: a loss that a stage computes is that of one microbatch."""
        before, self._is_alone = self._is_alone, True
        try:
            yield
        finally:
            self._is_alone = before

    def autocast(self, *_: object, **__: object) -> Any:
        """Does nothing: the Pipeline says in which dtype its stages run."""
        return nullcontext()

    def gather_for_metrics(self, tree: Any, *_: object, **__: object) -> Any:
        """Like `gather`, without the samples that fill up the last batch."""
        whole, loader = self.gather(tree), self.gradient_state.loader
        if self._is_alone or loader is None or not loader.end_of_dataloader or loader.remainder <= 0:
            return whole
        return tree_map_only(Tensor, lambda tensor: tensor[: loader.remainder], whole)

    def pad_across_processes(self, tree: Any, dim: int = 0, pad_index: int = 0, **_: object) -> Any:
        """Pads tensors to the length of the longest among all replicas."""
        return padded(tree, self._context, dim, pad_index)

    def wait_for_everyone(self) -> None:
        """Waits until all ranks have called it."""
        with self._context.alarm.raised_everywhere():
            all_gather(self._context.world, [0.0])

    @contextmanager
    def reading(self, loader: Any) -> Iterator[None]:
        """Inside the `with` block, `gather_for_metrics` applies to batches of `loader`."""
        before, self.gradient_state.loader = self.gradient_state.loader, loader
        try:
            yield
        finally:
            self.gradient_state.loader = before

    def free_memory(self, *given: Any) -> Any:
        """Does nothing: it holds no memory."""
        return given

    def print(self, *values: object, **options: Any) -> None:
        """Prints on rank 0 of each machine."""
        if self.is_local_main_process:
            print(*values, **options)  # noqa: T201  # what it is for

    def end_training(self) -> None:
        """Does nothing: `context.close()` closes the channels."""
