"""The dataflow, said once: what every kind of action needs and makes, where on its rank it runs, and so what it keeps
in memory and what passes between ranks. Everything else reads this table: a new kind of action is a new row.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from pipeflow.core.action import Action, Entry, Kind
from pipeflow.core.route import Routes


class Content(StrEnum):
    """What passes between actions."""

    ACTIVATION = "activation"  # a stage's output, for the next stage
    GRADIENT = "gradient"  # of a stage's input, for the previous stage
    SAVED = "saved"  # what a forward keeps for its backward
    DEFERRED = "deferred"  # what an input-gradient half keeps for its weight-gradient half
    WEIGHT_GRADIENT = "weight gradient"  # what a microbatch adds to those of its stage, for a reduction


VALUE = "{content} of stage {stage}, microbatch {microbatch}"


class Value(NamedTuple):
    """One value of a run, there from when it is made to when it is used. What stays on its rank may be made again after
    its use. Of weight gradients a reduction uses the last one, which stands for all before it; without reductions
    nobody uses them. As text: `activation 2F0`'s maker and content.

    `stage` is that of its maker. What passes on a route has in `to` the stage that uses it; elsewhere the table says
    which one that is.
    """

    content: Content
    stage: int
    microbatch: int
    to: int | None = None

    def __str__(self) -> str:
        stage = self.stage if self.to is None else f"{self.stage} for stage {self.to}"
        return VALUE.format(content=self.content, stage=stage, microbatch=self.microbatch)

    @property
    def user(self) -> int:
        """The stage that uses it."""
        return self.stage + PASSING.get(self.content, 0) if self.to is None else self.to

    @property
    def answered(self) -> Value:
        """The activation that a gradient belongs to."""
        source = None if self.to is None else self.stage
        return Value(Content.ACTIVATION, self.user, self.microbatch, source)


class Stream(StrEnum):
    """What a rank can do at once: the actions of one stream run one after the other, beside those of other streams. A
    rank begins them in the order of its row, and only computations hold up what follows.
    """

    COMPUTE = "computations"
    REDUCE = "reductions"


Ends = tuple[tuple[Content, int], ...]


class Flow(NamedTuple):
    """A row of the table.

    Attributes:
        name: what people call such an action.
        needs, makes: values, as (content, offset from its own stage).
        takes: those of `CostModel`'s times that it takes together; without any its time is in `CostModel.times`.
        stream: on which it runs. Only computations need or make what passes between ranks.
        joint: whether all ranks that hold the stage do it at once, for all microbatches; it makes nothing.
        in_place: whether what it makes comes in the place of what it uses, when it ends; else both are there meanwhile.
    """

    name: str
    needs: Ends
    makes: Ends
    takes: tuple[str, ...] = ()
    stream: Stream = Stream.COMPUTE
    joint: bool = False
    in_place: bool = False


DATAFLOW: dict[Kind, Flow] = {
    Kind.F: Flow(
        "forward",
        needs=((Content.ACTIVATION, -1),),
        makes=((Content.ACTIVATION, 0), (Content.SAVED, 0)),
        takes=("forward",),
    ),
    Kind.B: Flow(
        "backward",
        needs=((Content.GRADIENT, +1), (Content.SAVED, 0)),
        makes=((Content.GRADIENT, 0), (Content.WEIGHT_GRADIENT, 0)),
        takes=("backward_input", "backward_weight"),
    ),
    Kind.I: Flow(
        "input gradient",
        needs=((Content.GRADIENT, +1), (Content.SAVED, 0)),
        makes=((Content.GRADIENT, 0), (Content.DEFERRED, 0)),
        takes=("backward_input",),
        in_place=True,
    ),
    Kind.W: Flow(
        "weight gradient",
        needs=((Content.DEFERRED, 0),),
        makes=((Content.WEIGHT_GRADIENT, 0),),
        takes=("backward_weight",),
    ),
    Kind.R: Flow(
        "gradient reduction",
        needs=((Content.WEIGHT_GRADIENT, 0),),
        makes=(),
        takes=("reduce",),
        stream=Stream.REDUCE,
        joint=True,
    ),
}

PASSING: dict[Content, int] = {
    content: -offset for flow in DATAFLOW.values() for content, offset in flow.needs if offset
}
"""What passes between stages, and so between ranks: from its maker's stage, how far it is to that of its user."""

KEPT = frozenset(
    content for flow in DATAFLOW.values() if not flow.joint for content, offset in flow.needs if not offset
)
"""What a rank keeps from the action that makes it to the one that uses it."""

