"""The step: one batch through the program of a schedule, from the iterator to the caller's result. The host is at most
one step ahead of its GPU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Literal, cast

import torch
from torch import Tensor

from pipeflow.core.action import Kind
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.engine.parallel.transport.agreement import all_gather, finish, told_alike
from pipeflow.engine.parallel.transport.protocol import Exchange, Transport
from pipeflow.engine.runtime.adaptive import Adaptation
from pipeflow.engine.runtime.context_ranks import ContextTokens, require_no_outputs
from pipeflow.engine.runtime.devices import outside, region_of
from pipeflow.engine.runtime.elastic import of_all_replicas
from pipeflow.engine.runtime.gradients.step_end import ParameterChange
from pipeflow.engine.runtime.grid_samples import GridSamples
from pipeflow.engine.runtime.loss import Agreed, AgreementRow, StepCall, agree, prepare, told_alone
from pipeflow.engine.runtime.microbatch import Batch, Divided, as_batch, as_pair, even_sizes, next_of
from pipeflow.engine.runtime.original import Original, root_of
from pipeflow.engine.runtime.program.compile import Compiled, Programs, RunMode
from pipeflow.engine.runtime.program.operations import Awaited, Operation, run
from pipeflow.engine.runtime.program.pairs import InTurns
from pipeflow.engine.runtime.program.results import (
    Results,
    merged_outputs,
    require_forwards_first,
    require_whole_loss,
)
from pipeflow.engine.runtime.sharing import SLICES
from pipeflow.engine.runtime.slicing import ends_of, require_sliceable, sliced
from pipeflow.engine.runtime.trace import StepTrace
from pipeflow.engine.runtime.weighing import Weigher, share_of
from pipeflow.engine.stages.criterion import explained, own_loss

LossOver = Literal["microbatches", "batch"]


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a step.

    Attributes:
        loss: mean loss of the batch over all replicas, a scalar tensor. None on ranks without the last stage, unless
            `broadcast_loss` was set. In a bidirectional schedule, two ranks have the last stage.
        outputs: the last stage's outputs, concatenated along dim 0 over the microbatches. None unless `return_outputs`
            was set, and on ranks without the last stage.
        timeline: measured spans of every rank, in seconds. None unless `trace` was set.
        losses: a dict from the index of each microbatch whose loss this rank computed to its mean loss, a scalar
            tensor. A context rank has the mean loss of its own tokens.
        samples: number of samples in the batch over all replicas.
        weight: weight of the batch in a mean over several batches, over all replicas. It is the sum of the results of
            `weigh` for its microbatches, or its number of samples. 0 if `loss` is None.
    """

    loss: Tensor | None
    outputs: object = None
    timeline: Timeline | None = None
    losses: Mapping[int, Tensor] = field(default_factory=dict)
    samples: int = 0
    weight: float = 0.0

    def backward(self) -> None:
        """Raises UsageError, since the step has run the backwards."""
        _Ran()()


