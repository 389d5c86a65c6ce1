"""Pipe: a model that torch's tracer split, and what its stages pass to each other: also to stages further on, which
torch cannot train. Weights of several stages are tied.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from torch import fx, nn

from pipeflow.adapters.pipelining.stage import Own, StageCall
from pipeflow.core.errors import UsageError
from pipeflow.core.route import Routes, routes_among, sources_of, targets_of
from pipeflow.engine.runtime.gradients.weights import PipelineSharedModuleWrapper
from pipeflow.engine.torch_private.pipelining import PipeInfo, ir

Key = tuple[int, int | None]
"""A tensor of a traced model: the stage that returns it and its place in what that returns, None for all of it. Inputs
of the model are those of stage -1.
"""


@dataclass
class SharedInfo(PipeInfo):
    """What a stage knows of its pipe; and which weights several stages hold: for each, its name by submodule."""

    shared: list[dict[str, str]] = field(default_factory=list)


class Pipe(ir.Pipe):
    """A traced model that is split into stages. `build_stage` makes a stage for a schedule."""

    def info(self) -> SharedInfo:
        """What stages know of the pipe."""
        told = super().info()
        return SharedInfo(told.graph, told.num_stages, told.has_loss_and_backward, self.replicated_params)


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, ir.SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> Pipe:
    """Splits a module, which torch exports: where `split_spec` says, or where its forward calls `pipe_split`.

    Args:
        module: the module.
        mb_args, mb_kwargs: arguments of the module for one microbatch, as an example.
        split_spec: for names of submodules, where to split: `SplitPoint.BEGINNING` or `SplitPoint.END`.
        split_policy: splits the exported graph instead.

    Tensors may pass to any later stage, and stages may share weights. A module that torch cannot export can be cut by
    `pipeflow.Pipeline.from_module`.
    """
    made = ir.pipeline(module, mb_args, mb_kwargs, split_spec, split_policy)
    for stage in made.split_gm.children():
        _unite(stage, module)
    made.__class__ = Pipe  # the same object, whose stages know which weights they share
    return cast(Pipe, made)


def _unite(stage: nn.Module, module: nn.Module) -> None:
    """Makes names of one parameter of `module` names of one of the stage, too: torch copies the first alone."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    there = dict(stage.named_parameters(remove_duplicate=False))
    for each in names.values():
        first, *others = [name for name in each if name in there] or [""]
        for name in others:
            owner, _, last = name.rpartition(".")
            setattr(stage.get_submodule(owner), last, there[first])


class Wiring:
    """What the stages of a traced model pass to each other.

    Args:
        info: what a stage knows of its pipe.

    Attributes:
        inputs: names of the model's inputs.
        takes: per stage, its arguments.
        routes: pairs of stages that are not neighbours, of which the first sends to the second.
    """

    def __init__(self, info: PipeInfo) -> None:
        nodes = list(info.graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        calls = [node for node in nodes if node.op == "call_module"]
        self._sources: dict[fx.Node, int] = {node: index for index, node in enumerate(calls)}
        self.takes = [[self._key(arg) for arg in node.args] for node in calls]
        self.routes: Routes = routes_among(len(calls), [edge for edge in self.passes if edge[1] - edge[0] > 1])

    def _key(self, arg: Any) -> Key:
        if not isinstance(arg, fx.Node):
            raise UsageError(f"a stage of the traced model takes the constant {arg!r}: split the model elsewhere")
        if arg.op == "placeholder":
            return -1, self.inputs.index(arg)
        if arg.target is operator.getitem:
            source, place = cast(tuple[fx.Node, int], arg.args)
            return self._sources[source], place
        return self._sources[arg], None

    @cached_property
    def passes(self) -> dict[tuple[int, int], list[Key]]:
        """For each pair of stages of which the first sends to the second, the tensors in their order. The first stage
        sends inputs of the model.
        """
        found: dict[tuple[int, int], list[Key]] = {(stage, stage + 1): [] for stage in range(len(self.takes) - 1)}
        for stage, keys in enumerate(self.takes):
            for key in dict.fromkeys(keys):
                if stage:
                    found.setdefault((max(key[0], 0), stage), []).append(key)
        return found

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Key, Any]:
        """The model's inputs. Raises UsageError if one is missing, or if there are others."""
        names = [str(node.target) for node in self.inputs]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or set(given) - set(names):
            raise UsageError(f"the traced model takes {names}, got {len(args)} arguments and {sorted(kwargs)}")
        values: dict[Key, Any] = {}
        for index, (name, node) in enumerate(zip(names, self.inputs, strict=True)):
            if name in given or node.args:
                values[-1, index] = given[name] if name in given else node.args[0]
        return values


class TracedCall(StageCall):
    """A stage of a traced model as the engine calls it: takes and returns what its neighbours and routes need."""

    def __init__(self, stage: Any) -> None:
        super().__init__(stage)
        self.wiring = Wiring(stage.pipe_info)

    def forward(self, *received: Any, own: Own) -> object:
        """Calls the module for one microbatch."""
        wiring, index, (args, kwargs, microbatch) = self.wiring, self.index, own
        found = wiring.bound(args, kwargs) if self.is_first else {}
        for source, values in zip(sources_of(index, wiring.routes), received, strict=True):
            found.update(zip(wiring.passes[source, index], values, strict=True))
        if missing := [wiring.inputs[key[1] or 0].target for key in wiring.takes[index] if key not in found]:
            raise UsageError(f"the model's input {missing[0]!r} is missing: pass it to step() where the first stage is")
        output = self.call(microbatch, [found[key] for key in wiring.takes[index]], {})
        self.keep(output, microbatch)
        if self.is_last:
            return output
        found[index, None] = output
        if isinstance(output, tuple | list):
            found |= {(index, place): value for place, value in enumerate(output)}
        targets = targets_of(index, len(wiring.takes), wiring.routes)
        parts = [tuple(found[key] for key in wiring.passes[index, target]) for target in targets]
        return parts[0] if len(parts) == 1 else tuple(parts)


def tie(stages: Sequence[Any], ranks: Mapping[int, int]) -> None:
    """Ties weights that several stages of a traced model hold. All ranks call it, each with its own stages; `ranks` are
    those of all stages.
    """
    shared = getattr(getattr(stages[0], "pipe_info", None), "shared", [])
    if not shared or hasattr(stages[0], "tied"):
        return
    stages[0].tied = True  # for all schedules of the stage
    own = {stage.name: stage.submod for stage in stages}
    for names in shared:
        holders = [ranks[stages[0].get_stage_index_of_submod(name)] for name in names]
        wrapper = PipelineSharedModuleWrapper(sorted(holders))
        for name, parameter in names.items():
            if name in own:
                wrapper.register_parameter(own[name].get_parameter(parameter))


def __getattr__(name: str) -> Any:
    """Other names of torch's module."""
    return getattr(ir, name)
