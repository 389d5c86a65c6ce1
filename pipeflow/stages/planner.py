"""Planner: the plans of one module by the shapes of its batches. Each plan is made when the first such batch comes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, zip_longest
from threading import RLock
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.stages.blocks import Blocks, Cuts, blocks_of, choose, labels_of
from pipeflow.stages.copies import Fakes
from pipeflow.stages.cut import completed, make_plan
from pipeflow.stages.entries import Entries, Stateful
from pipeflow.stages.flow import LEAST, RANDOM, Flow
from pipeflow.stages.isolation import host_random_state, isolated
from pipeflow.stages.plan import CutPlan
from pipeflow.stages.recorder import decides, record
from pipeflow.stages.trace import Batch, Call, Trace

_ONE_AT_A_TIME = RLock()  # torch's fake tensors share caches among threads
_OWN = "the module's own forward"
_ALMOST_ONE = 1 - LEAST
_SEEDS = 4  # of Python and NumPy, to find out whether a forward branches on their numbers


class Planner:
    """Makes and keeps the plans of one module for a number of stages.

    Args:
        module: the whole module. It is copied without memory, and never run or changed.
        stages: number of stages.
        device: device on which the stages will run; by default the CPU.
        cuts, blocks: where to cut; see `pipeflow.stages.blocks`.
        placement: ranks of the stages, by which routes are chosen. By default each stage is on its own rank.
        has_criterion: True if the loss is not the module's own; see Entries.

    Attributes:
        entries: the parameters of the module's forward.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: int,
        *,
        device: torch.device | None = None,
        cuts: Cuts = None,
        blocks: Blocks = None,
        placement: Placement | None = None,
        has_criterion: bool = False,
    ) -> None:
        self.entries = Entries(module, has_criterion=has_criterion)
        self._stages, self._cuts, self._blocks = stages, cuts, blocks
        self._device = torch.device("cpu") if device is None else device
        self._module = ref(module)
        with _ONE_AT_A_TIME:
            self._fakes = Fakes(module, self._device)
        self._placement = Placement.linear(stages) if placement is None else placement
        self._first: CutPlan | None = None
        self._plans: dict[Hashable, CutPlan] = {}
        self._forward: Callable[..., Any] | None = None  # in place of the module's own

    def __deepcopy__(self, memo: object) -> Planner:
        return self

    def plan(self, entries: Mapping[str, Any], like: nn.Module | None = None) -> CutPlan:
        """The plan for a microbatch with these entries. `like`, the module or a copy of it, determines training or
        evaluation.

        Raises UsageError if the module cannot be cut, or not in the same way as for the first batch.
        """
        key = self._key(entries, self._fakes.module.training if like is None else like.training)
        plan = self._plans.get(key)
        if plan is None:
            with _ONE_AT_A_TIME:
                if like is not None:
                    _set_modes(self._fakes.module, like)
                plan = self._made(entries)
                assert plan is not None
                if self._first is None:
                    plan = self._first = completed(plan, self._fakes, self._in_training(entries, plan))
                self._plans[key] = self._fitting(plan)
        return plan

    @contextmanager
    def computing(self, forward: Callable[..., Any], stages: Iterable[nn.Module]) -> Iterator[None]:
        """Inside the `with` block, `forward(module, **entries)` takes the place of the module's own forward, in plans
        and in `stages`, which are copies of the module. It calls the module once. The cuts and the owners of parameters
        stay those of the first batch.
        """
        modules = [self._fakes.module, *stages]
        before = self.entries, self._forward
        for module in modules:
            vars(module)["forward"] = partial(forward, module)
        self.entries, self._forward = Entries(self._fakes.module), forward
        try:
            yield
        finally:
            for module in modules:
                vars(module).pop("forward", None)
            self.entries, self._forward = before

    @property
    def module(self) -> nn.Module:
        """The copy of the module without memory."""
        return self._fakes.module

    def blocks(self) -> list[str]:
        """The names of the blocks after which the first batch's forward can be cut."""
        assert self._first is not None
        trace = self._first.trace
        found = blocks_of(trace, self._fakes.module, self._blocks, self._stages)
        return list(dict.fromkeys(call.name for call in found))

    def trace_of(self, module: nn.Module, entries: Mapping[str, Any], change: Callable[[nn.Module], None]) -> Trace:
        """The forward of a copy of `module` without memory, after `change` was applied to the copy."""
        with _ONE_AT_A_TIME, isolated():
            fakes = Fakes(module, self._fakes.device)
            with fakes.mode:
                change(fakes.module)
            return record(fakes, self.entries.arguments(tree_map(_copied, dict(entries))))

    def observed(self, entries: Mapping[str, Any], within: Callable[[Flow, Fakes], Any]) -> tuple[Trace, list[Call]]:
        """The forward of a microbatch, in the context that `within` makes, and the blocks after which it can be cut."""
        with _ONE_AT_A_TIME, isolated():
            batch = self.entries.arguments(tree_map(_copied, dict(entries)))
            trace = record(self._fakes, batch, within=lambda flow: within(flow, self._fakes))
            return trace, blocks_of(trace, self._fakes.module, self._blocks)

    def _in_training(self, entries: Mapping[str, Any], first: CutPlan) -> CutPlan | None:
        """The training plan of a module that is in evaluation, or None: it may need more parameters, such as an
        embedding for masked entries.
        """
        module = self._fakes.module
        if module.training:
            return None
        modes = [each.training for each in module.modules()]
        module.train()
        self._first = first
        try:
            return self._made(entries, first.trace)
        except UsageError:
            return None  # training it will raise the error
        finally:
            self._first = None
            for each, mode in zip(module.modules(), modes, strict=True):
                each.training = mode

    def _made(self, entries: Mapping[str, Any], known: Trace | None = None) -> CutPlan | None:
        """The plan, or None if the same parameters flow into the output of each call as in the trace `known`."""

        def batch() -> Batch:
            plain = {name: each.planned() if isinstance(each, Stateful) else each for name, each in entries.items()}
            return self.entries.arguments(tree_map(_copied, plain))

        with isolated():
            trace = self._trace(batch)
            if self._first is None and self._made_afresh(trace):
                trace = self._trace(batch)
            if known is not None and self._flows(trace) == self._flows(known):
                return None
            cuts: Sequence[Call | None] = (
                self._chosen(trace) if self._first is None else _same_calls(trace, self._first)
            )
            _require_same_guesses(trace, self._fakes, [cut for cut in cuts if cut is not None], batch)
            routes = None if self._first is None else self._first.routes
            return make_plan(self._fakes, trace, cuts, batch, self._placement, routes)

    def _flows(self, trace: Trace) -> list[tuple[str, int, list[int]]]:
        mine = self._fakes.of_parameters
        return [(call.name, call.turn, [look.sources & mine for look in call.looks.values()]) for call in trace.calls]

    def _made_afresh(self, trace: Trace) -> bool:
        """Copies the module again, and returns True, if the first trace may have filled a cache. A cache of the
        module's class is filled by the first forward; later forwards leak nothing into it.
        """
        module, unknown = self._module(), self._fakes.of_parameters | RANDOM
        if module is None or all(leak.sources & unknown for leak in trace.leaks):
            return False
        before, self._fakes = self._fakes, Fakes(module, self._device)
        _set_modes(self._fakes.module, before.module)
        return True

    def _chosen(self, trace: Trace) -> list[Call]:
        try:
            return choose(trace, self._fakes.module, self._blocks, self._stages, self._cuts)
        except UsageError as error:
            if 0 not in trace.guesses:
                raise
            raise UsageError(f"{error}. {decides(_OWN)}") from error

    def _trace(self, batch: Callable[[], Batch]) -> Trace:
        """Raises UsageError for a forward that chooses the modules that it calls by random numbers."""
        before = host_random_state()
        trace = record(self._fakes, batch())
        others: Iterator[Trace] = iter(())
        if host_random_state() != before:
            others = (record(self._fakes, batch()) for seed in range(_SEEDS) if _seed(seed))
        if trace.decided:
            others = chain([record(self._fakes, batch(), draw=_ALMOST_ONE)], others)
        for other in others:
            pairs = zip_longest(trace.calls_in_order(), other.calls_in_order())
            if different := next((one or two for one, two in pairs if one != two), None):
                name = trace.calls[different[0]].name or "the module"
                raise UsageError(
                    f"{name} chooses by a random number which modules it calls (LayerDrop, stochastic depth), so "
                    "stages cannot know what the others do: set its probability to 0"
                )
        return trace

    def _fitting(self, plan: CutPlan) -> CutPlan:
        assert self._first is not None
        for stage, (first, mine) in enumerate(zip(self._first.stages, plan.stages, strict=True)):
            if more := mine.owned - first.owned:
                raise UsageError(
                    f"for a batch of these shapes stage {stage} needs {min(more)}, which it does not have: make the "
                    "Pipeline with an example batch of these shapes"
                )
        return plan

    def _key(self, entries: Mapping[str, Any], training: bool) -> Hashable:
        device = self._fakes.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return tuple((name, _look(entry)) for name, entry in entries.items()), training, autocast, self._forward


