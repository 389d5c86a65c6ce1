"""The fields of costs, in one table: what each of them is the cost of, its unit, its meaning, and how it is read from a
file. `CostModel`, the options of the command, the controls of the explorer and files of costs all follow from it. Must
not contain: costs themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from pipeflow.core.action import Kind
from pipeflow.core.dataflow import DATAFLOW, KEPT, LASTING, MAKERS, ON_HOST, Content
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.text import listed


class Link(NamedTuple):
    """A link from one rank to another.

    Attributes:
        latency: time from when a value has left its rank until it arrives.
        bandwidth: bytes per unit of time.
    """

    latency: float = 0.0
    bandwidth: float = math.inf


def _number(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{what} must be a number, got {value!r}")
    return float(value)


def _numbers(name: str, value: object, of: str = "stage") -> tuple[float, ...]:
    if not isinstance(value, list):
        raise UsageError(f"{name} must be a list with one number per {of}, got {value!r}")
    return tuple(_number(f"{name} of {of} {index}", number) for index, number in enumerate(value))


def _table(keys: type[Kind | Content], name: str, value: object) -> dict[Kind | Content, tuple[float, ...]]:
    if not isinstance(value, dict) or set(value) - set(keys):
        some = ", ".join(keys)
        raise UsageError(f"{name} must be an object with a list per stage for some of {some}, got {value!r}")
    return {keys(key): _numbers(f"{name} of {key}", numbers) for key, numbers in value.items()}


_ENDS = re.compile(r"\s*(\d{1,9})\s*->\s*(\d{1,9})\s*", re.ASCII)


def _links(_: str, value: object) -> dict[tuple[int, int], Link]:
    if not isinstance(value, dict):
        raise UsageError(f'links must be like {{"0->1": {{"latency": 0.1}}}}, got {value!r}')
    links = {}
    for key, given in value.items():
        ends = _ENDS.fullmatch(key)
        if ends is None or not isinstance(given, dict) or set(given) - set(Link._fields):
            raise UsageError(f'links: {key!r} must be like "0->1": {{"latency": 0.1, "bandwidth": 50}}')
        link = Link(**{name: _number(f"{name} of link {key}", number) for name, number in given.items()})
        if link.latency < 0 or not link.bandwidth > 0:
            raise UsageError(f"link {key}: latency must not be negative and bandwidth must be positive, got {given}")
        links[int(ends[1]), int(ends[2])] = link
    return links


def _routes(name: str, value: object) -> dict[tuple[int, int], float]:
    if not isinstance(value, dict) or not all(map(_ENDS.fullmatch, value)):
        raise UsageError(f'{name} must be like {{"0->2": 100}}, from stage to stage, got {value!r}')
    found = {key: _number(f"{name} of {key}", number) for key, number in value.items()}
    return {(int(ends[1]), int(ends[2])): found[key] for key in value if (ends := _ENDS.fullmatch(key))}


def _groups(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    groups = value if isinstance(value, list) and all(isinstance(group, list) for group in value) else [[None]]
    if not all(type(rank) is int for group in groups for rank in group):
        raise UsageError(f"{name} must be a list of the ranks on each link, such as [[0, 1], [2, 3]], got {value!r}")
    return tuple(map(tuple, groups))


class CostField(NamedTuple):
    """A field of costs.

    Attributes:
        meaning: what it is for stages that are all equal, as text for users. Empty: it is for files alone.
        of: the kind of action whose time it is, or the content whose bytes it has. None: neither.
        unit: its unit. Bandwidths are in bytes, too.
        default: its value if it is not given.
        absent: the effect if it is not given or 0. Empty if the default says it.
        read: makes its value from its name and a JSON value. Raises UsageError for a wrong one.
    """

    meaning: str = ""
    of: Kind | Content | None = None
    unit: Literal["time", "share", "bytes"] = "time"
    default: float = 0
    absent: str = ""
    read: Callable[[str, Any], Any] = _numbers


ARGUMENTS: dict[str, CostField] = {
    "forward": CostField("time of a forward for all layers of a rank", Kind.F, default=1),
    "backward_input": CostField("time of a backward's input-gradient half", Kind.I, default=1),
    "backward_weight": CostField("time of a backward's weight-gradient half", Kind.W, default=1),
    "latency": CostField("time from when a value leaves its rank until it arrives", read=_number),
    "activation_bytes": CostField("bytes of a microbatch's activation between ranks", unit="bytes"),
    "bandwidth": CostField("bytes per unit of time between two ranks", unit="bytes", read=_number),
    "overlap": CostField(
        "share of a pair's shorter half that the longer half hides, from 0 to 1", unit="share", read=_number
    ),
    "reduce": CostField("time to sum a rank's weight gradients over the replicas", Kind.R, absent="no reductions"),
    "optimizer": CostField("time of the optimizer's step of a rank's weights (S)", Kind.S, absent="no such steps"),
    "recompute": CostField("time to compute a forward again (C)", Kind.C, absent="that of a forward"),
    "offload": CostField("time to copy to the host what a forward saved (O), or back (L)", Kind.O),
    "unshard": CostField("time to gather a rank's weights (U), which fully_shard divides over the replicas", Kind.U),
    "saved_bytes": CostField(
        "bytes that a forward keeps for its backward", Content.SAVED, "bytes", absent="memory in activations"
    ),
    "deferred_bytes": CostField("bytes that the weight-gradient half still needs", Content.DEFERRED, "bytes"),
    "input_bytes": CostField("bytes that a forward keeps if it is computed again later", Content.INPUT, "bytes"),
    "links": CostField(read=_links),
    "copy_groups": CostField(read=_groups),
    "times": CostField(read=partial(_table, Kind)),
    "kept_bytes": CostField(read=partial(_table, Content)),
    "route_bytes": CostField(read=_routes),
    "microbatch_factors": CostField(read=partial(_numbers, of="microbatch")),
    "unit": CostField(read=lambda _, value: value),  # CostModel checks it
}
"""The arguments of `CostModel`."""

NAMED = {field.of: name for name, field in ARGUMENTS.items() if field.of is not None}
"""The argument of each kind of action and of each content that has one. Others stand in `times` and `kept_bytes`."""


def _further() -> Iterator[tuple[str, CostField]]:
    """The fields of kinds of action and of contents that have no argument."""
    for kind, flow in DATAFLOW.items():
        if not flow.takes and kind not in NAMED:
            yield flow.name.replace(" ", "_"), CostField(f"time of {flow.name} ({kind})", kind)
    for content in sorted(KEPT - NAMED.keys() - ON_HOST):
        kept = f"bytes of {content} while a rank has them" if content in LASTING else ""
        meaning = kept or f"bytes kept for each microbatch: {content}"
        yield f"{content.replace(' ', '_')}_bytes", CostField(meaning, content, "bytes")


FIELDS = {name: field for name, field in ARGUMENTS.items() if field.meaning} | dict(_further())
"""The fields with a meaning for users: arguments of `CostModel`, then those of other kinds of action and contents."""

EVEN_NAMES = {
    name: "transfer" if name == "latency" else name for name in FIELDS if name not in ("activation_bytes", "bandwidth")
}
"""Those that may be the same for all stages, with their names as arguments of `CostModel.even` and as options."""

EVEN_COSTS = {even: FIELDS[name] for name, even in EVEN_NAMES.items()}
"""The same by these names."""


def without_use(even: Collection[str], schedules: Sequence[Schedule]) -> Iterator[tuple[str, str]]:
    """The names of even costs that no schedule has a use for, with the names of what would have."""
    kinds = frozenset[Kind]().union(*(schedule.kinds for schedule in schedules))
    for name in even:
        of = EVEN_COSTS[name].of
        if isinstance(of, Kind):
            users = {kind for kind, flow in DATAFLOW.items() if kind is of or of in flow.takes}
        elif of is not None:
            users = {*MAKERS[of], *(kind for kind, flow in DATAFLOW.items() if flow.needs_only is of)}
        else:
            users = set()
        if users and not users & kinds:
            yield name, listed([f"{DATAFLOW[kind].name}s" for kind in Kind if kind in users], "or")
        if name == "overlap" and not any(schedule.has_pairs for schedule in schedules):
            yield name, "pairs of a forward and a backward"
