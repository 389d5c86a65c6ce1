"""CutPlan: what each stage of a forward receives, sends and owns, and its script; and the properties of a microbatch
and of the module on which it depends. Must not contain: how it is found.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeflow.core.route import Routes
from pipeflow.core.text import aligned, bytes_text
from pipeflow.engine.stages.blocks import Ways
from pipeflow.engine.stages.entries import Stateful
from pipeflow.engine.stages.script import Script, TensorRef
from pipeflow.engine.stages.trace import Call, Look, Trace
from pipeflow.engine.torch_private.trees import tree_flatten


class PlanKey(NamedTuple):
    """Microbatches with equal keys have one plan.

    Attributes:
        entries: name of each entry, and its shape and dtype, or its value if it is a plain one.
        training: whether the module is in training.
        grads: whether gradients are computed.
        autocast: the dtype of autocast, False without.
        forward: function in place of the module's own forward; None without.
    """

    entries: tuple[tuple[str, Hashable], ...]
    training: bool
    grads: bool
    autocast: Hashable
    forward: Hashable

    @classmethod
    def of(cls, entries: Mapping[str, Any], device: str, forward: Hashable, *, training: bool, grads: bool) -> PlanKey:
        """The key of a microbatch with these entries, which stages on `device` compute now."""
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        looks = tuple((name, look_of(entry)) for name, entry in entries.items())
        return cls(looks, training, grads, autocast, forward)

    def unlike(self, other: PlanKey) -> str:
        """Words for what differs from the key of the example."""
        mine, its = dict(self.entries), dict(other.entries)
        found = [
            f"{name} is {_said(mine, name)} and was {_said(its, name)} in the example"
            for name in {**mine, **its}
            if mine.get(name) != its.get(name) or (name in mine) != (name in its)
        ]
        for differs, what in (
            (self.training != other.training, f"the module is in {'training' if self.training else 'evaluation'}"),
            (self.grads != other.grads, f"gradients are {'on' if self.grads else 'off'}"),
            (self.autocast != other.autocast, "autocast is another one"),
        ):
            found += [what] * differs
        return ", ".join(found)


def look_of(entry: object) -> Hashable:
    """The shapes, dtypes and plain values of an entry of a batch."""
    if isinstance(entry, Stateful):
        return entry.key
    if isinstance(entry, Tensor):
        return entry.shape, entry.dtype
    if isinstance(entry, bool | int | float | str | None):
        return entry
    if type(entry) in (list, tuple):
        return type(entry), *map(look_of, entry)  # type: ignore[call-overload]  # an iterable
    leaves, spec = tree_flatten(entry)
    return str(type(entry)) if spec.is_leaf() else (str(spec), *map(look_of, leaves))


def _said(looks: Mapping[str, Hashable], name: str) -> str:
    if name not in looks:
        return "left out"
    match looks[name]:
        case (torch.Size() as shape, torch.dtype() as dtype):
            return f"a tensor of {tuple(shape)}, {dtype}"
        case tuple():
            return "another tree"
        case plain:
            return repr(plain)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The plan of one stage, for batches of certain shapes.

    Attributes:
        script: what the stage does at each call.
        receives: tensors that it needs from earlier stages.
        makes: tensors that it makes for later stages.
        owned: parameters that flow into its output; in the plan of a first batch, the last stage also owns parameters
            that flow into nothing.
        buffers: buffers that flow into its output, and buffers that it writes to.
        writes: buffers that it writes to in place.
        is_empty: True if it does nothing, because the forward skips its blocks and all before them, as an encoder's are
            skipped if its output is given.
    """

    script: Script
    receives: tuple[TensorRef, ...]
    makes: tuple[TensorRef, ...]
    owned: frozenset[str]
    buffers: frozenset[str]
    writes: frozenset[str] = frozenset()
    is_empty: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class CutPlan:
    """The plan of all stages, for batches of certain shapes. It prints as a table.

    Attributes:
        stages: plans of the stages, in order.
        trace: the forward that was cut.
        cuts: the last block of every stage except the last one and empty ones.
        ways: what passes to and from each stage.
        routes: the routes that are used, for batches of any shapes.
        sizes: sizes in bytes of tensors of which a tensor rank has only a part.
    """

    stages: tuple[StagePlan, ...]
    trace: Trace
    cuts: tuple[Call, ...]
    ways: tuple[Ways, ...]
    routes: Routes
    sizes: Mapping[TensorRef, int] = field(default_factory=dict)

    def look(self, value: TensorRef) -> Look:
        """The properties of a tensor between stages."""
        return self.trace.look(value.call, value.leaf)

    @property
    def sent_bytes(self) -> tuple[int, ...]:
        """For each stage, the bytes that it sends for a microbatch; its gradients have the same size. Includes tensors
        for other stages of its own rank, which stay in memory.
        """
        stages = enumerate(self.ways)
        return tuple(sum(self.bytes_between(stage, target) for target in ways.gives) for stage, ways in stages)

    def bytes_between(self, source: int, target: int) -> int:
        """The bytes that pass from stage `source` to stage `target` for a microbatch."""
        given = self.ways[source].gives[target]
        return sum(self.sizes[value] if value in self.sizes else self.look(value).nbytes for value in given)

    def sized_by(self, trace: Trace) -> CutPlan:
        """The same plan with the tensor sizes of `trace`, the forward of one rank's part of the module, if both made
        the same calls.
        """
        if trace.calls_in_order() != self.trace.calls_in_order():
            return self
        local, passing = replace(self, trace=trace), [value for stage in self.stages for value in stage.makes]
        return replace(self, sizes={value: local.look(value).nbytes for value in passing})

    def __str__(self) -> str:
        """A table with a line per stage: the block it ends after, its numbers of parameters and buffers, and what it
        sends for a microbatch, with the receiving stage behind `>`.
        """
        ends, rows = iter(self.cuts), []
        for index, (stage, ways) in enumerate(zip(self.stages, self.ways, strict=True)):
            end = None if stage.is_empty else next(ends, None)
            targets = [target for target, values in ways.gives.items() if values]
            sends = [f"{bytes_text(self.bytes_between(index, target))} > {target}" for target in targets]
            counts = str(len(stage.owned)), str(len(stage.buffers))
            rows.append([str(index), end.name if end else "-", *counts, "  ".join(sends)])
        return "\n".join(aligned(["stage", "ends after", "parameters", "buffers", "sends"], rows))

    __repr__ = __str__

    def describe(self) -> list[tuple[Any, ...]]:
        """Plain data that is equal for equal plans."""
        names = [call.name for call in self.trace.calls]
        return [
            (
                [(names[value.call], value, *self.look(value)[:3]) for value in stage.receives],
                sorted(stage.owned),
                sorted(stage.buffers),
            )
            for stage in self.stages
        ]
