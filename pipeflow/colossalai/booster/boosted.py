"""BoostedModel: a model that a Booster turns into a Pipeline when it gets the first batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipeflow.colossalai.booster.batches import Batches, Loss
from pipeflow.colossalai.booster.making import make_stages, make_whole
from pipeflow.colossalai.booster.plugin import HybridParallelPlugin
from pipeflow.colossalai.shardformer.shard.optimizations import optimize
from pipeflow.core.errors import UsageError
from pipeflow.runtime.names import plain_name
from pipeflow.runtime.pipeline import Pipeline
from pipeflow.stages.stage import ModuleStage


class BoostedModel(nn.Module):
    """A model boosted by a Booster. It is the whole module until its Pipeline is made, then this rank's part of it;
    `parameters()` and `train()` apply to the current one. With pp_size=1 it can be called like the module.

    Args:
        module: the whole module, alike on every rank.
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
        self.names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.names[id(parameter)].append(plain_name(name))
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
