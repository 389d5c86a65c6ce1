"""A model that a Booster turns into a Pipeline when it gets the first batch, as its plugin and a policy say; its
batches, and its optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.adapters.batches import samples_of
from pipeflow.adapters.cut_model import CutModel, whole_outputs
from pipeflow.colossalai.gemini import spread
from pipeflow.colossalai.plugins import HybridParallelPlugin
from pipeflow.colossalai.policies import Policy, require_whole
from pipeflow.colossalai.sharders import ModelSharder, optimize
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.transport.agreement import all_gather_object
from pipeflow.engine.runtime.original import plain_name
from pipeflow.engine.runtime.other_calls import backward
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.stages.blocks import listed
from pipeflow.engine.stages.entries import Entries
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.engine.tensor.module_sharding import shard
from pipeflow.engine.tensor.rules import DEFAULT_RULES
from pipeflow.engine.torch_private.trees import tree_map
from pipeflow.training.checkpoint.load import load_checkpoint
from pipeflow.training.optim.clip import clip_grad_norm_
from pipeflow.training.optim.zero import Zero

Criterion = Callable[[Any, Any], Tensor]


def samples_in(batch: object) -> int:
    """Number of samples in a batch. Raises UsageError for a batch without tensors."""
    found = samples_of(batch)
    if not found:
        raise UsageError(f"a batch must contain tensors, got a {type(batch).__name__} without one")
    return found


def held_cuts(policy: Policy, module: nn.Module, plugin: HybridParallelPlugin) -> list[str] | None:
    """Asks the policy for this rank's layers of the whole module and for its shared parameters. Returns the names of
    the last blocks of all stages but the last, or None if no rank's policy names layers. All ranks call it together.

    Raises UsageError if no rank or several ranks hold a block, or if the order of the blocks is not the order of the
    ranks' stages. Also raises it if shared parameters are not one parameter of the module.
    """
    with plugin.context.alarm.raised_everywhere():
        policy.set_model(module)
        policy.set_shard_config(plugin.shard_config)
        _require_shared(policy)
        held = {id(each) for layer in policy.get_held_layers() for each in layer.modules()}
        names = listed(module)
        mine = [name for name, each in module.named_modules() if name in names and id(each) in held]
        rows: list[Any] = all_gather_object(plugin.context.transport, mine)
        if not any(rows):
            return None
        order = [name for name, _ in module.named_modules() if name in names]
        for name in order:
            if len(holders := [rank for rank, row in enumerate(rows) if name in row]) == 1:
                continue
            said = f"ranks {', '.join(map(str, holders))}" if holders else "no rank"
            raise UsageError(f"{name} is held by {said}: get_held_layers must return each block on one rank")
        owner = {name: rank for rank, row in enumerate(rows) for name in row}
        runs = [(rank, list(run)[-1]) for rank, run in groupby(order, owner.__getitem__)]
        wanted = [plugin.placement.rank_of(stage) for stage in range(plugin.placement.num_stages)]
        if [rank for rank, _ in runs] != wanted:
            raise UsageError(
                f"get_held_layers gives stages to the ranks {[rank for rank, _ in runs]}, but they belong to {wanted}: "
                "use the numbers of pipeline_stage_manager.get_stage_index, or leave the method out and set "
                "num_layers_per_stage"
            )
    return [last for _, last in runs[:-1]]


def _require_shared(policy: Policy) -> None:
    for shared in policy.get_shared_params():
        if len({id(parameter) for parameter in shared.values()}) > 1:
            raise UsageError(
                f"{type(policy).__name__}.get_shared_params has different parameters: make them one in the module, as "
                "with b.weight = a.weight; its stages are then tied"
            )


def make_whole(module: nn.Module, plugin: HybridParallelPlugin) -> Pipeline:
    """Makes a Pipeline with one stage, the module itself. With zero_stage=2 its parameters are whole from a forward to
    its backward, and their gradients and optimizer states distributed over the replicas.
    """
    policy = policy_of(plugin)
    if policy is None:
        shard(module, group=plugin.context.tensor)
    else:
        sharder = ModelSharder(module, policy, plugin.shard_config)
        sharder.shard()
        module = sharder.model
    if plugin.settings.zero_stage == 2 and plugin.dp_size > 1:
        spread(module, plugin.context.mesh["data"], reshard_after_forward=False)
    return Pipeline(module, plugin.schedule(1))


def policy_of(plugin: HybridParallelPlugin) -> Policy | None:
    """The plugin's policy, if it has one. Raises UsageError if it needs one."""
    policy = plugin.settings.custom_policy
    if policy is None:
        require_whole(plugin.shard_config.sequence_parallelism_mode)
    return policy


