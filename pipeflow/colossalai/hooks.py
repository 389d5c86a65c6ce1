"""ColossalAI's `colossalai.trainer.hooks`, mostly hooks of pipeflow. Epochs are counted from 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

import pipeflow.training as native
from pipeflow.adapters.ranks import objects_of_all
from pipeflow.colossalai.processes import ParallelMode
from pipeflow.colossalai.trainers import BaseHook, Trainer
from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.runtime.step import Output
from pipeflow.engine.torch_private.trees import tree_map
from pipeflow.training import DistributedLogger, Hook, MultiTimer, Step
from pipeflow.training.optim.rates import Scheduler


class LossHook(Hook):
    """Does nothing: a trainer stores the losses of steps, epochs and evaluations itself."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority


class LogMetricByStepHook(LossHook):
    """Does nothing: a trainer stores the metrics of steps itself, and `display_progress` shows them."""


class AccuracyHook(native.AccuracyHook):
    """pipeflow's AccuracyHook; `accuracy_func(outputs, labels)` returns the number of correct answers in a batch."""

    def __init__(self, accuracy_func: Callable[[Any, Any], Tensor | float], priority: int = 0) -> None:
        super().__init__(accuracy_func)
        self.priority = priority

    def after_batch(self, trainer: native.Trainer, output: Output, labels: object) -> None:
        device = trainer.engine.model.context.device
        there = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, labels)
        super().after_batch(trainer, output, there)


class LRSchedulerHook(native.RateHook):
    """pipeflow's RateHook. `store_lr_in_state` has no effect: the rate is always stored."""

    def __init__(
        self, lr_scheduler: Scheduler, by_epoch: bool, store_lr_in_state: bool = True, priority: int = 1
    ) -> None:
        super().__init__(lr_scheduler, by_epoch=by_epoch)
        self.priority = priority


class ThroughputHook(native.ThroughputHook):
    """pipeflow's ThroughputHook, for the whole job.

    Args:
        ignored_steps: number of steps at the start that are not counted.
        priority: as in BaseHook.
        tflop_per_step: floating-point operations of a step of the whole job, in units of 10^12; 0 if unknown.
        use_local: must be False, since the throughput is that of all replicas.

    Raises UsageError for use_local=True, and as pipeflow's hook does.
    """

    def __init__(
        self, ignored_steps: int = 0, priority: int = 10, tflop_per_step: float = 0, use_local: bool = False
    ) -> None:
        if use_local:
            raise UsageError("ThroughputHook counts the samples of all replicas: remove use_local")
        super().__init__(ignored_steps=ignored_steps)
        self.priority = priority
        self.tflop_per_step = tflop_per_step

    def after_step(self, trainer: native.Trainer, step: Step) -> None:
        self.flops_per_sample = self.tflop_per_step * 1e12 / step.samples
        super().after_step(trainer, step)


class TensorboardHook(native.TensorBoardHook):
    """pipeflow's TensorBoardHook: rank 0 writes metrics of the whole job; `ranks` and `parallel_mode` do nothing."""

    def __init__(
        self,
        log_dir: str,
        ranks: Sequence[int] | None = None,
        parallel_mode: ParallelMode = ParallelMode.GLOBAL,
        priority: int = native.TensorBoardHook.priority,
    ) -> None:
        super().__init__(log_dir, every=1)
        self.priority = priority


class SaveCheckpointHook(native.CheckpointHook):
    """pipeflow's CheckpointHook: saves the state of training, and resumes from the newest checkpoint in its folder.

    If stages use the same names for their tensors, such as with an nn.ModuleList in each, names in the checkpoint
    include the stage. Such a checkpoint can only be loaded with the same number of stages.

    Args:
        interval: number of epochs between two checkpoints; with `save_by_iter` number of optimizer steps.
        checkpoint_dir: folder for the checkpoints of this run alone.
        model: the trained model, or None.
        save_by_iter: save by steps, not epochs.
        priority: as in BaseHook.

    Raises UsageError without a folder, and as CheckpointHook does; before training starts, for another model.
    """

    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str | None = None,
        model: nn.Module | None = None,
        save_by_iter: bool = False,
        priority: int = native.CheckpointHook.priority,
    ) -> None:
        if checkpoint_dir is None:
            raise UsageError("SaveCheckpointHook needs a folder: pass checkpoint_dir")
        super().__init__(checkpoint_dir, interval, "step" if save_by_iter else "epoch")
        self.model = model
        self.priority = priority

    def before_fit(self, trainer: native.Trainer) -> None:
        trained = trainer.engine.model
        if self.model is not None and self.model not in (trained, trained.chunks, *trained.chunks):
            raise UsageError("SaveCheckpointHook saves the trained model, but got another one: remove model")
        if _names_collide(trained):
            self.names = _by_stage
        super().before_fit(trainer)