class _Ran:
    """Takes the place of `Tensor.backward` on the loss of a training step, whose gradients exist already. The loss is a
    plain tensor otherwise.
    """

    def __call__(self, *_: object, **__: object) -> None:
        raise UsageError(
            "execute_pipeline ran the backward of this loss already, so its gradients are in .grad: remove the call of "
            "loss.backward(), and step the optimizer"
        )

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Is not saved with the loss; torch.load(weights_only=True) allows an OrderedDict in its place."""
        return OrderedDict, ()


class Runner:
    """Runs the steps of one pipeline on this rank.

    Attributes:
        read: function that splits a batch of the iterator into inputs and labels.
        original: the module that was cut, if there is one.
        adaptation: the order of training steps, if it may change.
        tokens: takes this rank's tokens out of batches, if there are context ranks.
        samples: takes this rank's samples out of batches, if a grid of tensor ranks divides them.
        balanced: makes a balance loss of experts, which the last stage computes, count the tokens of all replicas; None
            if there is no such loss.
    """

    def __init__(
        self,
        programs: Programs,
        criterion: Callable[..., Tensor] | None,
        weigh: Callable[..., float] | None,
        taken: frozenset[str] | None,
        autocast: torch.dtype | None,
        loss_over: LossOver = "microbatches",
    ) -> None:
        if loss_over not in ("microbatches", "batch"):
            raise UsageError(f'loss_over is "microbatches" or "batch", got {loss_over!r}')
        if loss_over == "batch":
            require_whole_loss(programs.context, criterion)
        self.loss_over = loss_over
        self.programs = programs
        self.context = context = programs.context
        self.transport = context.transport
        self.stages = programs.stages
        self.gradients = programs.gradients
        self.confirmation = programs.confirmation
        self.tokens: ContextTokens | None = None
        if context.context_size > 1:
            given = programs.options.overlap
            overlaps = given is not None and not isinstance(given, InTurns)
            weighs = weigh is not None and criterion is not own_loss
            refused = {"weigh=": weighs, "overlap=": overlaps, "loss_over=": loss_over == "batch"}
            self.tokens = ContextTokens(context, criterion, refused)
            criterion = self.tokens.criterion
        self.samples = GridSamples(context) if context.layout.sample_parts > 1 else None
        self.criterion = criterion
        self.weigh = getattr(criterion, "weigh", None) if weigh is None else weigh
        self._weigher = Weigher(programs.context, over_batch=loss_over == "batch")
        self.autocast = autocast
        self._pace = Pace(context.world)
        self.taken = taken  # names of the entries that stages of any rank take; None if they take all
        self.read: Callable[[object], tuple[object, object]] = as_pair
        self.original: Original | None = None
        self.adaptation: Adaptation | None = None
        self.balanced: Callable[[], AbstractContextManager[None]] | None = None
        self._runs = False
        self.rows: Sequence[AgreementRow] = ()  # what all ranks told each other at the end of the last step
        self.end: Callable[[Sequence[AgreementRow]], Output] | None = None  # ends the last step with these
        self._last_stage = programs.placement.num_stages - 1
        self.last_ranks = programs.placement.ranks_of(self._last_stage)

    def join(self, placement: Placement) -> None:
        """Goes on under this placement, with the ranks of the context; all of them call it together."""
        self.transport, self.last_ranks = self.context.transport, placement.ranks_of(self._last_stage)
        self._weigher = Weigher(self.context, over_batch=False)
        self._pace = Pace(self.context.world)
        self.programs.join(placement)
        self.confirmation = self.programs.confirmation
        self.gradients.join(placement)

    def forget(self) -> None:
        """Drops compiled programs and work under way, because they hold channels of the transport; and what a step that
        an error cut short has left in its stages.
        """
        for stage in self.stages.values():
            stage.unload()
        self.programs.clear()
        self.gradients.forget()
        self._pace.forget()
        self.confirmation.forget()
        if self.adaptation is not None:
            self.adaptation.forget()

    def step(self, data_iter: Iterator[object], call: StepCall, loss_scale: float | Tensor) -> Output:
        """Runs one step; all ranks call it together. Raises UsageError if a step is already running, and the errors of
        `execute_pipeline`.
        """
        if self._runs:
            raise UsageError("execute_pipeline was called within a step of the same Pipeline: call it between steps")
        self._runs = True
        try:
            if self.original is not None:
                self.original.follow(training=call.training)
            return self._step(data_iter, call, loss_scale)
        finally:
            self._runs = False

    @property
    def is_running(self) -> bool:
        """True while a step is under way."""
        return self._runs

    def infer(self, data_iter: Iterator[object], schedule: Schedule) -> object:
        """Returns the outputs of a batch on the ranks that have the last stage, and None on others.

        The ranks of one pipeline call it together; it ends without an agreement. Raises UsageError if a step is
        running.
        """
        if self._runs:
            raise UsageError("a forward was requested within a step of the same Pipeline: run it between steps")
        call = StepCall(
            training=False, reduce=False, return_outputs=True, broadcast_loss=False, trace=False, schedule=schedule
        )
        self._runs = True
        try:
            self.confirmation.confirm_all()
            batch, compiled = self._start(data_iter, call, meets=False)
            region = region_of(self.transport.device.type, self.autocast)
            self.programs.fit(compiled, batch, region)
            with torch.inference_mode(mode=False), torch.no_grad(), outside(region):
                self._load(compiled, batch, call, region)
                self._run(compiled, compiled.operations, batch)
            outputs = self._merged(compiled.results)
            self._unload(compiled)
            return None if self._last_stage not in self.stages else outputs
        finally:
            self._runs = False

    def _step(self, data_iter: Iterator[object], call: StepCall, loss_scale: float | Tensor) -> Output:
        if call.training and self.criterion is None:
            raise UsageError(
                "training needs a loss: give the Pipeline a criterion (or give from_module an example with labels, "
                "from which the module computes its own loss), or pass forward_only=True"
            )
        self.gradients.prepare()
        self.confirmation.recover()
        batch, compiled = self._start(data_iter, call)
        self.transport.place.call = call._replace(batch=(self.context.data_rank, batch.samples))
        results = compiled.results
        if compiled.ahead is None or call.trace:
            self.confirmation.confirm_all()
        region = region_of(self.transport.device.type, self.autocast)
        self.programs.fit(compiled, batch, region)
        with torch.inference_mode(mode=False), torch.set_grad_enabled(call.training), outside(region):
            self._load(compiled, batch, call, region)
            if self.balanced is not None and self.context.copies.size > 1 and self._last_stage in self.stages:
                last = self.stages[self._last_stage]
                last.call = _within(self.balanced, last.call)
            if call.training:
                results.gradient_scale = loss_scale * call.gradient_scale * share_of(results, self.context)
            traces = call.trace or (call.adapts and self.adaptation is not None and self.adaptation.traces)
            measured = StepTrace(compiled.operations, self.transport, self.context.turns) if traces else None
            begun = perf_counter()
            self._run(compiled, compiled.operations if measured is None else measured.operations, batch)
        self._pace.step()
        # merging may fail, so it must come before the agreement
        outputs, losses = self._merged(results), results.means()
        agreed = self._end(call, compiled, batch, perf_counter() - begun, partial(_output, call, outputs, losses))
        timeline = None if measured is None else measured.timeline(compiled.schedule, batch.cuts)
        self._unload(compiled)
        if call.adapts and self.adaptation is not None and compiled.is_whole_step_of(call.schedule):
            self.adaptation.saw(max(row.seconds for row in agreed.rows), timeline)
        self.rows, self.end = agreed.rows, None
        return _output(call, outputs, losses, agreed, timeline if call.trace else None)

    def _merged(self, results: Results) -> object:
        """The outputs of the batch, on the ranks that have the last stage, if they are kept."""
        outputs = merged_outputs(results, self.transport, self.programs.placement)
        is_part = self.samples is not None and results.keep_outputs and self._last_stage in self.stages
        return self.samples.whole(outputs) if self.samples is not None and is_part else outputs

    def _end(
        self, call: StepCall, compiled: Compiled, batch: Batch, seconds: float, made: Callable[[Agreed], Output]
    ) -> Agreed:
        """Ends a step. If it has stepped the optimizer, the other ranks need not have ended it yet. `made` is the
        result of the step, once the ranks agree.
        """
        told = self._told(call, compiled, batch)._replace(seconds=seconds)
        if compiled.ahead is None:
            return self._agree(told, call, compiled, made)
        alone = self.context.losses.size == len(self.last_ranks) == 1 and not (call.broadcast_loss or call.trace)
        taken = self.confirmation.take(told, alone=alone)
        if taken is self.confirmation.pending:
            return told_alone(told, compiled.results)
        agreed = self._agree(taken.told, call, compiled, made)
        self.confirmation.judge(agreed.rows)
        return agreed

    def _told(self, call: StepCall, compiled: Compiled, batch: Batch) -> AgreementRow:
        gradients = self.gradients
        return AgreementRow(
            call.number,
            compiled.digest,
            batch.samples,
            batch.digest(),
            change=gradients.change,
            gradient_scale=call.gradient_scale,
            buffers=call.training and gradients.buffers.are_changed,
        )

    def _agree(
        self, told: AgreementRow, call: StepCall, compiled: Compiled, made: Callable[[Agreed], Output]
    ) -> Agreed:
        """The agreement of all ranks at the end of a step, after which gradients and buffers are as all ranks need."""
        told, conclude = prepare(
            told,
            compiled.results,
            self.context,
            self.last_ranks,
            microbatches=compiled.schedule.num_microbatches * compiled.schedule.slices,
            everywhere=call.broadcast_loss,
        )
        self.end = lambda rows: made(conclude(rows))
        agreed = agree(told, conclude, self.context)
        self.renew(agreed.change, buffers=agreed.buffers, reduce=call.reduce)
        return agreed

    def renew(self, change: ParameterChange, *, buffers: bool, reduce: bool) -> None:
        """Call on all ranks when they have agreed that a step is over, with the largest change of parameters, and
        whether buffers were changed on any rank.
        """
        if buffers:
            self.gradients.buffers.share(self.context.peers)
        if change:
            self.gradients.renew(change, reduce=reduce)
            for stage in self.stages.values():
                stage.defer()

    def _start(self, data_iter: Iterator[object], call: StepCall, *, meets: bool = True) -> tuple[Batch, Compiled]:
        """The next batch, and what runs it. With `meets`, all ranks call it together."""
        given, schedule, cost = next_of(data_iter), call.schedule, self.programs.options.cost
        if isinstance(given, Divided):
            schedule, cost = given.schedule or schedule, given.cost or cost
            given.require_fits(schedule)
        if self.loss_over == "batch" and call.training:
            require_forwards_first(schedule, given)
        replicas = self.context.data_size if self.context.is_joined else 1
        batch = as_batch(given, schedule.num_microbatches // replicas, self.transport.device, self.read)
        if self.context.data_size > 1 and meets and (self.context.experts.size > 1 or self.balanced is not None):
            batch = self._met(batch, is_divided=isinstance(given, Divided))
        if self.taken is not None:
            batch.require_taken(self.taken)
        if self.tokens is not None:
            require_no_outputs(call.return_outputs)
            first = next(iter(self.stages.values()))
            module = None if self.original is None else root_of(first.module)
            cut = partial(self._ends, times=1.0, schedule=schedule, cost=cost) if schedule.slices > 1 else None
            batch = self.tokens.own(batch, module, cut, balances=self.balanced is not None)
        if self.samples is not None:
            batch = self.samples.own(batch, training=call.training)
        if self.context.elastic:
            batch = of_all_replicas(batch, given, self.context)
        microbatches, paths = len(batch.sizes), len(schedule.placement.paths)
        if schedule.slices > 1:
            batch = self._sliced(batch, schedule, cost)
        least = min(paths, schedule.num_microbatches)
        if call.training and microbatches < least and (self.context.copies.size > 1 or Kind.S in schedule.kinds):
            raise UsageError(
                f"a batch of {microbatches} samples leaves one of the {paths} paths of {schedule.name!r} empty, so its "
                "ranks would reduce or step their stages in another order than others: leave the batch out, as with "
                "DataLoader(..., drop_last=True)"
            )
        return batch, self.programs.get(schedule, RunMode(microbatches, call.training, call.training and call.reduce))

    def _met(self, batch: Batch, *, is_divided: bool) -> Batch:
        """The batch in as many microbatches as all replicas have: the forwards of one wait for those of others, which
        share its experts or its balance loss. Raises UsageError on all ranks for divided batches of other numbers.
        """
        replicas = self.context.replicas
        rows = all_gather(replicas, [float(len(batch.sizes)), float(is_divided)])
        counts = [int(count) for count, _ in rows]
        if len(set(counts)) == 1:
            return batch
        with told_alike(replicas):
            if any(divided for _, divided in rows):
                raise UsageError(
                    f"replicas have {', '.join(map(str, counts))} microbatches, but the forwards of one wait for those "
                    "of others, which share its experts or its balance loss: divide each batch into as many"
                )
        return replace(batch, sizes=even_sizes(batch.samples, min(counts)), leaves=[])

    def _sliced(self, batch: Batch, schedule: Schedule, cost: CostModel | None) -> Batch:
        """The batch for a schedule with slices. Raises UsageError if something cannot be computed in slices."""
        options = self.programs.options
        refused = {
            "a grid of tensor ranks": self.samples is not None,
            "tensor_shape=": options.promise is not None,
            "graph=True": options.graph,
            "weigh=": self.weigh is not None and not hasattr(self.criterion, "weigh"),
            "a balance loss (config.output_router_logits)": self.balanced is not None,
            'loss_over="batch"': self.loss_over == "batch",
        }
        tokens = self.tokens
        require_sliceable(schedule, self.stages, self.criterion if tokens is None else tokens.whole, refused)
        if tokens is None and self.original is not None:
            batch = SLICES.with_documents(batch)
        find = partial(self._ends, schedule=schedule, cost=cost)
        return sliced(batch, find, self.criterion if tokens is None else None, self.context.context_size)

    def _ends(self, tokens: int, times: float, schedule: Schedule, cost: CostModel | None) -> tuple[int, ...]:
        """Where a sequence is cut; context ranks divide each slice into equal parts."""
        ranks = self.context.context_size
        unit = 1 if ranks == 1 else 2 * ranks
        return ends_of(tokens, times, schedule.slices, cost, multiple_of=self.context.tensor.size, unit=unit)

    def _run(self, compiled: Compiled, operations: Sequence[Operation], batch: Batch) -> None:
        if not compiled.mode.training:
            run(operations)
            return
        begun = 0
        self.gradients.begin(compiled.orders)
        if compiled.graphs is not None:
            compiled.graphs.begin()
        if compiled.ahead is not None:
            if self.gradients.change:
                raise UsageError(
                    "parameters were frozen, unfrozen, replaced or converted since the last step. All ranks must first "
                    "agree on that: run one step of the schedule without optimizer steps"
                )
            begun = self.confirmation.begin(compiled.ahead, [*self.stages.values()])
        run(operations[begun : compiled.closing])
        if compiled.graphs is not None:
            compiled.graphs.end()
        batch.backward()
        self.gradients.end(reduce=compiled.mode.reduce)
        run(operations[compiled.closing :])

    def _load(self, compiled: Compiled, batch: Batch, call: StepCall, region: torch.autocast | None) -> None:
        """Splits the batch and puts its microbatches where the operations read them. Stages and criterion run in
        `region`, if there is one.
        """
        for stage in self.stages.values():
            stage.load(batch, region)
        if 0 in self.stages and not isinstance(batch.inputs, dict):
            compiled.given[:] = [(part,) for part in batch.split(batch.inputs)]
        if self._last_stage in self.stages:
            results = compiled.results
            results.keep_outputs, results.sizes = call.return_outputs, batch.sizes if batch.has_along else []
            results.wanted = batch.read
            if call.training or batch.labels is not None:
                own, weigh = cast(Any, self.criterion), self.weigh
                if own is not None and batch.cuts and self.tokens is None:
                    own, weigh = own.of_shifted, own.of_shifted.weigh
                criterion = None if own is None else explained(own)
                results.criterion = criterion if region is None or criterion is None else region(criterion)
                results.labels = batch.split(batch.labels)
                if own is not None:
                    last = self.stages[self._last_stage]
                    self._weigher.load(results, batch, own, weigh, last, training=call.training)

    def _unload(self, compiled: Compiled) -> None:
        """Frees the batch and everything made from it."""
        compiled.results.clear()
        compiled.given[:] = [()] * len(compiled.given)
        for stage in self.stages.values():
            stage.unload()


def _output(
    call: StepCall, outputs: object, losses: Mapping[int, Tensor], agreed: Agreed, timeline: Timeline | None = None
) -> Output:
    if call.training and agreed.loss is not None:
        agreed.loss.backward = _Ran()  # type: ignore[method-assign]  # of this tensor alone
    return Output(agreed.loss, outputs, timeline, losses, agreed.samples, agreed.weight)


def _within(region: Callable[[], AbstractContextManager[None]], call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, in a region of its own each time."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with region():
            return call(*args, **kwargs)

    return called


class Pace:
    """At the end of a step, waits until the GPU has finished the step before. Meanwhile the GPU runs the current step.

    Nothing else in a step waits for the GPU. So this wait notices a GPU that waits for another one for ever. Like any
    wait for other ranks, it ends with an error on all ranks after the timeout.

    Args:
        world: the transport of all ranks.
    """

    def __init__(self, world: Transport) -> None:
        self._world = world
        self._event: torch.cuda.Event | None = None  # the end of the step before

    def step(self) -> None:
        """Call when a step has been issued. Raises LinkError."""
        world = self._world
        if world.device.type != "cuda":
            return
        before, self._event = self._event, torch.cuda.current_stream(world.device).record_event()
        if before is not None:
            following = world.link((world.rank + 1) % world.size)  # then the chain of who waits for whom has all ranks
            finish(Exchange(following, partial(Awaited, before.synchronize)), "waiting for its device")

    def forget(self) -> None:
        """Drops the step before, which may never end."""
        self._event = None
