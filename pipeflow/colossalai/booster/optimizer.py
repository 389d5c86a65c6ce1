"""What a Booster makes of an optimizer: one that steps what this rank owns, as the plugin says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.checkpoint.load import load_checkpoint
from pipeflow.colossalai.booster.boosted import BoostedModel
from pipeflow.core.errors import UsageError
from pipeflow.optim.clip import clip_grad_norm_
from pipeflow.optim.zero import Zero
from pipeflow.runtime.backward import backward
from pipeflow.runtime.pipeline import Pipeline


class BoostedOptimizer(Optimizer):
    """Keeps the groups of the optimizer that was given, so schedulers of the learning rate work on either; once the
    Pipeline is made they have this rank's parameters alone.

    Args:
        inner: made from the parameters of the whole module.
        model: whose parameters they are.

    Attributes:
        inner: what takes the steps.

    Raises UsageError for what is no optimizer, or one of other parameters.
    """

    def __init__(self, inner: Optimizer, model: BoostedModel) -> None:
        if not isinstance(inner, Optimizer):
            raise UsageError(f"optimizer must be a torch.optim.Optimizer, got {type(inner).__name__}")
        if any(id(each) not in model.names for group in inner.param_groups for each in group["params"]):
            raise UsageError("the optimizer steps what is no parameter of the model: make it from model.parameters()")
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.model = model
        self._names = [[model.names[id(each)] for each in group["params"]] for group in inner.param_groups]
        self._grad_norm: Tensor | None = None
        self._share()
        model.when_made(self._point_at)

    def _share(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _point_at(self, pipeline: Pipeline) -> None:
        """Leaves in the groups what this rank owns, and wraps the optimizer as the plugin says."""
        here = dict(self.model.named_parameters(remove_duplicate=False))
        kept: set[nn.Parameter] = set()
        for group, names in zip(self.inner.param_groups, self._names, strict=True):
            own = [[name for name in each if name in here] for each in names]
            group["params"] = [here[found[0]] for found in own if found]
            if "param_names" in group:
                group["param_names"] = [found[0] for found in own if found]
            kept.update(group["params"])
        for parameter, state in list(self.inner.state.items()):
            if parameter not in kept:
                del self.inner.state[parameter]
            elif _has_others(state, parameter):
                raise UsageError(
                    f"{type(self.inner).__name__} has states of whole weights, of which a tensor rank has a part: "
                    "boost an optimizer that has taken no step, and load its states with booster.load_optimizer"
                )
        plugin = self.model.plugin
        if plugin.settings.zero_stage:
            self.inner = Zero(pipeline, self.inner)
        if plugin.half is not None:
            self.inner = plugin.half.optimizer(pipeline, self.inner)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure, so no loss
        """Clips the gradients to the plugin's max_norm, then steps. All ranks call it together."""
        if closure is not None:
            raise UsageError("step takes no closure: run execute_pipeline, then step()")
        max_norm = self.model.plugin.settings.max_norm
        self._grad_norm = self.clip_grad_by_norm(max_norm) if max_norm else None
        self.inner.step()

    def backward(self, loss: Tensor) -> None:
        """The gradients of a loss that the called model made. Raises UsageError under a pipeline."""
        backward(loss, self.model.pipeline, reduce=self.model.reduces)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters that it was made for."""
        self.inner.zero_grad(set_to_none)

    def clip_grad_by_norm(self, max_norm: float) -> Tensor:
        """`pipeflow.clip_grad_norm_`: of the whole model's gradient."""
        return clip_grad_norm_(self.model.pipeline, max_norm)

    def get_grad_norm(self) -> float | None:
        """The norm before the last step's clipping; None where nothing was clipped."""
        return None if self._grad_norm is None else self._grad_norm.item()

    def load(self, checkpoint: Path) -> None:
        """Reads a checkpoint of pipeflow into the model and this optimizer."""
        load_checkpoint(checkpoint, self.model.pipeline, self.inner)
        self._share()


def _has_others(state: Mapping[str, Any], parameter: Tensor) -> bool:
    """Whether there are states of another shape than the parameter."""
    return any(isinstance(each, Tensor) and each.dim() and each.shape != parameter.shape for each in state.values())
