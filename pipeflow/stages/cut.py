"""Makes the plan of a forward that is cut: runs the stages on fake tensors, from the last to the first, and records
which sources flow into their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.route import Routes
from pipeflow.stages.copies import Fakes
from pipeflow.stages.plan import CutPlan, StagePlan
from pipeflow.stages.recorder import decides
from pipeflow.stages.script import Node, Script, TensorRef
from pipeflow.stages.stage_cut import StageCut, is_free
from pipeflow.stages.trace import Batch, Call, Trace
from pipeflow.stages.ways import lay

# Theory of operation
#
# From the last stage to the first: `wanted` are the tensors that the stages after it receive. A stage sends those that
# it makes itself, and the stage before is asked for the rest, so each tensor is sent by the stage that computes it.
#
# Models may collect outputs of their blocks by hooks (all hidden states, say). A hook of a replaced call can be run on
# the received tensor, but each replay means one more tensor to send. So a stage is planned without replays first. If it
# then does not compute what the whole forward does, it is planned with the replays of hooks that surely collect, and at
# last with all.

_EMPTY = StagePlan(Script(Node(), frozenset()), (), (), frozenset(), frozenset(), is_empty=True)


def make_plan(
    fakes: Fakes,
    trace: Trace,
    cuts: Sequence[Call | None],
    batch: Callable[[], Batch],
    placement: Placement,
    routes: Routes | None,
) -> CutPlan:
    """The plan of a trace that is cut after the calls `cuts`, of which the first ones may be None.

    `batch` makes a new copy of the batch of the trace. Tensors pass between stages on `routes`; if these are None, on
    the best routes for the `placement`. Raises UsageError if a cut would change what the module computes.
    """
    wanted: tuple[TensorRef, ...] = ()  # needed by later stages
    stages: list[StagePlan] = []
    made = [cut for cut in cuts if cut is not None]
    ends = [cut.exit for cut in made]
    for start, end in reversed(list(pairwise([None, *made, None]))):
        _require_known(trace, start)
        planned = _planned(fakes, trace, start, end, wanted, batch, ends)
        stages.insert(0, planned)
        wanted = tuple({*wanted, *planned.receives}.difference(planned.makes))
    stages = [*[_EMPTY] * (len(cuts) - len(made)), *stages]
    _require_separate_buffers(stages, placement)
    laid = lay([stage.makes for stage in stages], [stage.receives for stage in stages], placement, routes)
    return CutPlan(tuple(stages), trace, tuple(made), *laid)


def _planned(
    fakes: Fakes,
    trace: Trace,
    start: Call | None,
    end: Call | None,
    wanted: tuple[TensorRef, ...],
    batch: Callable[[], Batch],
    ends: Sequence[int],
) -> StagePlan:
    """The plan of the stage between two cuts. Hooks see calls that are replaced only if the stage does not compute the
    same without: first those hooks that surely collect tensors, then all.
    """
    attempts: list[list[Call]] = [[]]
    if start is not None:
        attempts += [trace.seen_until(start, trace.collectors), trace.seen_until(start)]
    raised: Exception | None = None
    for attempt, seen in enumerate(attempts):
        if attempt and seen in attempts[:attempt]:
            continue
        try:
            _require_no_leak(trace, fakes, start, replays=bool(seen))
            return StageCut(fakes, trace, start, end, wanted, seen, ends).plan(batch())
        except Exception as error:
            raised = error if raised is None or attempt == 1 else raised
    assert raised is not None
    raise raised


def _require_separate_buffers(stages: Sequence[StagePlan], placement: Placement) -> None:
    """Raises UsageError if two stages of a rank write to the same buffer: each repeats the writes of the forward."""
    for rank in range(placement.num_ranks):
        writers: dict[str, int] = {}
        for stage in placement.stages_of(rank):
            for name in sorted(stages[stage].writes):
                first = writers.setdefault(name, stage)
                if first != stage:
                    raise UsageError(
                        f"the forward writes to the buffer {name} outside of its blocks, so stages {first} and "
                        f"{stage}, both on rank {rank}, would each write to it: write to it within a block, or use a "
                        "schedule with one stage per rank"
                    )


def completed(plan: CutPlan, fakes: Fakes, also: CutPlan | None) -> CutPlan:
    """The plan, whose stages own in addition what they need in `also`. Parameters and buffers that no stage needs
    belong to the last one.
    """
    parts = zip(plan.stages, (plan if also is None else also).stages, strict=True)
    stages = [replace(one, owned=one.owned | two.owned, buffers=one.buffers | two.buffers) for one, two in parts]
    owned = frozenset(fakes.parameters).difference(*(stage.owned for stage in stages))
    buffers = frozenset(fakes.buffers).difference(*(stage.buffers for stage in stages))
    last = stages[-1]
    stages[-1] = replace(last, owned=last.owned | owned, buffers=last.buffers | buffers)
    return replace(plan, stages=tuple(stages))


def _require_no_leak(trace: Trace, fakes: Fakes, start: Call | None, *, replays: bool) -> None:
    for leak in trace.leaks:
        maker, reader = trace.calls[leak.maker], trace.calls[leak.reader]
        if start is None or not maker.exit <= start.exit <= leak.clock or is_free(trace, maker, fakes):
            continue
        if not (replays and any(leak.key in call.storages for call in trace.seen_in(maker))):
            raise UsageError(
                f"{maker.name} passes a tensor to {reader.name or 'the module itself'} outside its output, "
                f"through a list, a cache or an attribute, so the forward cannot be cut after {start.name}, between "
                "the two: switch that feature off, or choose other cuts"
            )


def _require_known(trace: Trace, start: Call | None) -> None:
    for index, clock in trace.guesses.items():
        if start is not None and trace.is_within(start.index, index) and start.index != index and clock < start.exit:
            raise UsageError(decides(trace.calls[index].name or "the module's own forward"))
