"""ColossalAI's `colossalai.registry`, its `colossalai.builder` of models from registered layers, and its
`colossalai.pipeline.pipelinable`: a model as a list of its modules, cut by a policy. LAYERS and LOSSES also have
torch.nn's classes, OPTIMIZERS torch.optim's, and HOOKS those of `colossalai.trainer.hooks`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from itertools import pairwise
from typing import Any

from torch import nn, optim
from torch.nn.modules.module import register_module_module_registration_hook

from pipeflow.colossalai import hooks
from pipeflow.colossalai.lazy_init import OfThisThread
from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Part, partition_balanced, partition_uniform
from pipeflow.core.placement import Placement
from pipeflow.engine.parallel.context import context_if_launched
from pipeflow.training.build import build_stages, cut_layers
from pipeflow.training.layers import Layers, Registry, makers, named_layers
from pipeflow.training.logging import get_dist_logger

DATASETS = Registry("DATASETS")
HOOKS = Registry("HOOKS", [hooks])
LAYERS = Registry("LAYERS", [nn])
LOSSES = Registry("LOSSES", [nn])
MODELS = Registry("MODELS")
OPTIMIZERS = Registry("OPTIMIZERS", [optim])


def build_pipeline_model(layers: Layers, num_chunks: int = 1, verbose: bool = False) -> nn.Module:
    """Makes this rank's part of a model given as a list of layers, cut by `partition_uniform`. Returns a module, or an
    nn.ModuleList if there are several chunks.

    Args:
        layers: as in `pipeflow.training.build_stages`.
        num_chunks: number of stages per rank.
        verbose: if True, rank 0 logs how the layers are cut.

    Raises UsageError as partition_uniform and build_stages do.
    """
    return _built(layers, num_chunks, "layer", verbose)


def build_pipeline_model_from_cfg(
    config: Sequence[Mapping[str, Any]],
    num_chunks: int = 1,
    partition_method: str = "parameter",
    verbose: bool = False,
) -> nn.Module:
    """Like `build_pipeline_model`, from a list with one dict per layer. A rank creates only the layers of its own
    stages.

    Args:
        config: dicts; "type" is a name in LAYERS (which has torch.nn's classes) or MODELS, the other entries are the
            arguments.
        num_chunks, verbose: as in `build_pipeline_model`.
        partition_method: "layer" cuts by partition_uniform, "parameter" by the number of parameters.

    Raises UsageError for another method or an invalid dict, and as `build_pipeline_model` does.
    """
    return _built(makers(config, LAYERS, MODELS), num_chunks, partition_method, verbose)


def _built(layers: Layers, num_chunks: int, method: str, verbose: bool) -> nn.Module:
    context = context_if_launched()
    size = 1 if context is None else context.pipeline_size
    placement = Placement.looped(size, num_chunks)
    if method == "layer":
        dealt = partition_uniform(len(named_layers(layers)), size, num_chunks)
        parts = [part for chunk in zip(*dealt, strict=True) for part in chunk]
    elif method == "parameter":
        parts = cut_layers(layers, placement.num_stages, "parameters")
    else:
        raise UsageError(f'partition_method must be "layer" or "parameter", got {method!r}')
    if verbose:
        listed = (f"{stage} on rank {placement.rank_of(stage)}: {part}" for stage, part in enumerate(parts))
        get_dist_logger().info(f"the layers (start, end) of each stage: {'; '.join(listed)}", ranks=[0])
    chunks = build_stages(layers, placement, partition=parts)
    return chunks[0] if len(chunks) == 1 else chunks


Function = Callable[..., Any]
Functions = dict[str, list[Function]]
"""Functions by the name of a layer, which is its index in the whole model."""


class PipelinableModel(nn.Module):
    """A stage. Each layer gets the output before it, and the entries of the batch that its forward has parameters for.

    Args:
        layers: the layers, named by their index in the whole model.
        fronts, behinds: functions before and behind layers, by these names. A function whose parameters are entries of
            the batch replaces these for the following layers; any other changes what passes between the layers.
    """

    def __init__(self, layers: nn.Module, fronts: Functions, behinds: Functions) -> None:
        super().__init__()
        self.layers = layers
        self._functions = {name: (fronts.get(name, []), behinds.get(name, [])) for name, _ in layers.named_children()}

    def forward(self, *inputs: Any, **entries: Any) -> Any:
        for name, layer in self.layers.named_children():
            fronts, behinds = self._functions[name]
            for function in fronts:
                inputs = _through(function, inputs, entries)
            inputs = _called(layer, _names_of(layer.forward), inputs, entries)
            for function in behinds:
                inputs = _through(function, inputs, entries)
        return inputs[0] if len(inputs) == 1 else inputs


def _through(function: Function, inputs: tuple[Any, ...], entries: dict[str, Any]) -> tuple[Any, ...]:
    """The inputs after a function; or it replaces entries."""
    names = [name for name in _names_of(function) if name in entries]
    if not names:
        return _called(function, _names_of(function), inputs, {})
    made = function(**{name: entries[name] for name in names})
    entries.update(zip(names, made if isinstance(made, tuple) else [made] * len(names), strict=True))
    return inputs


def _names_of(function: Function) -> list[str]:
    """The names of its parameters; none for functions written in C, which do not tell."""
    try:
        return list(signature(function).parameters)
    except ValueError:
        return []


def _called(
    function: Function, names: list[str], inputs: tuple[Any, ...], entries: Mapping[str, Any]
) -> tuple[Any, ...]:
    taken = {name: entries[name] for name in names[len(inputs) :] if name in entries}
    made = function(*inputs[: len(names) - len(taken) if names else None], **taken)
    return made if isinstance(made, tuple) else (made,)


SPLIT = "SPLIT_NODE"


@dataclass
class Listed:
    """A list of layers.

    Attributes:
        layers: the layers.
        splits: indices of the layers before which the list is split.
        fronts, behinds: functions before and behind layers, by the layer's index as a text.
    """

    layers: list[nn.Module]
    splits: list[int] = field(default_factory=list)
    fronts: Functions = field(default_factory=lambda: defaultdict(list))
    behinds: Functions = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, exec_seq: Sequence[Any], model: nn.Module) -> Listed:
        """Reads a list of layers. An entry is the name of a module, a function that is called after the layer before
        it, or `(function, "front")` for a function that is called before the next layer. "SPLIT_NODE" separates stages.

        Raises UsageError for a name that is no module, for a function without its layer, and for another element.
        """
        made, modules, waiting = cls([]), dict(model.named_modules()), list[Function]()
        for element in exec_seq:
            function, where = element if isinstance(element, tuple) else (element, "behind")
            here = len(made.layers)
            if element == SPLIT:
                made.splits.append(here)
            elif isinstance(element, str) and element in modules:
                made.fronts[str(here)], waiting = waiting, []
                made.layers.append(modules[element])
            elif where == "front" and callable(function):
                waiting.append(function)
            elif where == "behind" and callable(function) and here:
                made.behinds[str(here - 1)].append(function)
            else:
                raise UsageError(
                    f"exec_seq has {element!r}, which is neither a module of {type(model).__name__} nor {SPLIT}, a "
                    "function behind a layer, or (function, 'front')"
                )
        if waiting:
            raise UsageError("exec_seq ends with a function for the front of a layer: put it before the layer")
        return made


class PipelinableContext(OfThisThread):
    """Cuts the model that is made inside the `with` block::

        with PipelinableContext() as pipelinable:
            model = Model()
        pipelinable.to_layer_list(["embed", "SPLIT_NODE", "head"])
        pipelinable.policy = "customized"
        stage = pipelinable.partition(1, gpc.pipeline_parallel_size, gpc.get_local_rank(ParallelMode.PIPELINE))

    Attributes:
        policy: "uniform", "balanced" by parameters, "customized" by the SPLIT_NODEs of the list, or a dict with the
            pairs (start, end) of each rank.

    Raises UsageError after the block if it made no model.
    """

    def __init__(self, policy: str | Mapping[int, Sequence[Part]] = "balanced") -> None:
        self.policy = policy
        self._parents: dict[int, nn.Module] = {}
        self._children: set[int] = set()
        self._listed = Listed([])

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        roots = [each for key, each in self._parents.items() if key not in self._children]
        if not roots and error[0] is None:
            raise UsageError("PipelinableContext: the with block made no model that consists of modules")
        self._model = roots[-1] if roots else nn.Module()

    def _register(self, hook: Callable[..., Any]) -> Any:
        return register_module_module_registration_hook(hook)

    def _registered(self, module: nn.Module, name: str, value: nn.Module | None) -> None:
        self._parents.setdefault(id(module), module)
        self._children.add(id(value))

    @property
    def layers_count(self) -> int:
        """Number of layers in the list."""
        return len(self._listed.layers)

    @property
    def funcs_count(self) -> int:
        """Number of functions in the list."""
        return sum(map(len, [*self._listed.fronts.values(), *self._listed.behinds.values()]))

    def to_layer_list(self, exec_seq: Sequence[Any] | None = None) -> None:
        """Sets the list of layers, in the order in which they are called.

        Args:
            exec_seq: elements as in `Listed.of`; by default the model's children, and those of its lists, in the order
                in which they were registered.

        Raises UsageError as `Listed.of` does.
        """
        if exec_seq is None:
            lists = nn.ModuleList | nn.Sequential
            children = [each.children() if isinstance(each, lists) else [each] for each in self._model.children()]
            self._listed = Listed([layer for each in children for layer in each])
        else:
            self._listed = Listed.of(exec_seq, self._model)

    def partition(self, num_chunks: int, pipeline_size: int, rank: int) -> nn.Module:
        """Returns this rank's layers: a PipelinableModel, or an nn.ModuleList of one per chunk. All ranks call it
        together.

        Args:
            num_chunks: number of stages per rank.
            pipeline_size, rank: those of the launch.

        Raises UsageError for other sizes, an unknown policy, and a policy that does not fit the layers.
        """
        context = context_if_launched()
        place = (1, 0) if context is None else (context.pipeline_size, context.pipeline_rank)
        if (pipeline_size, rank) != place:
            raise UsageError(f"this is rank {place[1]} of a pipeline of {place[0]}, got {rank} of {pipeline_size}")
        dealt = self._dealt(num_chunks, pipeline_size)
        parts = [part for chunk in zip(*dealt, strict=True) for part in chunk]
        made = build_stages(self._listed.layers, Placement.looped(pipeline_size, num_chunks), partition=parts)
        chunks = nn.ModuleList(PipelinableModel(each, self._listed.fronts, self._listed.behinds) for each in made)
        return chunks[0] if num_chunks == 1 else chunks

    def _dealt(self, num_chunks: int, pipeline_size: int) -> Sequence[Sequence[Part]]:
        """The ranges of layers of each rank, by the policy. Raises UsageError for an unknown or unfit policy."""
        if isinstance(self.policy, Mapping):
            if lacking := [rank for rank in range(pipeline_size) if rank not in self.policy]:
                raise UsageError(f"the policy lacks rank {lacking[0]}: give parts to each of {pipeline_size} ranks")
            return [self.policy[rank] for rank in range(pipeline_size)]
        if self.policy == "uniform":
            return partition_uniform(self.layers_count, pipeline_size, num_chunks)
        if self.policy == "balanced":
            counts = [sum(each.numel() for each in layer.parameters()) for layer in self._listed.layers]
            return partition_balanced(counts, pipeline_size, num_chunks)
        if self.policy != "customized":
            raise UsageError(f"policy must be uniform, balanced, customized or a dict, got {self.policy!r}")
        ends = [0, *self._listed.splits, self.layers_count]
        if len(ends) - 1 != pipeline_size or num_chunks != 1:
            raise UsageError(
                f"exec_seq has {len(ends) - 2} {SPLIT}, so {len(ends) - 1} stages, for {pipeline_size} ranks with "
                f"{num_chunks} chunks each"
            )
        return [[part] for part in pairwise(ends)]