def _by_stage(stage: int, name: str) -> str:
    return f"stages.{stage}.{name}"


def _names_collide(model: Pipeline) -> bool:
    """True if two stages have a tensor of the same name. All ranks call it together."""
    mine = [(index, name) for index, stage in model.runner.stages.items() for name in stage.module.state_dict()]
    told = {each for row in objects_of_all(model.context, mine) for each in row}
    return max(Counter(name for _, name in told).values(), default=0) > 1


class LogMetricByEpochHook(BaseHook):
    """Logs the metrics of epochs and evaluations on rank 0, after each epoch whose number is a multiple of `interval`::

        [Epoch 0 / Train]: Loss = 0.45114 | LR = 0.001
        [Epoch 0 / Test]: Loss = 0.47021 | Accuracy = 0.8531

    Raises UsageError if the interval is less than 1.
    """

    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = native.LogHook.priority) -> None:
        super().__init__(priority)
        if interval < 1:
            raise UsageError(f"interval must be at least 1, got {interval}")
        self.logger = logger
        self.interval = interval

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._log(trainer, "Train")

    def after_test_epoch(self, trainer: Trainer) -> None:
        self._log(trainer, "Test")

    def _log(self, trainer: Trainer, when: str) -> None:
        if trainer.cur_epoch % self.interval == 0:
            said = " | ".join(self._said(trainer, when))
            self.logger.info(f"[Epoch {trainer.cur_epoch} / {when}]: {said}", ranks=[0])

    def _said(self, trainer: Trainer, when: str) -> Iterator[str]:
        """The parts of a line."""
        for name, value in trainer.states["metrics"][when.lower()].items():
            yield f"{name} = {value:.5g}"


class LogTimingByEpochHook(LogMetricByEpochHook):
    """Logs the times of epochs, steps and evaluations as LogMetricByEpochHook logs metrics::

        [Epoch 0 / Train]: Train-epoch: last = 2.5 s, mean = 2.5 s | Train-step: last = 0.02 s, mean = 0.025 s
        [Epoch 0 / Test]: Test-epoch: last = 0.5 s, mean = 0.5 s | Test-step: last = 0.01 s, mean = 0.01 s

    Args:
        timer: the timer of the Trainer.
        logger, interval, priority: as in LogMetricByEpochHook.
        log_eval: log evaluations.
        ignore_num_train_steps: number of steps at the start that means leave out.

    Raises UsageError if the interval is less than 1, and when training starts if the Trainer has another timer.
    """

    def __init__(
        self,
        timer: MultiTimer,
        logger: DistributedLogger,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        ignore_num_train_steps: int = 0,
    ) -> None:
        super().__init__(logger, interval, priority)
        self.timer = timer
        self.log_eval = log_eval
        self.ignored = {"Train-step": ignore_num_train_steps}

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        if trainer.timer is not self.timer:
            raise UsageError("LogTimingByEpochHook logs what a Trainer measures: pass its timer to Trainer(timer=...)")

    def after_test_epoch(self, trainer: Trainer) -> None:
        if self.log_eval:
            super().after_test_epoch(trainer)

    def _said(self, trainer: Trainer, when: str) -> Iterator[str]:
        for name, timer in self.timer:
            if name.startswith(when):
                counted = timer.history[self.ignored.get(name, 0) :]
                mean = sum(counted) / max(1, len(counted))
                yield f"{name}: last = {timer.elapsed:.5g} s, mean = {mean:.5g} s"


class LogMemoryByEpochHook(native.MemoryHook):
    """pipeflow's MemoryHook; logs the memory of each rank after every `interval` epochs: that of the accelerator, or
    without one that of the process. Evaluations need no line, so `log_eval` changes nothing.
    """

    def __init__(
        self,
        logger: DistributedLogger,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        report_cpu: bool = False,
    ) -> None:
        super().__init__()
        self.logger, self.interval, self.priority = logger, interval, priority

    def after_training(self, trainer: native.Trainer) -> None:
        super().after_training(trainer)
        if trainer.epoch % self.interval == 0:
            held = ", ".join(f"{each:.3f}" for each in self.by_rank)
            self.logger.info(f"[Epoch {trainer.epoch} / Train]: GiB of each rank: {held}", ranks=[0])
