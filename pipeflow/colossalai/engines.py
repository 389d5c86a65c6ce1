"""ColossalAI's `colossalai.engine` and `colossalai.initialize`: an Engine and its schedules, made with loaders from the
configuration, and the loaders and learning-rate schedulers of a step that takes several batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from inspect import signature
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

import pipeflow.training as native
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.step import Output
from pipeflow.schedules import make_schedule
from pipeflow.training.config import Config
from pipeflow.training.data import DataParallelLoader, MixupLoss, mixed
from pipeflow.training.launch import current_config, make_engine
from pipeflow.training.logging import get_dist_logger
from pipeflow.training.optim.rates import Scheduler


class WholeSteps:
    """A loader without the last batches that do not fill a step; otherwise it behaves like `loader`. Raises UsageError
    if the loader has fewer batches than a step takes.
    """

    def __init__(self, loader: Any, batches_per_step: int) -> None:
        self.loader = loader
        self.batches_per_step = batches_per_step
        if not len(self):
            raise UsageError(
                f"train_dataloader has {len(loader)} batches, but a step takes {batches_per_step}: use a smaller "
                "BATCH_SIZE or gradient_accumulation, or drop_last=False"
            )

    def __len__(self) -> int:
        return self._whole(len(self.loader))

    def __iter__(self) -> Epoch:
        return Epoch(self)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def batches(self) -> Iterator[Any]:
        """Yields its batches. The epoch ends with the last one, even if no further batch is asked for."""
        loader = self.loader
        if not isinstance(loader, DataParallelLoader):
            yield from islice(loader, len(self))
            return
        epoch, batches = loader.epoch, iter(loader)
        for left in reversed(range(self._whole(loader.batches_left()))):
            batch = next(batches)
            if not left:
                loader.set_epoch(epoch + 1)
            yield batch

    def _whole(self, batches: int) -> int:
        return batches - batches % self.batches_per_step


class Epoch:
    """An iterator over the batches of one epoch. With `next_batch` the engine continues with the next epochs, because
    the tutorials' loops make one iterator for all epochs.
    """

    def __init__(self, steps: WholeSteps) -> None:
        self._steps = steps
        self._batches = steps.batches()

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def begin_next(self) -> None:
        """Starts the next epoch, with a new iterator over its batches."""
        self._batches = self._steps.batches()


def next_batch(data_iter: Iterator[Any]) -> Any:
    """The next batch, from the next epoch if this one is over; None if there is none at all."""
    if not isinstance(data_iter, Iterator):
        return None  # the step raises an error for it
    batch = next(data_iter, None)
    if batch is None and isinstance(data_iter, Epoch):
        data_iter.begin_next()
        batch = next(data_iter, None)
    return batch


def unwrapped(loader: Iterable[Any]) -> Iterable[Any]:
    """The loader that was passed to `initialize`."""
    return loader.loader if isinstance(loader, WholeSteps) else loader


class ByOptimizerSteps:
    """A scheduler whose `step()` may be called after every batch, and only steps if the optimizer has stepped since."""

    def __init__(self, scheduler: Scheduler, engine: native.Engine) -> None:
        self.scheduler = scheduler
        self._engine = engine
        self._steps = engine.steps

    def step(self) -> None:
        """Sets the next learning rate if the optimizer has stepped since the last call."""
        if self._engine.steps > self._steps:
            self._steps = self._engine.steps
            self.scheduler.step()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.scheduler, name)


class Engine(native.Engine):
    """pipeflow's Engine with ColossalAI's methods; `initialize` makes it.

    Attributes:
        listener: an object that is called for every batch, such as a Trainer; or None.
    """

    listener: Any = None

    @property
    def schedule(self) -> Schedule:
        """The pipeline schedule that each batch runs."""
        return self.model.schedule

    @property
    def criterion(self) -> Callable[..., Tensor]:
        """`criterion(output, labels)` returns a batch's loss, for `backward`. Raises UsageError if there is none."""
        if self.model.runner.criterion is None:
            raise UsageError("this engine has no criterion: pass one to initialize")
        return self.model.runner.criterion

    @property
    def batches_of_step(self) -> int:
        """Number of batches run since the last step of the optimizer."""
        return self._batches

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Calls the model if this rank has the whole of it; otherwise raises UsageError."""
        if self.schedule.placement.num_ranks > 1:
            raise UsageError("this rank has only a part of the model: run batches with engine.execute_schedule")
        first, *others = self.model.runner.stages.values()
        output = first.call(*inputs, **named)
        for stage in others:
            output = stage.call(output)
        return output

    def execute(self, data_iter: Iterator[object], **options: Any) -> Output:
        """Like `execute` of pipeflow's Engine; iterators of a loader from `initialize` continue with the next epoch."""
        is_training = not options.get("forward_only", False)
        batch = next_batch(data_iter)
        if self.listener is not None:
            self.listener.before_batch(is_training=is_training)
        output = super().execute(data_iter if batch is None else iter([batch]), **options)
        if self.listener is not None:
            self.listener.after_batch(output, labels_of(batch), is_training=is_training)
        return output

    def execute_schedule(
        self,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, Tensor | None]:
        """Runs the next batch of `data_iter`. Returns outputs, labels and the mean loss on ranks with the last stage;
        each is None on other ranks, and if it is not asked for.

        Args:
            data_iter: iterator of batches `(inputs, labels)`.
            forward_only: evaluate, without gradients.
            return_loss: return the loss; must be True for training.
            return_output_label: return outputs and labels.

        Raises UsageError for training without return_loss, and as `execute` does.
        """
        if not forward_only and not return_loss:
            raise UsageError("return_loss=False needs forward_only=True: training computes the loss")
        batch = next_batch(data_iter)
        labels = labels_of(batch)
        if batch is not None:
            data_iter = iter([batch if return_loss else (batch[0], None)])
        output = self.execute(data_iter, forward_only=forward_only, return_outputs=return_output_label)
        placement = self.schedule.placement
        if self.model.context.pipeline_rank not in placement.ranks_of(placement.num_stages - 1):
            return None, None, None
        loss = output.loss if return_loss else None
        return (output.outputs, labels, loss) if return_output_label else (None, None, loss)


