"""ColossalAI's Booster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.colossalai.booster.adapters import Adapters
from pipeflow.colossalai.booster.batches import Criterion, samples_of
from pipeflow.colossalai.booster.boosted import BoostedModel
from pipeflow.colossalai.booster.checkpoints import Checkpoints, boosted_model, boosted_optimizer
from pipeflow.colossalai.booster.optimizer import BoostedOptimizer
from pipeflow.colossalai.booster.plugin import HybridParallelPlugin
from pipeflow.core.errors import UsageError
from pipeflow.runtime.pipeline import execute_pipeline


class Booster(Checkpoints, Adapters):
    """Trains a model as its plugin says. All ranks make the same calls.

    Args:
        plugin: by default one of replicas alone, in `mixed_precision` or the model's own.

    Raises UsageError for another plugin, a device, which the launch has chosen, and a precision beside a plugin.
    """

    def __init__(
        self,
        device: str | None = None,
        mixed_precision: Literal["fp16", "bf16"] | None = None,
        plugin: HybridParallelPlugin | None = None,
    ) -> None:
        if device or (plugin and mixed_precision):
            raise UsageError("leave device out, the launch has chosen it, and give precision to the plugin")
        plugin = HybridParallelPlugin(1, 1, precision=mixed_precision or "fp32") if plugin is None else plugin
        if not isinstance(plugin, HybridParallelPlugin):
            raise UsageError(f"plugin must be a HybridParallelPlugin, got {type(plugin).__name__}")
        self.plugin = plugin

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Criterion | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """What trains, in the same order: the model, alike on every rank, as a BoostedModel; the optimizer, made from
        the whole model's parameters, as a BoostedOptimizer; the others as they are.
        """
        if not isinstance(model, nn.Module) or isinstance(model, BoostedModel):
            raise UsageError(f"boost takes an nn.Module that was not boosted, got {type(model).__name__}")
        made = BoostedModel(model, self.plugin)
        made.loss.criterion = criterion
        return made, optimizer and BoostedOptimizer(optimizer, made), criterion, dataloader, lr_scheduler

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Criterion | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Runs the next batch of `data_iter`; under torch.no_grad() it makes no gradients. Returns "loss", the mean
        loss of the batches of all replicas, and "outputs", where the last stage is; elsewhere, and where they are not
        asked for, None. Where the model makes a loss over labels itself, microbatches count by their labels that are
        not -100, else by their samples.

        Args:
            data_iter: its batches are dicts of the forward's keywords, tuples of all its arguments, or its first one.
            model, optimizer: as `boost` returned them; an optimizer is needed to train.
            criterion: `criterion(outputs, inputs)` gives the mean loss of a microbatch from the model's output and all
                of the microbatch; by default the one that was boosted.

        Raises UsageError for what was not boosted, for an empty iterator, and as `pipeflow.execute_pipeline`.
        """
        boosted, trains = boosted_model(model), torch.is_grad_enabled()
        if trains and not isinstance(optimizer, BoostedOptimizer):
            raise UsageError("training needs the optimizer that boost returned; evaluate under torch.no_grad()")
        if criterion is None and boosted.loss.criterion is None:
            raise UsageError("there is no criterion: give one to execute_pipeline, or to boost")
        batch = next(data_iter, None) if isinstance(data_iter, Iterator) else None
        if batch is None:
            raise UsageError("data_iter has no batch left: make a new one, iter(dataloader), for every epoch")
        boosted.prepare(batch)
        with boosted.loss.by(criterion):
            output = execute_pipeline(
                iter([batch]),
                boosted.pipeline,
                forward_only=not trains,
                return_outputs=return_outputs,
                reduce=boosted.reduces,
                schedule=self.plugin.schedule(samples_of(batch)),
            )
        return {"loss": output.loss if return_loss else None, "outputs": output.outputs}

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        """The gradients of a loss that the called model made. Raises UsageError under a pipeline."""
        boosted_optimizer(optimizer).backward(loss)

    def no_sync(self, model: nn.Module | None = None, optimizer: Any = None) -> AbstractContextManager[None]:
        """Inside, gradients are added up over batches; the next batch outside averages all over the replicas."""
        return (boosted_optimizer(optimizer).model if model is None else boosted_model(model)).no_sync()