MAKERS: dict[Content, tuple[Kind, ...]] = {
    content: tuple(kind for kind, flow in DATAFLOW.items() if (content, 0) in flow.makes) for content in Content
}
"""The kinds of action that make a content."""


class End(NamedTuple):
    """A value of every microbatch, without the microbatch; fields as of `Value`."""

    content: Content
    stage: int
    to: int | None = None

    def of(self, microbatch: int) -> Value:
        """The value of one microbatch."""
        return Value(self.content, self.stage, microbatch, self.to)


class AtStage(NamedTuple):
    """A row of the table for one stage."""

    needs: tuple[End, ...]
    makes: tuple[End, ...]


@lru_cache(maxsize=64)
def flows(num_stages: int, routes: Routes = ()) -> dict[tuple[Kind, int], AtStage]:
    """The table for a pipeline of `num_stages`: per (kind, stage), what it needs and makes.

    The first stage's input and the last stage's gradient come from the batch and the loss, and nobody uses the
    last stage's activation or the first stage's gradient: these are not values of a schedule.

    What passes from a stage to the next passes on `routes`, too, and what passes to the stage before passes back on
    them. A stage's actions come after those of the stages before it anyway, so a schedule that is sound without routes
    is sound with any.
    """
    stages = frozenset(range(num_stages))
    ways = [(content, *(route if step > 0 else route[::-1])) for content, step in PASSING.items() for route in routes]

    def needed(stage: int, flow: Flow) -> tuple[End, ...]:
        found = (End(content, stage + offset) for content, offset in flow.needs)
        passing = {content for content, offset in flow.needs if offset}
        return (*filter(exists, found), *(End(*each) for each in ways if each[0] in passing and each[2] == stage))

    def made(stage: int, flow: Flow) -> tuple[End, ...]:
        found = (End(content, stage + offset) for content, offset in flow.makes)
        contents = {content for content, _ in flow.makes}
        return (*filter(exists, found), *(End(*each) for each in ways if each[0] in contents and each[1] == stage))

    def exists(end: End) -> bool:
        return {end.stage, end.stage + PASSING.get(end.content, 0)} <= stages

    return {
        (kind, stage): AtStage(needed(stage, flow), made(stage, flow))
        for kind, flow in DATAFLOW.items()
        for stage in range(num_stages)
    }


def needs(action: Action, num_stages: int) -> list[Value]:
    """The values `action` uses, without those of routes."""
    return [end.of(action.microbatch) for end in flows(num_stages)[action.kind, action.stage].needs]


def makes(action: Action, num_stages: int) -> list[Value]:
    """The values `action` makes, without those of routes."""
    return [end.of(action.microbatch) for end in flows(num_stages)[action.kind, action.stage].makes]


def stream_of(entry: Entry) -> Stream:
    """The stream that a row's entry runs on; a pair computes."""
    return DATAFLOW[entry.kind].stream if isinstance(entry, Action) else Stream.COMPUTE


Place = tuple[Kind, int]  # kind and stage


@lru_cache(maxsize=64)
def sources(kinds: tuple[Kind, ...], num_stages: int) -> dict[Place, Place | None]:
    """Of a pipeline in which each stage runs each of `kinds` once per microbatch: what makes the value that an action
    waits for, from another stage if there is such a value, else from its own; None for what waits for the batch alone.
    """
    table = flows(num_stages)
    found: dict[Place, Place | None] = {}
    for place in ((kind, stage) for kind in kinds for stage in range(num_stages)):
        ends = sorted(table[place].needs, key=lambda end: end[0] not in PASSING)
        makers = ((kind, stage) for content, stage, _ in ends for kind in MAKERS[content] if kind in kinds)
        found[place] = next(makers, None)
    return found


def _is_whole(kinds: tuple[Kind, ...]) -> bool:
    """Whether one of each of `kinds` is a microbatch's whole way through a stage: what passes on to other stages is
    made once, and what is kept is made as often as it is used.
    """
    made = [content for kind in kinds for content, _ in DATAFLOW[kind].makes]
    used = [content for kind in kinds for content, _ in DATAFLOW[kind].needs]
    return all(made.count(content) == 1 for content in PASSING) and all(
        made.count(content) == used.count(content) for content in KEPT
    )


_EACH = [kind for kind, flow in DATAFLOW.items() if not flow.joint]  # of every stage and microbatch
WHOLE: tuple[tuple[Kind, ...], ...] = tuple(
    kinds for number in range(len(_EACH) + 1) for kinds in combinations(_EACH, number) if _is_whole(kinds)
)
"""The kinds of action that a microbatch may go through on a stage in training, in the order of the table."""
