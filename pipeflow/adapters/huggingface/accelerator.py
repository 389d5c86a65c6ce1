"""PipelineAccelerator: the object that transformers' Trainer uses instead of accelerate's. accelerate would wrap the
model in DistributedDataParallel and give each process other data. PipelineAccelerator gives each replica its part of
the data and leaves the model and its gradients to the Pipeline. Must not contain: the training loop.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

from accelerate import DistributedType
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from pipeflow.adapters.batches import ReplicaBatchSampler, ReplicaDataset
from pipeflow.adapters.libraries import instead
from pipeflow.adapters.ranks import Operations
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.torch_private.trees import tree_map_only


def place_arguments(args: Any, context: Context) -> None:
    """Tells TrainingArguments this rank's place. transformers' processes are replicas here; only rank 0 of the world
    writes and logs.
    """
    local = int(os.environ.get("LOCAL_RANK", context.rank))
    args.distributed_state = SimpleNamespace(
        num_processes=context.data_size,
        process_index=context.rank,
        local_process_index=local,
        is_main_process=context.rank == 0,
        is_local_main_process=local == 0,
        device=context.device,
        distributed_type=DistributedType.NO,
    )
    args._n_gpu = int(context.device.type == "cuda")
    vars(args)["_setup_devices"] = context.device
    args.average_tokens_across_devices = False  # the Trainer adds up the items of all replicas


class PipelineAccelerator(Operations):
    """Replaces accelerate's Accelerator, with the methods that the Trainer uses. It derives from none: accelerate's has
    its state in the process, but ranks may be threads.

    Args:
        model: the Pipeline to train.
        place: this rank's place, as `place_arguments` tells it; its attributes are also this object's.
        seed: seed of the order of the samples.
        config: transformers' AcceleratorConfig. If it has `split_batches`, a loader's batch is the batch of all
            replicas together.

    Attributes:
        split_batches, dispatch_batches, even_batches, use_seedable_sampler: as in `config`.
    """

    num_processes: int
    is_local_main_process: bool
    sync_gradients = True
    mixed_precision = "no"
    scaler = None
    parallelism_config = None
    optimizer_step_was_skipped = False
    should_save_model = True

    def __init__(self, model: Pipeline, place: Any, seed: int, config: Any) -> None:
        self._model = model
        self._context = model.context
        self._models = [model]
        self._seed = seed
        self.split_batches = bool(config.split_batches)
        self.dispatch_batches = config.dispatch_batches
        self.even_batches = bool(config.even_batches)
        self.use_seedable_sampler = bool(config.use_seedable_sampler)
        vars(self).update(vars(place))
        self.plugin_kwargs: dict[str, Any] = {}
        self._loader: Any = None
        self._is_alone = False
        self.state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None, torch_tp_plugin=None)

    @property
    def _pipeline(self) -> Pipeline:
        return self._model

    @property
    def gradient_state(self) -> PipelineAccelerator:
        """Tells whether the next step ends an accumulation, and whether a loader is at its last batch."""
        return self

    def _set_sync_gradients(self, sync: bool) -> None:
        self.sync_gradients = sync

    @property
    def end_of_dataloader(self) -> bool:
        return bool(self._loader is not None and self._loader.end_of_dataloader)

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
        if dividing and isinstance(loader.dataset, IterableDataset):
            size = loader.batch_size
            samples = self.num_processes if size is None else self._samples(size)  # the dataset may make the batches
            stream = ReplicaDataset(
                loader.dataset, samples, loader.drop_last, self.num_processes, index, workers=loader.num_workers
            )
            vars(loader).update(dataset=stream, batch_size=None if size is None else stream.part)  # cannot be assigned
            dividing = False
        elif dividing and isinstance(loader.batch_sampler, BatchSampler):
            whole = loader.batch_sampler
            samples = self._samples(whole.batch_size)
            part = ReplicaBatchSampler(whole.sampler, samples, whole.drop_last, self.num_processes, index)
            vars(loader)["batch_sampler"], dividing = part, False  # a loader does not let it be assigned
        return prepare_data_loader(
            loader,
            num_processes=self.num_processes if dividing else 1,
            process_index=index if dividing else 0,
            split_batches=self.split_batches,
            put_on_device=False,
            rng_types=None,
            dispatch_batches=False,
            even_batches=True,
            use_seedable_sampler=True,
            data_seed=self._seed,
        )

    def _samples(self, size: int) -> int:
        """The number of samples in a batch of all replicas, of a loader with batches of `size`."""
        if not self.split_batches:
            return size * self.num_processes
        if size < self.num_processes:
            raise UsageError(
                f"a batch of {size} samples has none for some of the {self.num_processes} replicas: use larger "
                "batches, or accelerator_config split_batches=False"
            )
        return size

    def no_sync(self, *_: object, **__: object) -> Any:
        """Does nothing: the Trainer tells each step whether it reduces gradients."""
        return nullcontext()

    def gather(self, tensor: Any) -> Any:
        """Concatenates the tensors of all replicas along dim 0; within `alone`, scalars become tensors of one entry."""
        if self._is_alone:
            return tree_map_only(Tensor, lambda each: each if each.dim() else each[None], tensor)
        return super().gather(tensor)

    def alone(self) -> AbstractContextManager[None]:
        """Inside the `with` block, nothing is gathered: a loss that a stage computes is that of one microbatch."""
        return instead(vars(self), _is_alone=True)

    def autocast(self, *_: object, **__: object) -> Any:
        """Does nothing: the Pipeline says in which dtype its stages run."""
        return nullcontext()

    def gather_for_metrics(self, tree: Any, *_: object, **__: object) -> Any:
        """Like `gather`, without the samples that fill up the last batch."""
        whole = self.gather(tree)
        if self._is_alone or not self.end_of_dataloader:
            return whole
        filled, replicas = _filled(self._loader), self.num_processes
        return tree_map_only(Tensor, lambda tensor: tensor[: len(tensor) * (replicas - filled) // replicas], whole)

    def reading(self, loader: Any) -> AbstractContextManager[None]:
        """Inside the `with` block, `gather_for_metrics` applies to batches of `loader`."""
        return instead(vars(self), _loader=loader)

    def free_memory(self, *given: Any) -> Any:
        """Does nothing: it holds no memory."""
        return given

    def print(self, *values: object, **options: Any) -> None:
        """Prints on rank 0 of each machine."""
        if self.is_local_main_process:
            print(*values, **options)  # noqa: T201  # what it is for

    def end_training(self) -> None:
        """Does nothing: `context.close()` closes the channels."""


def _filled(loader: Any) -> int:
    """The number of samples that fill up the last batch, which then has one for each replica. Raises UsageError if it
    is not known which batch of an IterableDataset they are in.
    """
    if isinstance(loader.batch_sampler, ReplicaBatchSampler):
        return loader.batch_sampler.filled
    filled = int(loader.dataset.filled.sum()) if isinstance(loader.dataset, ReplicaDataset) else 0
    if filled and (loader.num_workers > 1 or loader.batch_size is None):
        raise UsageError(
            "a batch of the IterableDataset has fewer samples than there are replicas, so some count twice: evaluate "
            "with dataloader_num_workers=0, and let the loader make the batches"
        )
    return filled
