"""The step: one batch through the compiled program, and what all ranks agree on at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeflow.analysis.lower import lower
from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import PipeflowError, UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.parallel.context import Context
from pipeflow.parallel.failure import ActionError
from pipeflow.parallel.transport.agreement import all_gather, all_gather_object
from pipeflow.parallel.transport.protocol import Transport
from pipeflow.parallel.transport.work import LinkError
from pipeflow.runtime.gradients.step_end import Gradients
from pipeflow.runtime.microbatch import Batch, merge, next_batch, weights_of
from pipeflow.runtime.program.cells import Meta, Results
from pipeflow.runtime.program.compile import Compiled, compile_program
from pipeflow.runtime.program.operations import Compute, Operation
from pipeflow.runtime.program.pairs import Overlap
from pipeflow.runtime.program.transfers import Transfer
from pipeflow.runtime.stage import Stage
from pipeflow.runtime.trace import Timed, Trace


@dataclass(frozen=True, slots=True)
class Output:
    """What a step gives.

    Attributes:
        loss: the mean loss of the batch, those of all replicas together, a scalar tensor, on the last stage's ranks (a
            bidirectional schedule has two); elsewhere None unless broadcast.
        outputs: the last stage's outputs, its microbatches put together along dim 0; None unless asked for, and on
            other ranks.
        timeline: every rank's measured spans, in seconds; None unless traced.
    """

    loss: Tensor | None
    outputs: object = None
    timeline: Timeline | None = None


class Runner:
    """Runs the steps of one pipeline on this rank. Compiles a program when its kind of step first comes."""

    def __init__(
        self,
        schedule: Schedule,
        context: Context,
        stages: Mapping[int, Stage],
        gradients: Gradients,
        meta: Meta | None,
        criterion: Callable[..., Tensor] | None,
        weigh: Callable[..., float] | None,
        overlap: Overlap | None,
    ) -> None:
        self.schedule = schedule
        self.context = context
        self.transport = context.transport
        self.stages = stages
        self.gradients = gradients
        self.meta = meta
        self.criterion = criterion
        self.weigh = weigh
        self.overlap = overlap
        self._is_split = len(schedule.placement.ranks_of(schedule.placement.num_stages - 1)) > 1
        self._compiled: dict[tuple[bool, bool], Compiled] = {}  # by whether it trains, and whether it reduces

    def forget(self) -> None:
        """Drops the compiled programs and what is under way, which hold on to the transport's channels."""
        self._compiled.clear()
        self.gradients.forget()

    def step(
        self,
        data_iter: Iterator[object],
        *,
        training: bool,
        return_outputs: bool,
        broadcast_loss: bool,
        trace: bool,
        reduce: bool,
        loss_scale: float,
    ) -> Output:
        """Runs one step; all ranks call it together."""
        compiled = self._program(training, reduce=training and reduce)
        batch = next_batch(data_iter, self.schedule.num_microbatches, self.transport.device)
        self._load(compiled, batch, training, return_outputs)
        if training:
            compiled.results.gradient_scale = loss_scale * self._share(compiled.results)
        measured = Trace(compiled.operations, self.transport) if trace else None
        with torch.set_grad_enabled(training):
            if training:
                self.gradients.begin()
            run(compiled.operations if measured is None else measured.operations, self.transport)
            if training:
                self.gradients.end(reduce=reduce)
        results = compiled.results
        if return_outputs and self._is_split:
            self._exchange_outputs(results)
        outputs = merge(results.outputs) if results.keep_outputs else None  # may fail, so before all agree
        loss = self._agree(results, batch, everywhere=broadcast_loss)
        timeline = None if measured is None else measured.timeline(self.schedule.name, self.schedule.placement)
        self._unload(compiled)
        return Output(loss, outputs, timeline)

    def _program(self, training: bool, *, reduce: bool) -> Compiled:
        if (training, reduce) not in self._compiled:
            schedule = self._reducing(reduce) if training else self.schedule.forward_only()
            if training and schedule.is_forward_only:
                raise UsageError(f"schedule {schedule.name!r} has no backwards: pass forward_only=True")
            if training and self.criterion is None:
                raise UsageError("training needs a loss: give the Pipeline a criterion, or pass forward_only=True")
            meta = self.meta
            if meta is not None and not training:
                meta = meta._replace(grads=(False,))
            self._compiled[training, reduce] = compile_program(
                lower(schedule)[self.transport.rank],
                stages=self.stages,
                num_stages=schedule.placement.num_stages,
                num_microbatches=schedule.num_microbatches,
                transport=self.transport,
                meta=meta,
                training=training,
                overlap=self.overlap,
                gradients=self.gradients,
                reduce=reduce,
            )
        return self._compiled[training, reduce]

    def _reducing(self, reduce: bool) -> Schedule:
        """The schedule with the reductions that there are to be."""
        if not reduce:
            return self.schedule.without_reductions()  # then copies are exchanged at the end
        has_others = self.context.data.size > 1 or len(self.schedule.placement.paths) > 1
        return self.schedule.with_reductions() if has_others else self.schedule

    def _load(self, compiled: Compiled, batch: Batch, training: bool, return_outputs: bool) -> None:
        for stage in self.stages.values():
            stage.load(batch)
        if 0 in self.stages and not isinstance(batch.inputs, dict):
            compiled.positionals[:] = [(part,) for part in batch.split(batch.inputs)]
        if self.schedule.placement.num_stages - 1 in self.stages:
            results = compiled.results
            results.keep_outputs = return_outputs
            if training or batch.labels is not None:
                results.criterion = self.criterion
                results.labels = batch.split(batch.labels)
                results.weights, results.weight = weights_of(results.labels, batch.sizes, self.weigh)

    def _share(self, results: Results) -> float:
        """What makes the average over the replicas that of their samples: this replica's weight in the whole batch,
        as a multiple of an equal share. Told to each other by the ranks that have the last stage.
        """
        if self.context.data.size == 1 or not results.weights:
            return 1.0
        mine = torch.tensor([results.weight], dtype=torch.float64, device=self.transport.device)
        weights = mine.new_empty(self.context.data.size)
        self.context.data.all_gather(weights, mine).wait()
        total: float = sum(weights.tolist())
        return results.weight * len(weights) / total

    def _exchange_outputs(self, results: Results) -> None:
        """Where two ranks have the last stage, each for half of the microbatches, gives both of them all outputs."""
        mine = {microbatch: output for microbatch, output in enumerate(results.outputs) if output is not None}
        everyone: list[Any] = all_gather_object(self.transport, mine)
        if results.keep_outputs:
            for outputs in everyone:
                for microbatch, output in outputs.items():
                    results.outputs[microbatch] = output

    def _agree(self, results: Results, batch: Batch, *, everywhere: bool) -> Tensor | None:
        """Ends the step: no rank goes on before all have come this far. Returns the loss where it is to be known:
        on the ranks that have the last stage, or `everywhere`.
        """
        context, parts = self.context, results.parts()
        told, dtype, weight = [0.0] * len(results.losses), -1, 0.0
        has_replicas = context.data.size > 1
        if parts and context.tensor.rank == 0 and (everywhere or self._is_split or has_replicas):
            stacked = torch.stack(list(parts.values()))
            dtype, weight = _DTYPES.index(stacked.dtype), results.weight
            for microbatch, part in zip(parts, stacked.tolist(), strict=True):
                told[microbatch] = part
        rows = all_gather(context.world, [float(sum(batch.sizes)), float(dtype), weight, *told])
        size = len(rows) // context.data.size
        replicas = [rows[first : first + size] for first in range(0, len(rows), size)]
        for replica in replicas:
            _require_same_batch(replica)
        dtype = int(max(dtype for _, dtype, *_ in rows))
        if dtype < 0 or not (everywhere or results.weights):
            return results.loss()
        return _mean_loss(replicas, _DTYPES[dtype]).to(self.transport.device)

    def _unload(self, compiled: Compiled) -> None:
        """Lets go of the batch and of what was made of it."""
        compiled.results.clear()
        compiled.positionals[:] = [()] * len(compiled.positionals)
        for stage in self.stages.values():
            stage.keywords = []