def labels_of(batch: Any) -> Any:
    """The labels of a batch `(inputs, labels)`; None for anything else, for which the step raises an error."""
    return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None


ELSEWHERE = {
    "tensor_shape": "write TENSOR_SHAPE into the configuration",
    "data_process_func": "write a forward that takes the batch's entries by name",
    "scatter_gather_tensors": "remove it; tensors between stages are sent whole",
}


def NonPipelineSchedule(**options: Any) -> Schedule:  # noqa: N802  # its name there
    """Returns the schedule with one rank and one microbatch. Raises UsageError for options."""
    _refuse(options)
    return make_schedule("1f1b", ranks=1, microbatches=1)


def PipelineSchedule(num_microbatches: int, **options: Any) -> Schedule:  # noqa: N802  # its name there
    """Returns the schedule 1f1b. Raises UsageError for options, and as make_schedule does."""
    _refuse(options)
    return make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=num_microbatches)


def InterleavedPipelineSchedule(  # noqa: N802  # its name there
    num_microbatches: int, num_model_chunks: int, **options: Any
) -> Schedule:
    """Returns the schedule interleaved-1f1b with `num_model_chunks` stages per rank. Raises UsageError for options, and
    as make_schedule does.
    """
    _refuse(options)
    ranks = current_context().pipeline_size
    return make_schedule("interleaved-1f1b", ranks=ranks, microbatches=num_microbatches, chunks=num_model_chunks)


