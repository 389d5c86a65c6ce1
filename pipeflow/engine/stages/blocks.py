"""Blocks: the calls after which a forward can be cut, the choice of cuts among them, and the stages through which
tensors then pass, so that no rank receives one twice. Must not contain: what a cut means for the stages around it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from pipeflow.core.errors import UsageError
from pipeflow.core.partition import partition_balanced
from pipeflow.core.placement import Placement
from pipeflow.core.route import Routes, routes_among, sources_of, targets_of, way
from pipeflow.engine.stages.script import TensorRef
from pipeflow.engine.stages.trace import Call, Trace

Blocks = str | type[nn.Module] | Sequence[str] | None
"""The blocks: a class or its name, names of modules, or None for the default rule."""

Cuts = str | Sequence[str] | Sequence[float] | None
"""Where to cut: "uniform" or None, a cost per block, or the names of the blocks before the cuts."""

_PROPOSED = 8  # modules in an error
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def blocks_of(trace: Trace, module: nn.Module, blocks: Blocks, stages: int = 1) -> list[Call]:
    """The calls after which the forward can be cut, in order. By default those of the children of outermost
    nn.ModuleLists; if these are fewer than `stages`, also of nn.ModuleDicts, and then also of nn.Sequentials.

    Calls within a custom autograd.Function, such as those of reversible blocks, are left out: no gradient flows between
    them. Raises UsageError if there are none.
    """
    if blocks is not None:
        found = _outermost(trace, _named(module, blocks))
        if not found:
            raise UsageError(f"blocks={blocks!r} matches no module that the forward calls")
        return _outside_functions(found) or [require_outside(call) for call in found]
    names, within, most = set[str](), list[Call](), list[Call]()
    for kind in _LISTS:
        names |= _children(module, kind)
        calls = _outermost(trace, names)
        found = _outside_functions(calls)
        if len(found) >= stages:
            return found
        most = max(most, found, key=len)
        within += calls
    for call in within:
        require_outside(call)
    if most:
        return most
    raise UsageError(
        f"there is no place to cut a {type(module).__name__}: its forward calls no children of an nn.ModuleList or "
        f"nn.Sequential; {_proposal(trace)}"
    )


def _proposal(trace: Trace) -> str:
    """Says which modules could be blocks: those that the outermost module with several calls calls."""
    calls = [call for call in trace.calls if call.parent == 0]
    while len(calls) == 1 and calls[0].function is None:
        calls = [call for call in trace.calls if call.parent == calls[0].index]
    names = list(dict.fromkeys(call.name for call in _outside_functions(calls)))
    if len(names) < 2:
        return 'name the class of its blocks, as in blocks="TransformerLayer"'
    return f"name the modules after which it can be cut, as in blocks={names[:_PROPOSED]}"


def _outside_functions(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.function is None]


def require_outside(call: Call) -> Call:
    """Returns the call. Raises UsageError if it lies within a custom autograd.Function."""
    if call.function is not None:
        raise UsageError(
            f"{call.name} is called within {call.function}, a custom autograd.Function whose backward computes the "
            "gradients of all its blocks on one rank, so the forward cannot be cut there: switch that function off "
            "(such as reversible=False), or cut outside of it with blocks= or cuts="
        )
    return call


def listed(module: nn.Module) -> set[str]:
    """The names of the children of outermost nn.ModuleLists; if there are none, of nn.ModuleDicts, or else of
    nn.Sequentials.
    """
    return next((found for kind in _LISTS if (found := _children(module, kind))), set())


def _named(module: nn.Module, blocks: str | type[nn.Module] | Sequence[str]) -> set[str]:
    if isinstance(blocks, str | type):
        called = blocks if isinstance(blocks, str) else blocks.__name__
        return {name for name, each in module.named_modules() if type(each).__name__ == called}
    there = dict(module.named_modules())
    for name in blocks:
        if name not in there:
            raise UsageError(f"blocks has {name!r}, which is no module of the {type(module).__name__}")
    return set(blocks)


def _children(module: nn.Module, kind: type[nn.Module], prefix: str = "") -> set[str]:
    """The names of the children of outermost lists; for a list in a list, those of the inner one."""
    found: set[str] = set()
    is_list = isinstance(module, kind)
    if isinstance(module, ParametrizationList):
        return found  # its children make one weight
    for name, child in module.named_children():
        full = f"{prefix}.{name}".lstrip(".")
        if is_list and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            found.add(full)
        else:
            found |= _children(child, kind if not is_list else type(child), full)
    return found


def _outermost(trace: Trace, names: Collection[str]) -> list[Call]:
    found: list[Call] = []
    for call in trace.calls:
        if call.name in names and not any(trace.is_within(call.index, other.index) for other in found[-1:]):
            found.append(call)
    return found


def labels_of(calls: Sequence[Call]) -> list[str]:
    """The names of calls for users: the module's name, followed by `:0`, `:1`, ... if it is called several times."""
    times = Counter(call.name for call in calls)
    seen: Counter[str] = Counter()
    labels = []
    for call in calls:
        labels.append(call.name if times[call.name] == 1 else f"{call.name}:{seen[call.name]}")
        seen[call.name] += 1
    return labels


