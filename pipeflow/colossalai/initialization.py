"""ColossalAI's `colossalai.initialize`: makes an engine and loaders from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.colossalai.engines import ByOptimizerSteps, Engine, WholeSteps
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.training.config.engine import make_engine
from pipeflow.training.config.launch import current_config
from pipeflow.training.config.schema import Config
from pipeflow.training.data.loader import DataParallelLoader
from pipeflow.training.data.mixup import MixupLoss, mixed
from pipeflow.training.logging import get_dist_logger


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