def make_stages(module: nn.Module, plugin: HybridParallelPlugin, schedule: Schedule, example: object) -> Pipeline:
    """Makes a Pipeline over several ranks, planned with the arguments of a forward.

    Raises UsageError as `Pipeline.from_module` does, and if the policy replaces a layer that stages share.
    """
    policy = policy_of(plugin)
    cuts = (None if policy is None else held_cuts(policy, module, plugin)) or plugin.cuts
    with torch.enable_grad():
        rules = DEFAULT_RULES if policy is None else ()
        made = Pipeline.from_module(module, schedule, example, cuts=cuts, rules=rules)
    if policy is not None:
        with plugin.context.alarm.raised_everywhere():
            _carry_out(policy, made, plugin)
    return made


def _carry_out(policy: Policy, made: Pipeline, plugin: HybridParallelPlugin) -> None:
    """Applies the policy to this rank's stages; the engine notices replaced parameters in the next step."""
    assert made.cut is not None
    owners = Counter(name for stage in made.cut.stages for name in stage.owned)
    before = dict(made.named_parameters())
    for stage in made.chunks:
        ModelSharder(cast(ModuleStage, stage).root, policy, plugin.shard_config).shard()
    after = dict(made.named_parameters())
    for name, parameter in before.items():
        if owners[name] > 1 and after.get(name) is not parameter:
            raise UsageError(f"the policy replaces {name}, which several stages share: remove it from the policy")


class BoostedModel(CutModel):
    """A model boosted by a Booster. It is the whole module until its Pipeline is made, then this rank's part of it;
    `parameters()` and `train()` apply to the current one. With pp_size=1 it can be called like the module.

    Args:
        module: the whole module, the same on every rank.
        plugin: the plugin that says how to make it parallel.

    Attributes:
        criterion: `criterion(outputs, inputs)`, by default for every batch; None if there is none.
        reduces: True if gradients are averaged over the replicas.
    """

    uncut = "the model has not run a batch yet: call booster.execute_pipeline first"

    def __init__(self, module: nn.Module, plugin: HybridParallelPlugin) -> None:
        optimize(module, plugin.shard_config)
        dtype = None if plugin.half is None else plugin.half.dtype
        module.to(dtype=dtype)
        super().__init__(module)
        self.plugin = plugin
        self.criterion: Criterion | None = None
        self.reduces = True
        self._dtype = dtype
        self._entries = Entries(module)
        if plugin.pp_size == 1:
            self.inner = self._ready(make_whole(module, plugin))

    def prepare(self, batch: object) -> None:
        """Makes the Pipeline with a first batch, unless there is one already. All ranks call it together. Raises
        UsageError as `Pipeline.from_module` does.
        """
        if not self.is_cut:
            schedule, (example, _) = self.plugin.schedule(samples_in(batch)), self._read(batch)
            made = make_stages(self.inner, self.plugin, schedule, example)
            self.become(self._ready(made))

    def _ready(self, made: Pipeline) -> Pipeline:
        made.runner.read = self._read
        if self.plugin.shard_config.enable_jit_fused:
            made.compile()
        return made.train(self.inner.training)

    def _read(self, batch: object) -> tuple[dict[str, Any], object]:
        """The forward's arguments by name, from a dict of them, a tuple of all of them, or the first one; and the whole
        batch for the criterion.
        """
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        entries, _ = self._entries.of(batch if isinstance(batch, dict) else (batch, None))
        return self._cast(entries), batch

    def _cast(self, tree: Any) -> Any:
        """The tree with its floating-point tensors in the dtype of the plugin's precision."""

        def cast(leaf: Any) -> Any:
            return leaf.to(self._dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        return tree if self._dtype is None else tree_map(cast, tree)

    def whole_outputs(self, outputs: Any, batch: object, schedule: Schedule) -> Any:
        """The outputs of a batch that `schedule` ran, from those of its microbatches."""
        return whole_outputs(outputs, batch, self.pipeline, schedule) if self.plugin.pp_size > 1 else outputs

    def forward(self, *arguments: Any, **entries: Any) -> Any:
        """Calls the module. Raises UsageError with several pipeline ranks."""
        if self.plugin.pp_size > 1:
            raise UsageError(
                "this rank has only a part of the model, so the model cannot be called, nor its loss differentiated: "
                "run every batch with booster.execute_pipeline(data_iter, model, criterion, optimizer)"
            )
        [stage] = self.pipeline.runner.stages.values()
        return stage.call(*self._cast(arguments), **self._cast(entries))

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
        model.keep_groups(inner)
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.model = model
        self._grad_norm: Tensor | None = None
        self._share()
        model.when_made(self._wrap)

    def _share(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _wrap(self, pipeline: Pipeline) -> None:
        """Wraps the optimizer as the plugin says, whose groups have only this rank's parameters now."""
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