def choose(trace: Trace, module: nn.Module, blocks: Blocks, stages: int, cuts: Cuts) -> list[Call]:
    """The last block of every stage except the last one. `module` is the module of the trace.

    Raises UsageError if there are fewer blocks than stages, or if the number of costs is not the number of blocks. Also
    raises it if the names are not names of calls in the order of the calls.
    """
    listed: list[Any] | None = None if cuts is None or isinstance(cuts, str) else list(cuts)
    if listed is None and cuts not in (None, "uniform"):
        raise UsageError(f'cuts must be "uniform", a cost per block or a list of names, got {cuts!r}')
    if listed is not None and all(isinstance(cut, str) for cut in listed) and (listed or stages == 1):
        return _by_name(trace, module, blocks, stages, [str(cut) for cut in listed])
    if stages == 1 and blocks is None and listed is None:
        return []
    found = blocks_of(trace, module, blocks, stages)
    if len(found) < stages:
        raise UsageError(
            f"{len(found)} blocks cannot fill {stages} stages ({', '.join(labels_of(found))}): use fewer stages, or "
            "choose smaller blocks with blocks="
        )
    costs = [1.0] * len(found) if listed is None else [float(cost) for cost in listed]
    if len(costs) != len(found):
        raise UsageError(f"cuts has {len(costs)} costs for {len(found)} blocks: {', '.join(labels_of(found))}")
    ends = [end for [(_, end)] in partition_balanced(costs, stages)]
    return [found[end - 1] for end in ends[:-1]]


def _by_name(trace: Trace, module: nn.Module, blocks: Blocks, stages: int, cuts: Sequence[str]) -> list[Call]:
    calls = trace.calls[1:]
    by_label = dict(zip(labels_of(calls), calls, strict=True))
    if len(cuts) != stages - 1:
        raise UsageError(f"{stages} stages have {stages - 1} cuts between them, got {len(cuts)}: {list(cuts)}")
    for cut in cuts:
        if cut not in by_label:
            places = ", ".join(labels_of(blocks_of(trace, module, blocks, stages)))
            raise UsageError(f"cuts has {cut!r}, which the forward does not call; it can be cut after {places}")
    chosen = [require_outside(by_label[cut]) for cut in cuts]
    for before, after in pairwise(chosen):
        if after.exit <= before.exit:
            raise UsageError(f"cuts must follow the order of the forward: {after.name!r} ends before {before.name!r}")
    return chosen


class Ways(NamedTuple):
    """The tensors that pass to and from one stage.

    Attributes:
        takes: for each stage from which it receives, the tensors, in the order of its inputs.
        gives: for each stage to which it sends, the tensors, in the order of its outputs.
    """

    takes: Mapping[int, tuple[TensorRef, ...]]
    gives: Mapping[int, tuple[TensorRef, ...]]


def lay(
    makes: Sequence[Sequence[TensorRef]],
    needs: Sequence[Sequence[TensorRef]],
    placement: Placement,
    routes: Routes | None,
) -> tuple[tuple[Ways, ...], Routes]:
    """The ways of the tensors that each stage makes for later ones, and needs from earlier ones, and the routes that
    they use. If `routes` is None, the best ones are chosen; else tensors without one pass through the stages between.
    """
    passing: dict[tuple[int, int], set[TensorRef]] = defaultdict(set)
    for maker, values in enumerate(makes):
        for value in values:
            users = [stage for stage, needed in enumerate(needs) if value in needed]
            for stage, source in way(maker, users, placement, routes).items():
                passing[source, stage].add(value)
    stages = len(makes)
    if routes is None:
        routes = routes_among(stages, [edge for edge in passing if edge[1] > edge[0] + 1])
    between = {edge: tuple(sorted(values)) for edge, values in passing.items()}
    ways = [
        Ways(
            {source: between.get((source, stage), ()) for source in sources_of(stage, routes)},
            {target: between.get((stage, target), ()) for target in targets_of(stage, stages, routes)},
        )
        for stage in range(stages)
    ]
    return tuple(ways), routes
