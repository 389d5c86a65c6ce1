"""The dataflow, said once: what every kind of action needs and makes, and where on its rank it runs. Verify, simulate,
lower and memory read this table; nothing else knows it, and a new kind of action is a new row.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from pipeflow.core.action import Action, Kind


class Content(StrEnum):
    """What passes between actions."""

    ACTIVATION = "activation"  # a stage's output, for the next stage
    GRADIENT = "gradient"  # of a stage's input, for the previous stage
    SAVED = "saved"  # what a forward keeps for its backward
    DEFERRED = "deferred"  # what an input-gradient half keeps for its weight-gradient half
    WEIGHT_GRADIENT = "weight gradient"  # what a microbatch adds to those of its stage, for a reduction


VALUE = "{content} of stage {stage}, microbatch {microbatch}"


class Value(NamedTuple):
    """One value of a run: made once and used once, but for weight gradients: a reduction stands for all microbatches
    before its own, and without reductions nobody uses them. As text: `activation 2F0`'s maker and content.
    """

    content: Content
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return VALUE.format(**self._asdict())


class Stream(StrEnum):
    """What a rank can do at once: the actions of one stream run one after the other, beside those of other streams. A
    rank begins them in the order of its row, and only computations hold up what follows.
    """

    COMPUTE = "computations"
    REDUCE = "reductions"


class Flow(NamedTuple):
    """A row of the table: the name of one kind of action; what it needs and makes, as (content, offset from its own
    stage); the stream of its rank that it runs on; and whether it is `joint`: done by all ranks that hold the stage at
    once.
    """

    name: str
    needs: tuple[tuple[Content, int], ...]
    makes: tuple[tuple[Content, int], ...]
    stream: Stream = Stream.COMPUTE
    joint: bool = False


DATAFLOW: dict[Kind, Flow] = {
    Kind.F: Flow(
        "forward",
        needs=((Content.ACTIVATION, -1),),
        makes=((Content.ACTIVATION, 0), (Content.SAVED, 0)),
    ),
    Kind.B: Flow(
        "backward",
        needs=((Content.GRADIENT, +1), (Content.SAVED, 0)),
        makes=((Content.GRADIENT, 0), (Content.WEIGHT_GRADIENT, 0)),
    ),
    Kind.I: Flow(
        "input gradient",
        needs=((Content.GRADIENT, +1), (Content.SAVED, 0)),
        makes=((Content.GRADIENT, 0), (Content.DEFERRED, 0)),
    ),
    Kind.W: Flow(
        "weight gradient",
        needs=((Content.DEFERRED, 0),),
        makes=((Content.WEIGHT_GRADIENT, 0),),
    ),
    Kind.R: Flow(
        "gradient reduction",
        needs=((Content.WEIGHT_GRADIENT, 0),),
        makes=(),
        stream=Stream.REDUCE,
        joint=True,
    ),
}


@lru_cache(maxsize=64)
def flows(num_stages: int) -> dict[tuple[Kind, int], Flow]:
    """The table for a pipeline of `num_stages`: per (kind, stage), its needs and makes as (content, stage).

    The first stage's input and the last stage's gradient come from the batch and the loss, and nobody uses the
    last stage's activation or the first stage's gradient: these are not values of the plan.
    """
    inner = {(Content.ACTIVATION, stage) for stage in range(num_stages - 1)}
    inner |= {(Content.GRADIENT, stage) for stage in range(1, num_stages)}
    kept = (Content.SAVED, Content.DEFERRED, Content.WEIGHT_GRADIENT)
    inner |= {(content, stage) for content in kept for stage in range(num_stages)}

    def at(stage: int, ends: tuple[tuple[Content, int], ...]) -> tuple[tuple[Content, int], ...]:
        return tuple((content, stage + offset) for content, offset in ends if (content, stage + offset) in inner)

    return {
        (kind, stage): flow._replace(needs=at(stage, flow.needs), makes=at(stage, flow.makes))
        for kind, flow in DATAFLOW.items()
        for stage in range(num_stages)
    }


def needs(action: Action, num_stages: int) -> list[Value]:
    """The values `action` uses."""
    flow = flows(num_stages)[action.kind, action.stage]
    return [Value(content, stage, action.microbatch) for content, stage in flow.needs]


def makes(action: Action, num_stages: int) -> list[Value]:
    """The values `action` makes."""
    flow = flows(num_stages)[action.kind, action.stage]
    return [Value(content, stage, action.microbatch) for content, stage in flow.makes]
