"""A model that a Booster turns into a Pipeline when it gets the first batch, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.checkpoint.load import load_checkpoint
from pipeflow.colossalai.batches import Batches, Loss
from pipeflow.colossalai.plugins import HybridParallelPlugin
from pipeflow.colossalai.sharders import optimize
from pipeflow.colossalai.stages import make_stages, make_whole
from pipeflow.core.errors import UsageError
from pipeflow.optim.clip import clip_grad_norm_
from pipeflow.optim.whole import WholeGroups, names_of
from pipeflow.optim.zero import Zero
from pipeflow.runtime.custom_backward import backward
from pipeflow.runtime.names import plain_name
from pipeflow.runtime.pipeline import Pipeline
from pipeflow.stages.stage import ModuleStage


class BoostedModel(nn.Module):
    """A model boosted by a Booster. It is the whole module until its Pipeline is made, then this rank's part of it;
    `parameters()` and `train()` apply to the current one. With pp_size=1 it can be called like the module.

    Args:
        module: the whole module, the same on every rank.
        plugin: the plugin that says how to make it parallel.

    Attributes:
        loss: the loss of a microbatch.
        reduces: True if gradients are averaged over the replicas.
        names: names of the whole module's parameters, by their ids.
    """

    def __init__(self, module: nn.Module, plugin: HybridParallelPlugin) -> None:
        super().__init__()
        optimize(module, plugin.shard_config)
        dtype = None if plugin.half is None else plugin.half.dtype
        module.to(dtype=dtype)
        self.training = module.training
        self.inner = module
        self.plugin = plugin
        self.loss = Loss()
        self.reduces = True
        self.names = names_of(module)
        self._batches = Batches(module, dtype)
        self._waiting: list[Callable[[Pipeline], None]] = []
        if plugin.pp_size == 1:
            self.inner = make_whole(module, plugin, self.loss, self._batches).train(module.training)

    @property
    def pipeline(self) -> Pipeline:
        """The Pipeline. Raises UsageError before there is one."""
        if not isinstance(self.inner, Pipeline):
            raise UsageError("the model has not run a batch yet: call booster.execute_pipeline first")
        return self.inner

    def prepare(self, batch: object) -> None:
        """Makes the Pipeline with a first batch, unless there is one already. All ranks call it together. Raises
        UsageError as `Pipeline.from_module` does.
        """
        if not isinstance(self.inner, Pipeline):
            made = make_stages(self.inner, self.plugin, self.loss, self._batches, batch)
            self.inner = made.train(self.inner.training)
            for action in self._waiting:
                action(made)
            self._waiting.clear()

    def when_made(self, action: Callable[[Pipeline], None]) -> None:
        """Calls `action` with the Pipeline, now or as soon as there is one."""
        if isinstance(self.inner, Pipeline):
            action(self.inner)
        else:
            self._waiting.append(action)

    def when_real(self, action: Callable[[], None]) -> None:
        """Calls `action` now, or if parameters are on the meta device until the Pipeline is made, as soon as it is."""
        if any(each.is_meta for each in self.parameters()):
            self._waiting.append(lambda _: action())
        else:
            action()

    def unwrap(self) -> nn.Module:
        """Returns the boosted module; once the Pipeline is made, this rank's first stage of it."""
        first = self.inner.chunks[0] if isinstance(self.inner, Pipeline) else self.inner
        return first.root if isinstance(first, ModuleStage) else first

    def forward(self, *arguments: Any, **entries: Any) -> Any:
        """Calls the module. Raises UsageError with several pipeline ranks."""
        if self.plugin.pp_size > 1:
            raise UsageError(
                "this rank has only a part of the model, so the model cannot be called, nor its loss differentiated: "
                "run every batch with booster.execute_pipeline(data_iter, model, criterion, optimizer)"
            )
        [stage] = self.pipeline.runner.stages.values()
        return stage.call(*self._batches.cast(arguments), **self._batches.cast(entries))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters by their names in the module."""
        start = f"{prefix}." if prefix else ""
        for name, parameter in self.inner.named_parameters("", recurse, remove_duplicate):
            yield start + plain_name(name.removeprefix("chunks.0.") if self.plugin.pp_size == 1 else name), parameter

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulates gradients inside the `with` block; the next batch after it averages them over replicas."""
        before, self.reduces = self.reduces, False
        try:
            yield
        finally:
            self.reduces = before


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
        self._groups = WholeGroups(inner, model.names)
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.model = model
        self._grad_norm: Tensor | None = None
        self._share()
        model.when_made(self._point_at)

    def _share(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _point_at(self, pipeline: Pipeline) -> None:
        """Keeps only this rank's parameters in the groups, and wraps the optimizer as the plugin says."""
        self._groups.keep(self.model.named_parameters(remove_duplicate=False))
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
