"""The dataflow table: what each kind of action needs and makes, which costs it takes, and on which stream of its rank
it runs. What a rank keeps in memory and what passes between ranks follow from this table, so a new kind of action is a
new row. Must not contain: rules for one kind of action outside the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from pipeflow.core.action import Action, Entry, Kind
from pipeflow.core.route import Routes


class Content(StrEnum):
    """The kind of tensors that a value holds."""

    ACTIVATION = "activation"  # a stage's output, for the next stage
    GRADIENT = "gradient"  # the gradient of a stage's input, for the previous stage
    SAVED = "saved"  # what a forward keeps for its backward
    DEFERRED = "deferred"  # what an input-gradient half keeps for its weight-gradient half
    WEIGHT_GRADIENT = "weight gradient"  # a microbatch's part of its stage's weight gradients, for a reduction
    INPUT = "input"  # the part of what a forward saves from which a recomputation makes the rest
    HOST = "host copy"  # what a forward saved, in the memory of the host
    WEIGHTS = "whole weights"  # the weights of a stage under fully_shard, gathered from all replicas
    KEYS = "keys and values"  # of attention, for the next slice of the microbatch; a part of what a forward saves
    KEYS_GRADIENT = "gradient of keys and values"  # the gradient of these, for the previous slice

    __hash__ = str.__hash__  # as that of `Kind`


VALUE = "{content} of stage {stage}, microbatch {microbatch}"


class Value(NamedTuple):
    """One value that passes from the action that makes it to the action that uses it. Its text is like "activation of
    stage 2, microbatch 0".

    A value that stays on its rank may be made again after its use. A reduction uses the last weight gradient of its
    stage, which stands for all earlier ones, and makes it again, summed. An optimizer's step uses it last. Without
    these no action uses weight gradients.

    Attributes:
        content: what the value is: activation, gradient, saved, deferred or weight gradient.
        stage: the stage that makes it.
        microbatch: its microbatch.
        to: the stage that uses it, if it passes on a route. None: the dataflow table says which stage that is.
        slice: its slice of the microbatch. None: the whole microbatch.
    """

    content: Content
    stage: int
    microbatch: int
    to: int | None = None
    slice: int | None = None

    def __str__(self) -> str:
        stage = self.stage if self.to is None else f"{self.stage} for stage {self.to}"
        text = VALUE.format(content=self.content, stage=stage, microbatch=self.microbatch)
        return text if self.slice is None else f"{text}, slice {self.slice}"

    @property
    def user(self) -> int:
        """The stage that uses this value."""
        return self.stage + PASSING.get(self.content, 0) if self.to is None else self.to

    @property
    def answered(self) -> Value:
        """The activation that this gradient belongs to."""
        source = None if self.to is None else self.stage
        return Value(Content.ACTIVATION, self.user, self.microbatch, source, self.slice)


class Stream(StrEnum):
    """A stream of a rank. Actions of one stream run one after the other; different streams run at the same time. A rank
    starts actions in the order of its row: it waits for the end of a computation, and goes on at once after any other
    action.
    """

    COMPUTE = "computations"
    REDUCE = "reductions"
    OFFLOAD = "copies to the host"
    LOAD = "copies from the host"
    GATHER = "gathers of weights"


Ends = tuple[tuple[Content, int], ...]


class DataflowRow(NamedTuple):
    """A row of the dataflow table.

    Attributes:
        name: name of the kind of action, as text for users.
        needs, makes: values that it uses and makes, as (content, offset from its own stage).
        takes: the kinds of action whose times add up to its default time. Empty: it always has a time of its own.
        stream: the stream it runs on. Only computations need or make values that pass between ranks.
        joint: whether it runs once for all microbatches, on all ranks that hold the stage. Beside the computations,
            all of them run it at the same time. Other actions may not need what it makes.
        in_place: whether the values it makes replace those it uses when it ends. Otherwise both are in memory while it
            runs.
        needs_only: the content that it really needs of the values that it makes again. Until it runs, only that is
            kept of them.
        within: a content of its stage that has to be there while it runs, if its rank makes that content for the stage
            at all. It is not used up, so one serves several microbatches.
        word: the word of torch.distributed.pipelining for it, which tables have in place of letter and microbatch.
        across: values of other slices of its microbatch on its stage that it needs, as (content, offset from its own
            slice).
    """

    name: str
    needs: Ends
    makes: Ends
    takes: tuple[Kind, ...] = ()
    stream: Stream = Stream.COMPUTE
    joint: bool = False
    in_place: bool = False
    needs_only: Content | None = None
    within: Content | None = None
    word: str = ""
    across: Ends = ()


DATAFLOW: dict[Kind, DataflowRow] = {
    Kind.F: DataflowRow(
        "forward",
        needs=((Content.ACTIVATION, -1),),
        makes=((Content.ACTIVATION, 0), (Content.SAVED, 0), (Content.KEYS, 0)),
        within=Content.WEIGHTS,
        across=((Content.KEYS, -1),),
    ),
    Kind.B: DataflowRow(
        "backward",
        needs=((Content.GRADIENT, +1), (Content.SAVED, 0)),
        makes=((Content.GRADIENT, 0), (Content.WEIGHT_GRADIENT, 0), (Content.KEYS_GRADIENT, 0)),
        takes=(Kind.I, Kind.W),
        within=Content.WEIGHTS,
        across=((Content.KEYS_GRADIENT, +1),),
    ),
    Kind.I: DataflowRow(
        "input gradient",
        needs=((Content.GRADIENT, +1), (Content.SAVED, 0)),
        makes=((Content.GRADIENT, 0), (Content.DEFERRED, 0), (Content.KEYS_GRADIENT, 0)),
        in_place=True,
        within=Content.WEIGHTS,
        across=((Content.KEYS_GRADIENT, +1),),
    ),
    Kind.W: DataflowRow(
        "weight gradient", needs=((Content.DEFERRED, 0),), makes=((Content.WEIGHT_GRADIENT, 0),), within=Content.WEIGHTS
    ),
    Kind.R: DataflowRow(
        "gradient reduction",
        needs=((Content.WEIGHT_GRADIENT, 0),),
        makes=((Content.WEIGHT_GRADIENT, 0),),
        stream=Stream.REDUCE,
        joint=True,
        word="REDUCE_GRAD",
    ),
    Kind.S: DataflowRow("optimizer step", needs=((Content.WEIGHT_GRADIENT, 0),), makes=(), joint=True),
    Kind.C: DataflowRow(
        "recomputation",
        needs=((Content.SAVED, 0),),
        makes=((Content.SAVED, 0),),
        takes=(Kind.F,),
        needs_only=Content.INPUT,
        within=Content.WEIGHTS,
    ),
    Kind.O: DataflowRow("offload", needs=((Content.SAVED, 0),), makes=((Content.HOST, 0),), stream=Stream.OFFLOAD),
    Kind.L: DataflowRow(
        "load", needs=((Content.HOST, 0),), makes=((Content.SAVED, 0),), takes=(Kind.O,), stream=Stream.LOAD
    ),
    Kind.U: DataflowRow("unshard", needs=(), makes=((Content.WEIGHTS, 0),), stream=Stream.GATHER, word="UNSHARD"),
    Kind.H: DataflowRow("reshard", needs=((Content.WEIGHTS, 0),), makes=(), stream=Stream.GATHER, word="RESHARD"),
}

COPIES = frozenset({Stream.OFFLOAD, Stream.LOAD})
"""The streams of copies between a device and its host. Ranks may share a link to the host."""

ON_HOST = frozenset({Content.HOST})
"""The contents that take no memory of the device."""

LASTING = frozenset(flow.within for flow in DATAFLOW.values() if flow.within)
"""The contents that serve all actions of their stage in a row, from the action that makes them to the one that needs
them."""

HANDLING_LASTING = frozenset(
    kind for kind, flow in DATAFLOW.items() if LASTING & {content for content, _ in (*flow.needs, *flow.makes)}
)
"""The kinds that make or end a lasting content."""

SEVERAL = HANDLING_LASTING | {kind for kind, flow in DATAFLOW.items() if flow.joint}
"""The kinds of which one action serves several microbatches."""

PASSING: dict[Content, int] = {
    content: -offset for flow in DATAFLOW.values() for content, offset in flow.needs if offset
}
"""The contents that pass between stages, and so between ranks, with the offset from the stage that makes them to the
stage that uses them."""

ACROSS: dict[Content, int] = {content: -offset for flow in DATAFLOW.values() for content, offset in flow.across}
"""The contents that pass between the slices of a microbatch on a stage, with the offset from the slice that makes them
to the slice that uses them."""

KEPT = frozenset(
    content for flow in DATAFLOW.values() if not flow.joint for content, offset in flow.needs if not offset
)
"""The contents that a rank keeps from the action that makes them to the action that uses them."""

_MAKERS = {content: tuple(kind for kind, flow in DATAFLOW.items() if (content, 0) in flow.makes) for content in Content}
MAKERS: dict[Content, tuple[Kind, ...]] = {
    content: tuple(kind for kind in kinds if not DATAFLOW[kind].joint) for content, kinds in _MAKERS.items()
}
"""Per content, the kinds of action that make it for a microbatch."""


class End(NamedTuple):
    """A value without its microbatch: the same for every microbatch. The fields are those of `Value`."""

    content: Content
    stage: int
    to: int | None = None
    slice: int | None = None

    def of(self, microbatch: int) -> Value:
        """The value of `microbatch` at this end."""
        return Value(self.content, self.stage, microbatch, self.to, self.slice)


class AtStage(NamedTuple):
    """A row of the table for one stage: the values that an action there needs and makes."""

    needs: tuple[End, ...]
    makes: tuple[End, ...]


@lru_cache(maxsize=64)
def flows(num_stages: int, routes: Routes = (), slices: int = 1) -> dict[tuple[Kind, int, int | None], AtStage]:
    """The table for a pipeline of `num_stages`: per (kind, stage, slice), the values that an action needs and makes. If
    microbatches are not cut into slices, the slice is None.

    The first stage's input comes from the batch, and the last stage's gradient from the loss. No action uses the last
    stage's activation or the first stage's gradient. So none of these are values of a schedule.

    What passes from a stage to the next also passes on `routes`, and gradients pass back on them. A stage runs after
    all earlier stages anyway, so a schedule that is sound without routes is sound with any routes.
    """
    stages = frozenset(range(num_stages))
    ways = [(content, *(route if step > 0 else route[::-1])) for content, step in PASSING.items() for route in routes]

    def needed(stage: int, part: int | None, flow: DataflowRow) -> tuple[End, ...]:
        found = [End(content, stage + offset, None, part) for content, offset in flow.needs]
        if part is not None:
            found += (End(content, stage, None, part + offset) for content, offset in flow.across)
        passing = {content for content, offset in flow.needs if offset}
        routed = (End(*each, part) for each in ways if each[0] in passing and each[2] == stage)
        return (*filter(exists, found), *routed)

    def made(stage: int, part: int | None, flow: DataflowRow) -> tuple[End, ...]:
        found = (End(content, stage + offset, None, part) for content, offset in flow.makes)
        contents = {content for content, _ in flow.makes}
        return (
            *filter(exists, found),
            *(End(*each, part) for each in ways if each[0] in contents and each[1] == stage),
        )

    def exists(end: End) -> bool:
        if step := ACROSS.get(end.content):
            return end.slice is not None and {end.slice, end.slice + step} <= {*range(slices)}
        return {end.stage, end.stage + PASSING.get(end.content, 0)} <= stages

    def parts(kind: Kind) -> Iterable[int | None]:
        return [None] if slices == 1 or kind in HANDLING_LASTING else range(slices)

    return {
        (kind, stage, part): AtStage(needed(stage, part, flow), made(stage, part, flow))
        for kind, flow in DATAFLOW.items()
        for part in parts(kind)
        for stage in range(num_stages)
    }


def needs(action: Action, num_stages: int, slices: int = 1) -> list[Value]:
    """The values that `action` uses, without values that pass on routes."""
    return [end.of(action.microbatch) for end in flows(num_stages, (), slices)[_place(action)].needs]


def makes(action: Action, num_stages: int, slices: int = 1) -> list[Value]:
    """The values that `action` makes, without values that pass on routes."""
    return [end.of(action.microbatch) for end in flows(num_stages, (), slices)[_place(action)].makes]


def _place(action: Action) -> tuple[Kind, int, int | None]:
    return action.kind, action.stage, action.slice


Key = tuple[Kind, int, int, int | None]
"""The kind, the stage, the microbatch and the slice of an action."""


def makers(value: Value) -> list[Key]:
    """The actions of which any may make a value, also those that run once for all microbatches, as (kind, stage,
    microbatch, slice).
    """
    return [(kind, value.stage, value.microbatch, value.slice) for kind in _MAKERS[value.content]]


def stream_of(entry: Entry) -> Stream:
    """The stream that an entry of a row runs on. A pair runs on the stream of computations."""
    return DATAFLOW[entry.kind].stream if isinstance(entry, Action) else Stream.COMPUTE


Place = tuple[Kind, int]  # kind and stage


@lru_cache(maxsize=64)
def sources(kinds: tuple[Kind, ...], num_stages: int) -> dict[Place, Place | None]:
    """Per (kind, stage), the (kind, stage) whose value an action waits for, in a pipeline in which each stage runs each
    of `kinds` once per microbatch. A value from another stage comes before one from the own stage. None: the action
    waits for the batch alone.
    """
    table = flows(num_stages)
    found: dict[Place, Place | None] = {}
    for place in ((kind, stage) for kind in kinds for stage in range(num_stages)):
        ends = sorted(table[*place, None].needs, key=lambda end: end[0] not in PASSING)
        makers = ((kind, stage) for content, stage, *_ in ends for kind in MAKERS[content] if kind in kinds)
        found[place] = next(makers, None)
    return found


def _is_whole(kinds: tuple[Kind, ...]) -> bool:
    """Whether `kinds`, each once, are all the work of a microbatch on a stage. This is so if every value that passes to
    another stage is made once, and every value that is kept is made as often as it is used.
    """
    made = [content for kind in kinds for content, _ in DATAFLOW[kind].makes]
    used = [content for kind in kinds for content, _ in DATAFLOW[kind].needs]
    return all(made.count(content) == 1 for content in PASSING) and all(
        made.count(content) == used.count(content) for content in KEPT
    )


_EACH = [kind for kind in DATAFLOW if kind not in SEVERAL]  # once per stage and microbatch
WHOLE: tuple[tuple[Kind, ...], ...] = tuple(
    kinds for number in range(len(_EACH) + 1) for kinds in combinations(_EACH, number) if _is_whole(kinds)
)
"""The kinds of action that one microbatch runs on a stage in training, one tuple per way: such as (F, B)."""