def _set_modes(module: nn.Module, like: nn.Module) -> None:
    for mine, its in zip(module.modules(), like.modules(), strict=False):
        mine.training = its.training


def _seed(seed: int) -> bool:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    return True


def _same_calls(trace: Trace, first: CutPlan) -> list[Call | None]:
    """The calls after which `first` was cut, with None for first ones that are skipped. Raises UsageError if later ones
    are skipped.
    """
    calls, before = trace.calls[1:], first.trace.calls[1:]
    by_label = dict(zip(labels_of(calls), calls, strict=True))
    labels = dict(zip((call.index for call in before), labels_of(before), strict=True))
    names = [labels[cut.index] for cut in first.cuts]
    found = [by_label.get(name) for name in names]
    made = [call is not None for call in found]
    if made != sorted(made):
        raise UsageError(
            f"for a batch of these shapes the forward does not call {names[-1 - made[::-1].index(False)]}, after which "
            "it was cut: make the Pipeline with an example batch of these shapes"
        )
    return found


def _require_same_guesses(trace: Trace, fakes: Fakes, cuts: Sequence[Call], batch: Callable[[], Batch]) -> None:
    """Raises UsageError if guessed values decide what happens before the last cut, except within a call."""
    if not trace.guesses or not cuts:
        return
    other = record(fakes, batch(), guess=False)
    end = cuts[-1].exit
    mine, its = [call for call in _outside_guesses(trace) if call.enter < end], _outside_guesses(other)
    same = len(mine) <= len(its) and all(
        (one.name, one.turn) == (two.name, two.turn) and (one.exit > end or _looks(one) == _looks(two))
        for one, two in zip(mine, its, strict=False)
    )
    if not same:
        raise UsageError(decides(trace.calls[min(trace.guesses)].name or _OWN))


def _outside_guesses(trace: Trace) -> list[Call]:
    """The calls, except those within a call in which values were guessed."""
    within = [index for index in trace.guesses if index]
    return [
        call
        for call in trace.calls[1:]
        if not any(call.index != index and trace.is_within(call.index, index) for index in within)
    ]


def _looks(call: Call) -> list[tuple[Any, ...]]:
    return [look[:3] for look in call.looks.values()]


def _look(entry: object) -> Hashable:
    if isinstance(entry, Stateful):
        return entry.key
    if isinstance(entry, Tensor):
        return entry.shape, entry.dtype
    if isinstance(entry, bool | int | float | str | None):
        return entry
    if type(entry) in (list, tuple):
        return type(entry), *map(_look, entry)  # type: ignore[call-overload]  # an iterable
    leaves, spec = tree_flatten(entry)
    return str(type(entry)) if spec.is_leaf() else (str(spec), *map(_look, leaves))


def _copied(leaf: object) -> object:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