def _refuse(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in ELSEWHERE:
            raise UsageError(f"a schedule has no option {name!r}: ColossalAI's options are {', '.join(ELSEWHERE)}")
        if value:
            raise UsageError(f"a schedule does not support {name} here: {ELSEWHERE[name]}")


class Called(nn.Module):
    """Calls a criterion with the elements of a tuple or list of outputs or labels as separate arguments. The entries of
    a dict of labels become keyword arguments if the criterion has parameters of their names; else it gets the dict.
    """

    def __init__(self, criterion: Callable[..., Tensor]) -> None:
        super().__init__()
        self.criterion = criterion
        target = criterion.forward if isinstance(criterion, nn.Module) else criterion
        self._named = frozenset(signature(target).parameters)

    def forward(self, output: Any, labels: Any) -> Tensor:
        outputs = output if isinstance(output, tuple | list) else [output]
        if isinstance(labels, dict) and labels.keys() <= self._named:
            return self.criterion(*outputs, **labels)
        return self.criterion(*outputs, *(labels if isinstance(labels, tuple | list) else [labels]))


def initialize(
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Callable[..., Tensor] | None = None,
    train_dataloader: Any = None,
    test_dataloader: Any = None,
    lr_scheduler: Any = None,
    *,
    schedule: Schedule | None = None,
    verbose: bool = True,
) -> tuple[Engine, Any, Any, Any]:
    """Makes an engine for this rank's part of the model with `make_engine`, from the launch's configuration. All ranks
    call it together. Returns the engine, the training loader, the test loader and the learning-rate scheduler (None for
    those not given).

    In a tensor mode other than "1d" a layer of `colossalai.nn` must hold each parameter, and nothing between these
    layers may compute with all features.

    Args:
        model: this rank's module, or an nn.ModuleList of its chunks.
        optimizer: an optimizer of the model's parameters.
        criterion: the loss function, called with outputs and labels as separate arguments (see `Called`).
        train_dataloader: returned without batches that do not fill a step of `gradient_accumulation`. With
            `dali=dict(mixup_alpha=...)` its images are mixed, and the criterion must accept mixed labels.
        test_dataloader: returned unchanged.
        lr_scheduler: returned; with `gradient_accumulation`, its `step()` counts steps of the optimizer.
        schedule: by default as in `make_engine`.
        verbose: if True, rank 0 logs which schedule runs.

    Raises UsageError as `make_engine` does, for a loader with fewer batches than a step takes, and for a loader whose
    images cannot be mixed.
    """
    given = current_config()
    config, logger = Config() if given is None else given, get_dist_logger()
    if config.gpu_augmentation:
        logger.warning(
            "dali: gpu_aug has no effect here: augment images in the data set's transform, and set gpu_aug=False",
            ranks=[0],
        )
    mixes = config.mixup_alpha > 0 and train_dataloader is not None
    if mixes:
        train_dataloader = _mixed(train_dataloader, config.mixup_alpha)
    if criterion is not None:
        criterion = MixupLoss(partial(Called, criterion)) if mixes else Called(criterion)
    if current_context().layout.sample_parts > 1:  # layers of these programs are written for every tensor mode
        for chunk in model if isinstance(model, nn.ModuleList) else [model]:
            vars(chunk).setdefault("fits_grids", True)
    made = make_engine(model, optimizer, criterion, schedule=schedule)
    engine = Engine(
        made.model,
        made.optimizer,
        gradient_accumulation=made.gradient_accumulation,
        clip_grad_norm=made.clip_grad_norm,
    )
    if verbose:
        logger.info(f"engine: {engine.schedule}", ranks=[0])
    accumulated = engine.gradient_accumulation
    if train_dataloader is not None:
        train_dataloader = WholeSteps(train_dataloader, accumulated)
    if lr_scheduler is not None and accumulated > 1:
        lr_scheduler = ByOptimizerSteps(lr_scheduler, engine)
    return engine, train_dataloader, test_dataloader, lr_scheduler


def _mixed(loader: Any, alpha: float) -> DataParallelLoader:
    if not isinstance(loader, DataParallelLoader):
        raise UsageError(
            f"dali: mixup_alpha needs a loader from utils.get_dataloader, but train_dataloader is a "
            f"{type(loader).__name__}: use get_dataloader, or remove mixup_alpha"
        )
    return mixed(loader, alpha)
