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
from pipeflow.colossalai.booster.plugin import HybridParallelPlugin, TorchDDPPlugin
from pipeflow.core.errors import UsageError
from pipeflow.runtime.pipeline import execute_pipeline


class Booster(Checkpoints, Adapters):
    """Trains a model as its plugin says. All ranks make the same calls.

    Args:
        device: must be None; the launch chooses the device.
        mixed_precision: "fp16" or "bf16"; only without a plugin or for a TorchDDPPlugin. By default the model's own
            dtype.
        plugin: a HybridParallelPlugin; by default a TorchDDPPlugin, which has only replicas.

    Raises UsageError for another plugin, for a device, and for a precision besides another plugin.
    """

    def __init__(
        self,
        device: str | None = None,
        mixed_precision: Literal["fp16", "bf16"] | None = None,
        plugin: HybridParallelPlugin | None = None,
    ) -> None:
        if device or (mixed_precision and not isinstance(plugin, TorchDDPPlugin | None)):
            raise UsageError("remove device, since the launch chooses it, and pass the precision to the plugin")
        if plugin is None or mixed_precision:
            plugin = TorchDDPPlugin(precision=mixed_precision or "fp32")
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
        """Returns its arguments ready for training: the model as a BoostedModel, the optimizer as a BoostedOptimizer,
        the others unchanged. The model must be alike on every rank, the optimizer made from all of its parameters.

        Raises UsageError if the model is not a module or was boosted before.
        """
        if not isinstance(model, nn.Module) or isinstance(model, BoostedModel):
            raise UsageError(f"boost takes an nn.Module that is not boosted yet, got {type(model).__name__}")
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
        """Runs the next batch of `data_iter`; under torch.no_grad() it computes no gradients. Returns a dict with
        "loss", the mean loss over all replicas, and "outputs". Both are None on ranks without the last stage, and if
        they are not asked for.

        If the model computes the loss from labels itself, microbatches are weighted by their number of labels other
        than -100; otherwise by their number of samples.

        Args:
            data_iter: iterator of batches. A batch is a dict of the forward's arguments, a tuple of all of them, or the
                first one.
            model: the model that `boost` returned.
            criterion: `criterion(outputs, inputs)` returns a microbatch's mean loss from the model's output and the
                whole microbatch; by default the one passed to `boost`.
            optimizer: the optimizer that `boost` returned; needed for training.
            return_loss: return the loss.
            return_outputs: return the outputs.

        Raises UsageError if the model or optimizer is not boosted, for an empty iterator, and as
        `pipeflow.execute_pipeline` does.
        """
        boosted, trains = boosted_model(model), torch.is_grad_enabled()
        if trains and not isinstance(optimizer, BoostedOptimizer):
            raise UsageError(
                "training needs the optimizer that boost returned: pass it, or evaluate under torch.no_grad()"
            )
        if criterion is None and boosted.loss.criterion is None:
            raise UsageError("there is no criterion: pass one to execute_pipeline or to boost")
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
        """Computes the gradients of a loss of the called model. Raises UsageError with several pipeline ranks."""
        boosted_optimizer(optimizer).backward(loss)

    def no_sync(self, model: nn.Module | None = None, optimizer: Any = None) -> AbstractContextManager[None]:
        """Only accumulates gradients inside the `with` block; the next batch after it averages them over replicas."""
        return (boosted_optimizer(optimizer).model if model is None else boosted_model(model)).no_sync()
