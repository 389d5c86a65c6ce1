"""Planner: the plans of one module by the shapes of its batches. Each plan is made when the first such batch comes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, zip_longest
from threading import RLock
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.engine.stages.blocks import Blocks, Cuts, blocks_of, choose, labels_of
from pipeflow.engine.stages.copies import Fakes
from pipeflow.engine.stages.entries import Entries, Stateful
from pipeflow.engine.stages.flow import LEAST, RANDOM, Flow
from pipeflow.engine.stages.isolation import host_random_state, isolated
from pipeflow.engine.stages.module_state import counts_of, set_counts
from pipeflow.engine.stages.plan import CutPlan, PlanKey
from pipeflow.engine.stages.stage_cut import completed, make_plan
from pipeflow.engine.stages.trace import Batch, Call, Trace, decides, record
from pipeflow.engine.torch_private.trees import tree_map

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
        cuts, blocks: where to cut; see `pipeflow.engine.stages.blocks`.
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
        self._first_key: PlanKey | None = None
        self._differs = ""  # what differs in the batch that is planned from the first one
        self._plans: dict[PlanKey, CutPlan] = {}
        self._forward: Callable[..., Any] | None = None  # in place of the module's own
        self.split: set[tuple[str, str]] = set()  # numbers that are others on a tensor rank, such as those of heads

    def __deepcopy__(self, memo: object) -> Planner:
        return self

    def plan(self, entries: Mapping[str, Any], like: nn.Module | None = None) -> CutPlan:
        """The plan for a microbatch with these entries. `like`, the module or a copy of it, determines training or
        evaluation.

        Raises UsageError if the module cannot be cut, or not in the same way as for the first batch.
        """
        grads = torch.is_grad_enabled() or self._first is None
        training = (self._fakes.module if like is None else like).training
        key = PlanKey.of(entries, self._fakes.device.type, self._forward, training=training, grads=grads)
        plan = self._plans.get(key)
        if plan is None:
            with _ONE_AT_A_TIME:
                if like is not None:
                    _set_modes(self._fakes.module, like)
                    counts = counts_of(like)
                    set_counts(self._fakes.module, {key: counts[key] for key in counts.keys() - self.split})
                self._differs = "" if self._first_key is None else key.unlike(self._first_key)
                plan = self._made(entries, grads=grads)
                assert plan is not None
                if self._first is None:
                    self._first_key = key
                    plan = self._first = completed(plan, self._fakes, self._otherwise(entries, plan))
                self._plans[key] = self._fitting(plan)
                plan.trace.seal(self.sealed(plan.trace))
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
        return _names(found)

    def sealed(self, trace: Trace) -> list[str]:
        """The names of modules behind whose outputs it is read how a loss is computed: of the blocks or, in a forward
        that has none, of all modules that it calls itself.
        """
        try:
            return self.blocks()
        except UsageError:
            return [call.name for call in trace.calls[1:] if not call.parent]

    def trace_of(self, module: nn.Module, entries: Mapping[str, Any], change: Callable[[nn.Module], None]) -> Trace:
        """The forward of a copy of `module` without memory, after `change` was applied to the copy."""
        with _ONE_AT_A_TIME, isolated():
            fakes = Fakes(module, self._fakes.device)
            with fakes.mode:
                change(fakes.module)
            return record(fakes, self._arguments(entries))

    def observed(self, entries: Mapping[str, Any], within: Callable[[Flow, Fakes], Any]) -> tuple[Trace, list[Call]]:
        """The forward of a microbatch, in the context that `within` makes, and the blocks after which it can be cut."""
        with _ONE_AT_A_TIME, isolated():
            trace = self._recorded(self._arguments(entries), within=lambda flow: within(flow, self._fakes))
            return trace, blocks_of(trace, self._fakes.module, self._blocks)

    def _arguments(self, entries: Mapping[str, Any]) -> Batch:
        """The arguments of a forward that is planned, which it may change."""
        plain = {name: each.planned() if isinstance(each, Stateful) else each for name, each in entries.items()}
        return self.entries.arguments(tree_map(_copied, plain))

    def _otherwise(self, entries: Mapping[str, Any], first: CutPlan) -> list[CutPlan]:
        """The plans of the first batch in training, if the module is in evaluation, and in evaluation, as far as they
        may need more parameters: a mask of entries has an embedding that training alone uses.
        """
        found = [] if self._fakes.module.training else [self._in_mode(entries, first, training=True)]
        found.append(self._in_mode(entries, first, training=False))
        return [each for each in found if each is not None]

    def _in_mode(self, entries: Mapping[str, Any], first: CutPlan, *, training: bool) -> CutPlan | None:
        module = self._fakes.module
        modes = [each.training for each in module.modules()]
        module.train(training)
        self._first = first
        try:
            return self._made(entries, first.trace, grads=training)
        except Exception:
            return None  # a step in that mode will raise the error
        finally:
            self._first = None
            for each, mode in zip(module.modules(), modes, strict=True):
                each.training = mode

    def _made(self, entries: Mapping[str, Any], known: Trace | None = None, *, grads: bool = True) -> CutPlan | None:
        """The plan, or None if the same parameters flow into the output of each call as in the trace `known`."""
        batch = partial(self._arguments, entries)
        with isolated(grads=grads):
            trace = self._trace(batch)
            if self._first is None and self._made_afresh(trace):
                trace = self._trace(batch)
            self._require_no_state(trace, batch)
            if known is not None and self._flows(trace) == self._flows(known):
                return None
            cuts: Sequence[Call | None] = (
                self._chosen(trace) if self._first is None else _same_calls(trace, self._first, self._differs)
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

    def _require_no_state(self, trace: Trace, batch: Callable[[], Batch]) -> None:
        """Raises UsageError for a forward that reads what it kept in an attribute outside of the blocks, since only the
        last stage keeps it.
        """
        if self._stages == 1 or not trace.kept:
            return
        blocks = _names(blocks_of(trace, self._fakes.module, self._blocks))
        kept = [name for name in trace.kept if not any(f"{name}.".startswith(f"{block}.") for block in blocks)]
        if not kept:
            return
        with self._fakes.unchanged():
            first, second = (record(self._fakes, batch()).returned for _ in range(2))
        if first.looks().keys() != second.looks().keys() or any(
            look.identity != second.looks()[leaf].identity for leaf, look in first.looks().items()
        ):
            raise UsageError(
                f"the forward's output depends on what it keeps in {kept[0]}, which other stages do not have: take it "
                "as an argument of the forward, and return it"
            )

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
        trace = self._recorded(batch())
        others: Iterator[Trace] = iter(())
        if host_random_state() != before and not self._fakes.draws:
            self._fakes.draws = True
            trace = self._recorded(batch())
        if self._fakes.draws:
            others = (self._recorded(batch()) for seed in range(_SEEDS) if _seed(seed))
        if trace.decided:
            others = chain([self._recorded(batch(), draw=_ALMOST_ONE)], others)
        for other in others:
            pairs = zip_longest(trace.calls_in_order(), other.calls_in_order())
            if different := next((one or two for one, two in pairs if one != two), None):
                name = trace.calls[different[0]].name or "the module"
                raise UsageError(
                    f"{name} chooses by a random number which modules it calls (LayerDrop, stochastic depth), so "
                    "stages cannot know what the others do: set its probability to 0"
                )
        return trace

    def _recorded(self, batch: Batch, **options: Any) -> Trace:
        """The record of a forward, after which the copy is as before."""
        with self._fakes.unchanged():
            return record(self._fakes, batch, **options)

    def _fitting(self, plan: CutPlan) -> CutPlan:
        assert self._first is not None
        for stage, (first, mine) in enumerate(zip(self._first.stages, plan.stages, strict=True)):
            if more := mine.owned - first.owned:
                raise UsageError(
                    f"for a batch like this one stage {stage} needs {min(more)}, which it does not have: "
                    f"{self._differs}. Make the Pipeline with an example like this batch"
                )
        return plan


def _names(calls: Iterable[Call]) -> list[str]:
    """The names of the called modules."""
    return list(dict.fromkeys(call.name for call in calls))


def _set_modes(module: nn.Module, like: nn.Module) -> None:
    for mine, its in zip(module.modules(), like.modules(), strict=False):
        mine.training = its.training


def _seed(seed: int) -> bool:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    return True


def _same_calls(trace: Trace, first: CutPlan, differs: str) -> list[Call | None]:
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
            f"for a batch like this one the forward does not call {names[-1 - made[::-1].index(False)]}, after which "
            f"it was cut: {differs}. Make the Pipeline with an example like this batch"
        )
    return found


def _require_same_guesses(trace: Trace, fakes: Fakes, cuts: Sequence[Call], batch: Callable[[], Batch]) -> None:
    """Raises UsageError if guessed values decide what happens before the last cut, except within a call."""
    if not trace.guesses or not cuts:
        return
    with fakes.unchanged():
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


def _copied(leaf: object) -> object:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
