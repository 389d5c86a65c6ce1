"""The costs of stages that are all equal, as users give them: the command's options and the explorer's fields. Must not
contain: how they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

from pipeflow.core.action import Kind
from pipeflow.core.cost import BYTES, TIMES, CostModel
from pipeflow.core.dataflow import DATAFLOW, KEPT, LASTING, ON_HOST, Content
from pipeflow.core.placement import Placement


class EvenCost(NamedTuple):
    """A cost of stages that are all equal.

    Attributes:
        meaning: its meaning, as text for users.
        default: its value if it is not given.
        absent: the effect if it is not given or 0. Empty if the default says it.
        unit: its unit. Bandwidths are in bytes, too.
        of: the kind of action or the content that has this cost, if `CostModel.even` has no argument for it.
    """

    meaning: str
    default: float = 0
    absent: str = ""
    unit: Literal["time", "share", "bytes"] = "time"
    of: Kind | Content | None = None


_ARGUMENTS = {
    "forward": EvenCost("time of a forward for all layers of a rank", 1),
    "backward_input": EvenCost("time of a backward's input-gradient half", 1),
    "backward_weight": EvenCost("time of a backward's weight-gradient half", 1),
    "transfer": EvenCost("time from when a value leaves its rank until it arrives"),
    "overlap": EvenCost("share of a pair's shorter half that the longer half hides, from 0 to 1", unit="share"),
    "reduce": EvenCost("time to sum a rank's weight gradients over the replicas", absent="no reductions"),
    "optimizer": EvenCost("time of the optimizer's step of a rank's weights (S)", absent="no such steps"),
    "recompute": EvenCost("time to compute a forward again (C)", absent="that of a forward"),
    "offload": EvenCost("time to copy to the host what a forward saved (O), or back (L)"),
    "unshard": EvenCost("time to gather a rank's weights (U), which fully_shard divides over the replicas"),
    "saved_bytes": EvenCost(
        "bytes that a forward keeps for its backward", absent="memory in activations", unit="bytes"
    ),
    "deferred_bytes": EvenCost("bytes of those that the weight-gradient half still needs", unit="bytes"),
    "input_bytes": EvenCost("bytes of those that a forward keeps if it is computed again later", unit="bytes"),
}
_KINDS = [kind for kind, flow in DATAFLOW.items() if not flow.takes and kind not in TIMES.values()]
_CONTENTS = sorted(KEPT - {*BYTES.values()} - ON_HOST)


def _of_kind(kind: Kind) -> tuple[str, EvenCost]:
    name = DATAFLOW[kind].name
    return name.replace(" ", "_"), EvenCost(f"time of {name} ({kind})", of=kind)


def _of_content(content: Content) -> tuple[str, EvenCost]:
    kept = f"bytes of {content} while a rank has them" if content in LASTING else ""
    cost = EvenCost(kept or f"bytes kept for each microbatch: {content}", unit="bytes", of=content)
    return f"{content.replace(' ', '_')}_bytes", cost


EVEN_COSTS = _ARGUMENTS | dict(map(_of_kind, _KINDS)) | dict(map(_of_content, _CONTENTS))
"""Every cost: the arguments of `CostModel.even`, then those of other kinds of action and of other contents."""


def even_model(placement: Placement, numbers: Mapping[str, float]) -> CostModel:
    """`CostModel.even` with costs by their names in `EVEN_COSTS`."""
    arguments = {name: number for name, number in numbers.items() if name in _ARGUMENTS}
    stages, share = placement.num_stages, placement.chunks_per_rank
    others = {
        EVEN_COSTS[name].of: (number / share,) * stages
        for name, number in numbers.items()
        if name not in _ARGUMENTS and number
    }
    return replace(
        CostModel.even(placement, **arguments),
        times={kind: times for kind, times in others.items() if isinstance(kind, Kind)},
        kept_bytes={content: sizes for content, sizes in others.items() if isinstance(content, Content)},
    )
