"""BoostedOptimizer: an optimizer that a Booster restricts to this rank's parameters and wraps as the plugin says."""

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
    """An optimizer boosted by a Booster. It shares the groups of the given optimizer, so learning-rate schedulers work
    on either; once the Pipeline is made, the groups have only this rank's parameters.

    Args:
        inner: an optimizer of the whole module's parameters.
        model: the boosted model.

    Attributes:
        inner: the optimizer that takes the steps.

    Raises UsageError if `inner` is not an optimizer, or has other parameters.
    """

    def __init__(self, inner: Optimizer, model: BoostedModel) -> None:
        if not isinstance(inner, Optimizer):
            raise UsageError(f"optimizer must be a torch.optim.Optimizer, got {type(inner).__name__}")
        if any(id(each) not in model.names for group in inner.param_groups for each in group["params"]):
            raise UsageError("the optimizer has parameters that are not in the model: make it from model.parameters()")
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
        """Keeps only this rank's parameters in the groups, and wraps the optimizer as the plugin says."""
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
                    f"{type(self.inner).__name__} has states of whole weights, but a tensor rank has only parts: "
                    "boost an optimizer that has taken no step, and load its states with booster.load_optimizer"
                )
        plugin = self.model.plugin
        if plugin.settings.zero_stage == 1:
            self.inner = Zero(pipeline, self.inner)
        if plugin.half is not None:
            self.inner = plugin.half.optimizer(pipeline, self.inner)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure, so no loss
        """Clips the gradients to the plugin's max_norm, then steps. All ranks call it together."""
        if closure is not None:
            raise UsageError("step takes no closure: call execute_pipeline, then step()")
        max_norm = self.model.plugin.settings.max_norm
        self._grad_norm = self.clip_grad_by_norm(max_norm) if max_norm else None
        self.inner.step()

    def backward(self, loss: Tensor) -> None:
        """Computes the gradients of a loss of the called model. Raises UsageError with several pipeline ranks."""
        backward(loss, self.model.pipeline, reduce=self.model.reduces)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters of the model."""
        self.inner.zero_grad(set_to_none)

    def clip_grad_by_norm(self, max_norm: float) -> Tensor:
        """Clips the whole model's gradient with `pipeflow.clip_grad_norm_`. Returns the norm before clipping."""
        return clip_grad_norm_(self.model.pipeline, max_norm)

    def get_grad_norm(self) -> float | None:
        """Returns the norm before clipping in the last step; None without clipping."""
        return None if self._grad_norm is None else self._grad_norm.item()

    def load(self, checkpoint: Path) -> None:
        """Loads a pipeflow checkpoint into the model and this optimizer."""
        load_checkpoint(checkpoint, self.model.pipeline, self.inner)
        self._share()


def _has_others(state: Mapping[str, Any], parameter: Tensor) -> bool:
    """True if there are states of another shape than the parameter."""
    return any(isinstance(each, Tensor) and each.dim() and each.shape != parameter.shape for each in state.values())
