"""PipelineStrategy for Fabric: loops that call a module and `fabric.backward`. The module is cut at its first call, as
that of accelerate's loop. Must not contain: the step.
"""

from __future__ import annotations

from inspect import getclosurevars
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import ParallelStrategy
from torch import Tensor, nn

from pipeflow.adapters.cut_model import CutSettings, PreparedModel
from pipeflow.adapters.libraries import instead, require_one_optimizer, require_unwrapped
from pipeflow.adapters.lightning.model import StepModel, keep_own
from pipeflow.adapters.lightning.world import LightningWorld, autocast_of, packed, require_precision, unpacked
from pipeflow.adapters.ranks import clipped_norm
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.training.checkpoint.manifest import find


class FabricModel(StepModel):
    """The module that `fabric.setup` returns, wrapped in Fabric's own. Its forward runs, or steps of a LightningModule.

    Args:
        module, settings, context: as in PreparedModel.
    """

    def __init__(self, module: nn.Module, settings: CutSettings, context: Context) -> None:
        super().__init__(module, settings, context, None)
        self._runs_steps = False

    def forward(self, *arguments: Any, **entries: Any) -> Any:
        """Runs a batch, as PreparedModel does, or the step that Fabric was asked for, as StepModel does.

        Raises UsageError for another method of the module, and if both are asked for.
        """
        method = _asked_of(self.whole)
        if method not in (None, *_STEPS):
            raise UsageError(
                f"with Fabric, a pipeline runs the module's forward and {', '.join(_STEPS)}, not {method}: call one of "
                "these"
            )
        if not self.is_cut:
            self._runs_steps = method is not None
        if self._runs_steps is (method is None):
            first, second = ("its steps", "its forward")[:: 1 if self._runs_steps else -1]
            raise UsageError(
                f"the module was cut by {first}, so a pipeline does not run {second}: call either the module or its "
                "training_step and validation_step throughout"
            )
        if method is None:
            return super().forward(*arguments, **entries)
        self.require_released()
        return self.run(method, *arguments)

    def _make(self, entries: dict[str, Any]) -> None:
        """Makes the Pipeline; what a LightningModule knows of Fabric is not copied. The module keeps the parameters of
        this rank, since Fabric's wrapper shows those of the module.
        """
        if self.is_cut:
            return
        own = vars(self.whole)
        others: dict[str, Any] = {"_fabric": None, "_fabric_optimizers": []}
        with instead(own, **{name: each for name, each in others.items() if name in own}):
            (StepModel if self._runs_steps else PreparedModel)._make(self, entries)
        if not self._runs_steps:  # where StepModel does it
            keep_own(self.whole, self.pipeline)


_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def _asked_of(module: nn.Module) -> str | None:
    """The method that Fabric was asked for in place of the module's forward: it stands in the place of the forward, and
    is taken away there.
    """
    if "_redirection_through_forward" not in getattr(vars(module).get("forward"), "__qualname__", ""):
        return None
    name: str = getclosurevars(vars(module).pop("forward")).nonlocals["method_name"]
    return name


class PipelineStrategy(LightningWorld, ParallelStrategy):  # type: ignore[misc]  # Lightning's types are not read
    """Trains a module in a pipeline in Fabric's loop, as in
    `Fabric(strategy=PipelineStrategy(schedule="1f1b", microbatches=8), devices=4)`.

    Args:
        pipeline, tensor, schedule, microbatches, schedule_options, cuts, blocks, weigh: as in the Trainer's strategy.
        loss_over: as in `Pipeline`; a module that computes its own loss has "microbatches" alone.
        head_slices, head: as in `Pipeline.from_module`.
        options: further arguments of Fabric's ParallelStrategy.

    The loss is the model's own, or what a function of torch.nn.functional returns for its output. Raises UsageError for
    what is not possible with a pipeline.
    """

    _model: FabricModel | None = None

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """Which part of the data this rank reads, if there are replicas."""
        return super().distributed_sampler_kwargs if self._context.data_size > 1 else None

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Returns the module as one that is cut at its first call. Raises UsageError for a second one."""
        require_unwrapped(module)
        require_precision(self.precision)
        if self._model is not None:
            raise UsageError("a pipeline trains one module: set up the one that is trained, and call others directly")
        settings = self._settings_for(self._context, autocast_of(self.precision))
        self._model = FabricModel(module, settings, self._context)
        return self._model

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Returns the optimizer; its groups keep this rank's parameters when the module is cut."""
        if self._model is None:
            raise UsageError("set up the optimizer together with its module: fabric.setup(model, optimizer)")
        require_one_optimizer([optimizer], "the script")
        self._model.keep_groups(optimizer)
        return optimizer

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any], scheduler: Any = None) -> Any:
        """Like `setup_module` and `setup_optimizer`. Raises UsageError for several optimizers."""
        require_one_optimizer(optimizers, "the script")
        return self.setup_module(module), [self.setup_optimizer(each) for each in optimizers], scheduler

    def module_to_device(self, module: nn.Module) -> None:
        """Does nothing: the module is cut before its parts leave the CPU."""

    def backward(self, tensor: Tensor, module: Any, *arguments: Any, **options: Any) -> None:
        """Adds the gradients to `.grad`. Raises UsageError for a loss that is not that of the module's last call."""
        super().backward(tensor, module, *arguments, **options)
        if self._model is None or not self._model.is_released:
            raise UsageError(
                "fabric.backward got a loss that is not that of the module's last call: pass output.loss, or what a "
                "loss of torch.nn.functional returned for the output"
            )

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> Tensor:
        """Clips the whole model's gradient. Returns its norm before."""
        assert self._model is not None, "Fabric clips what was set up"
        return clipped_norm(self._model.pipeline, max_norm, norm_type)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, or sum, of a tensor over the replicas."""
        return self.reduce(tensor, group, reduce_op)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Saves a module that was called, its optimizer, and other objects, to the folder `path`."""
        model, optimizer, others = self._parted(state)
        values = self._convert_stateful_objects_in_state(others, filter=filter or {})
        model.save(path, optimizer, extra=packed(values))

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, weights_only: Any = None) -> Any:
        """Loads what `save_checkpoint` wrote under any layout; module and optimizer when the module is cut. Returns
        what `state` does not name.
        """
        if not Path(path).is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)
        folder = find(Path(path))
        model, optimizer, others = self._parted(state)
        kept = unpacked(folder, weights_only)
        for name in others.keys() & kept.keys():
            if hasattr(others[name], "load_state_dict"):
                others[name].load_state_dict(kept.pop(name))
            else:
                state[name] = kept.pop(name)

        if optimizer is not None:
            model.load_options(folder, optimizer)
        model.load(folder, lambda: optimizer)
        return kept

    def _parted(self, state: Any) -> tuple[FabricModel, Any, dict[str, Any]]:
        """The module, its optimizer, and the other entries of a state. Raises UsageError if the module is not there."""
        if not isinstance(state, dict) or not any(each is self._model for each in state.values()):
            raise UsageError("pass the module that was set up within a dict: fabric.save(path, {'model': model})")
        assert self._model is not None
        optimizers = [each for each in state.values() if isinstance(each, torch.optim.Optimizer)]
        own = [self._model, *optimizers]
        others = {name: each for name, each in state.items() if not any(each is mine for mine in own)}
        return self._model, optimizers[0] if optimizers else None, others