def _require_same_batch(rows: Sequence[Sequence[float]]) -> None:
    if len({samples for samples, *_ in rows}) > 1:
        sizes = ", ".join(str(int(samples)) for samples, *_ in rows)
        raise UsageError(
            f"the ranks read batches of different sizes, {sizes}: all need the same data in the same order"
        )


def _mean_loss(replicas: Sequence[Sequence[Sequence[float]]], dtype: torch.dtype) -> Tensor:
    """Of all replicas, each counted by its weight; within one, summed in microbatch order."""
    weights = [max(weight for _, _, weight, *_ in rows) for rows in replicas]
    columns = [zip(*(told for _, _, _, *told in rows), strict=True) for rows in replicas]
    losses = [torch.tensor([sum(column) for column in each], dtype=dtype).sum() for each in columns]
    if len(losses) == 1:
        return losses[0]
    return torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum() / sum(weights)


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def run(operations: Sequence[Operation], transport: Transport) -> None:
    """Calls one operation after the other. Raises ActionError or LinkError, which say where it went wrong."""
    operation: Operation | None = None
    try:
        for operation in operations:
            operation()
    except BaseException as error:
        match operation:
            case _ if isinstance(error, ActionError | LinkError):
                raise
            case Transfer() if _is_of_channel(error):
                peer = transport.world_rank(operation.peer)
                raise LinkError(peer, f"{operation.doing} the {operation.value}", error) from None
            case Transfer(value=value):
                kind = Kind.F if value.content is Content.ACTIVATION else Kind.B
                raise ActionError(Action(kind, value.stage, value.microbatch)) from error
            case Timed(compute=Compute(action=action)) | Compute(action=action):
                raise ActionError(action) from error
            case _:
                raise


def _is_of_channel(error: BaseException) -> bool:
    """Whether a transfer failed for its channel's sake. Channels raise RuntimeError; so do some that are no channel."""
    return isinstance(error, RuntimeError) and not isinstance(error, PipeflowError | torch.OutOfMemoryError)
