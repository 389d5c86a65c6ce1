"""Costs: the times of actions and transfers, and the bytes that are kept; and the table of their fields: what each of
them is the cost of, its unit, its meaning, and how it is read. The options of the command, the controls of the explorer
and files of costs follow from this table. Must not contain: simulation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from numbers import Real
from operator import mul
from typing import Any, Literal, NamedTuple

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import DATAFLOW, KEPT, LASTING, MAKERS, ON_HOST, SEVERAL, Content
from pipeflow.core.errors import UsageError, numbers_of, require_type
from pipeflow.core.factors import Factors, Row, each_factor, factors_of, table_of
from pipeflow.core.files import parse
from pipeflow.core.pairing import Pairing
from pipeflow.core.placement import Placement
from pipeflow.core.route import Route, routes_among
from pipeflow.core.schedule import Schedule
from pipeflow.core.slices import places_of, require_cut, shares_of
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


def _late(name: str, value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise UsageError(f'{name} must be like {{"0F3": 0.2}}, got {value!r}')
    return {key: _number(f"{name} of {key}", number) for key, number in value.items()}


def _groups(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    groups = value if isinstance(value, list) and all(isinstance(group, list) for group in value) else [[None]]
    if not all(type(rank) is int for group in groups for rank in group):
        raise UsageError(f"{name} must be a list of the ranks on each link, such as [[0, 1], [2, 3]], got {value!r}")
    return tuple(map(tuple, groups))


def _factors(name: str, value: object) -> object:
    """A list per microbatch, a list of such lists per stage, or an object with a list for some stages."""
    if isinstance(value, dict):
        if unknown := [key for key in value if not (key.isascii() and key.isdecimal())]:
            raise UsageError(f'{name} must be like {{"0": [1, 2]}}, with a list for some stages, got {unknown[0]!r}')
        return {int(key): _numbers(f"{name} of stage {key}", row, "microbatch") for key, row in value.items()}
    if isinstance(value, list) and any(isinstance(row, list) for row in value):
        return [_numbers(f"{name} of stage {stage}", row, "microbatch") for stage, row in enumerate(value)]
    return _numbers(name, value, "microbatch")


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
    "exchange": CostField(
        "share of forwards and backwards in which experts exchange tokens, which pairs hide, from 0 to 1", unit="share"
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
    "microbatch_factors": CostField(read=_factors),
    "late": CostField(read=_late),
    "attention": CostField(read=_number),
    "slice_ends": CostField(read=partial(_numbers, of="slice")),
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
        if name in ("overlap", "exchange") and not any(schedule.has_pairs for schedule in schedules):
            yield name, "pairs of a forward and a backward"


LARGEST = 1e100  # largest cost: the sum over any number of actions stays finite
SMALLEST = 1e-100  # smallest cost that is not 0: the quotient of two costs stays finite
REQUIRED = ("forward", "backward_input", "backward_weight")
PER_STAGE = (*NAMED.values(), "activation_bytes", "exchange")

TimesByKind = Mapping[Kind, Sequence[float]]
"""Per kind of action, its time on each stage."""
BytesByContent = Mapping[Content, Sequence[float]]
"""Per content, the bytes that are kept of it on each stage."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """The times of actions and transfers, in one unit, which may be any; and optionally the bytes that a rank keeps.

    A full backward takes the time of both halves. A value that is sent to another rank occupies the link for
    `activation_bytes[stage] / bandwidth` and arrives a `latency` later. A gradient is as large as its activation.

    Attributes:
        forward: per stage, the time of a forward.
        backward_input, backward_weight: per stage, the times of the two halves of a backward.
        latency, bandwidth: of a transfer between two ranks, the latter in bytes per unit of time. Default: no time.
        activation_bytes: per stage, the bytes of its output. Empty: a transfer takes its latency alone.
        links: the `Link` of each ordered pair of ranks (from, to) that differs from `latency` and `bandwidth`.
        overlap, exchange: the share of a pair's shorter action that the longer one hides; and per stage, the share of a
            forward and of a backward in which tokens pass between expert ranks, which pairs hide. Empty: none.
        saved_bytes: per stage, the bytes that a forward keeps for its backward. Empty: memory is in activations.
        deferred_bytes: per stage, the bytes that a backward keeps between its two halves. Empty: they are not counted.
        reduce, optimizer, unshard: per stage, the time to reduce its weight gradients over the ranks that hold it, that
            of the optimizer's step, and that to gather weights which fully_shard divides. Empty: no time.
        recompute: per stage, the time to compute a forward again. Empty: that of the forward.
        offload, copy_groups: per stage, the time to copy to the host what a forward saved, or back; and the ranks that
            share a link to their host, which carries one copy at a time each way. Empty: no time; none share one.
        input_bytes: per stage, the bytes that a forward keeps if it is computed again. Empty: not counted.
        times, kept_bytes: per kind of action, or content, that has no argument here, the time or bytes kept per stage.
        route_bytes: per route (from stage, to stage), the bytes that are sent on it.
        microbatch_factors: per microbatch, its times and bytes relative to those above: a list for all stages, or one
            per stage, such as `[[1, 4], [1, 1]]` or `{0: [1, 4]}`. What a stage sends has its factor. Empty: all 1.
        attention, slice_ends: for slices, the share of causal attention in the times of a microbatch, and where each
            ends, in tokens. Empty: all slices cost the same.
        late: by how much single actions, such as "0F3", take longer than others of their kind and stage.
        unit: "s" if times are in seconds, so that drawings choose a readable unit; "" if it is not known.
        durations, sizes, factors: of each stage, times by kind of action, bytes by content, factors by microbatch.

    Raises UsageError for tuples of different lengths, impossible routes or units, and numbers that are negative, not
    finite, or outside `SMALLEST` to `LARGEST`.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    latency: float = 0.0
    bandwidth: float = math.inf
    activation_bytes: tuple[float, ...] = ()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict, hash=False)
    overlap: float = 0.0
    saved_bytes: tuple[float, ...] = ()
    deferred_bytes: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    recompute: tuple[float, ...] = ()
    offload: tuple[float, ...] = ()
    copy_groups: tuple[tuple[int, ...], ...] = ()
    input_bytes: tuple[float, ...] = ()
    unshard: tuple[float, ...] = ()
    times: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict, hash=False)
    kept_bytes: Mapping[Content, tuple[float, ...]] = field(default_factory=dict, hash=False)
    route_bytes: Mapping[tuple[int, int], float] = field(default_factory=dict, hash=False)
    microbatch_factors: Factors = ()
    unit: str = ""
    optimizer: tuple[float, ...] = ()
    late: Mapping[str, float] = field(default_factory=dict, hash=False)
    attention: float = 0.0
    slice_ends: tuple[float, ...] = ()
    exchange: tuple[float, ...] = ()
    durations: Mapping[Kind, tuple[float, ...]] = field(init=False, repr=False, compare=False)
    sizes: Mapping[Content, tuple[float, ...]] = field(init=False, repr=False, compare=False)
    factors: tuple[Row, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._take_lists()
        stages = len(self.forward)
        for name, numbers in self._per_stage().items():
            if len(numbers) != stages:
                raise UsageError(f"costs are per stage: {name} has length {len(numbers)}, forward has length {stages}")
            for stage, number in enumerate(numbers):
                _require_cost(f"{name} of stage {stage}", number)
        for route, number in self.route_bytes.items():
            _require_cost(f"route_bytes of {tuple(route)}", number)
        routes_among(stages, self.route_bytes)
        for where, factor in each_factor(self.microbatch_factors):
            _require_cost(f"microbatch_factors of {where}", factor)
        for action, number in self.late.items():
            _require_cost(f"late of {action}", number)
            if Action.parse(action).stage >= stages:
                raise UsageError(f"late has {action}, but there are costs of {stages} stages")
        for link in (Link(self.latency, self.bandwidth), *self.links.values()):
            _require_cost("latency", link.latency)
            if not link.bandwidth >= SMALLEST:
                raise UsageError(f"bandwidth must be positive, at least {SMALLEST:g}, got {link.bandwidth}")
        require_cut(self.attention, self.slice_ends)
        require_unit(self.unit)
        _require_groups(self.copy_groups)
        if not 0 <= self.overlap <= 1:
            raise UsageError(f"overlap is a share of the shorter half, from 0 to 1, got {self.overlap}")
        for stage, share in enumerate(self.exchange):
            if share > 1:
                raise UsageError(f"exchange is a share of the times of a stage, from 0 to 1, got {share} of {stage=}")
        object.__setattr__(self, "factors", table_of(self.microbatch_factors, stages))
        object.__setattr__(self, "durations", self._durations())
        sizes = {
            **self.kept_bytes,
            **{of: getattr(self, name) for of, name in NAMED.items() if isinstance(of, Content)},
        }
        object.__setattr__(self, "sizes", {content: numbers for content, numbers in sizes.items() if numbers})

    def _take_lists(self) -> None:
        """Makes tuples of the numbers per stage, which may be given as lists. Raises UsageError for other values."""
        for name in (*PER_STAGE, "slice_ends"):
            object.__setattr__(self, name, _tuple_of(name, getattr(self, name)))
        object.__setattr__(self, "microbatch_factors", factors_of(self.microbatch_factors, len(self.forward)))
        for name in ("times", "kept_bytes"):
            tables = {key: _tuple_of(f"{name} of {key}", numbers) for key, numbers in getattr(self, name).items()}
            object.__setattr__(self, name, tables)
        groups = self.copy_groups
        if any(not isinstance(group, Sequence) for group in groups):
            raise UsageError(f"copy_groups is a list of lists of ranks, such as [[0, 1], [2, 3]], got {groups!r}")
        object.__setattr__(self, "copy_groups", tuple(numbers_of("copy_groups", group) for group in groups))
        for link in self.links.values():
            require_type("a link", link, Link)

    def _durations(self) -> dict[Kind, tuple[float, ...]]:
        given = self.given
        free = (0.0,) * len(self.forward)
        own = {kind: tuple(map(float, given.get(kind, ()))) or free for kind in DATAFLOW}
        together = {
            kind: tuple(map(sum, zip(*(own[part] for part in flow.takes), strict=True)))
            for kind, flow in DATAFLOW.items()
            if flow.takes and not given.get(kind)
        }
        return own | together

    def _per_stage(self) -> dict[str, tuple[float, ...]]:
        """The names and values of all fields that have one number per stage and are not empty."""
        named = {name: getattr(self, name) for name in PER_STAGE}
        found = {name: numbers for name, numbers in named.items() if numbers or name in REQUIRED}
        found |= {f"times of {kind}": numbers for kind, numbers in self.times.items()}
        return found | {f"kept_bytes of {content}": numbers for content, numbers in self.kept_bytes.items()}

    @classmethod
    def even(
        cls,
        placement: Placement,
        forward: float = 1,
        backward_input: float = 1,
        backward_weight: float = 1,
        transfer: float = 0,
        *,
        saved_bytes: float = 0,
        deferred_bytes: float = 0,
        overlap: float = 0,
        reduce: float = 0,
        optimizer: float = 0,
        recompute: float = 0,
        offload: float = 0,
        input_bytes: float = 0,
        unshard: float = 0,
        exchange: float = 0,
    ) -> CostModel:
        """The costs of a model whose stages are all equal.

        All numbers are for one microbatch on one rank's whole share of the model. They are divided evenly among its
        chunks, so schedules with and without chunks can be compared.

        Args:
            placement: the placement of the stages.
            forward, backward_input, backward_weight: the time of a forward, and of the two halves of a backward.
            transfer: the latency of a transfer between two ranks.
            saved_bytes: the bytes that a forward keeps for its backward. 0: memory is counted in activations.
            deferred_bytes: the part of `saved_bytes` that the weight-gradient half still needs.
            overlap, exchange: as in `CostModel`.
            reduce, optimizer, recompute, offload, unshard: as in `CostModel`, for a rank's whole share. 0: as if empty.
            input_bytes: the part of `saved_bytes` that a forward keeps if it is computed again later.
        """
        numbers = {name: number for name, number in locals().items() if name in EVEN_COSTS}  # the arguments
        return even_costs(placement, numbers)

    @property
    def given(self) -> dict[Kind, tuple[float, ...]]:
        """The times that were given, by kind of action; `durations` has those that follow from them, too."""
        named = {of: getattr(self, name) for of, name in NAMED.items() if isinstance(of, Kind)}
        return {kind: times for kind, times in {**self.times, **named}.items() if times}

    def factor(self, stage: int, microbatch: int) -> float:
        """By how much the times and bytes of a microbatch are multiplied on a stage."""
        return self.factors[stage][microbatch] if self.factors else 1

    def duration(self, kind: Kind, stage: int, microbatch: int | None = None) -> float:
        """The time of an action of one `microbatch`, or of factor 1. Raises UsageError for a stage without a cost."""
        if stage >= len(self.forward):
            raise UsageError(f"the cost model has {len(self.forward)} stages; stage {stage} has no cost")
        time = self.durations[kind][stage]
        if microbatch is None:
            return time
        late = 0.0
        if self.late:
            late = sum(self.late.get(f"{stage}{each}{microbatch}", 0.0) for each in self._taken(kind))
        return late + (time if kind in SEVERAL else time * self.factor(stage, microbatch))

    @property
    def varied(self) -> Mapping[int, Mapping[Kind, Sequence[float]]]:
        """The `durations` of each microbatch that differs from others."""
        columns = [*zip(*self.factors, strict=True)]  # per microbatch, its factor on each stage
        tables = {
            column: {
                kind: times if kind in SEVERAL else tuple(map(mul, column, times))
                for kind, times in self.durations.items()
            }
            for column in {*columns}
        }
        found: dict[int, Mapping[Kind, Sequence[float]]] = {
            microbatch: tables[column] for microbatch, column in enumerate(columns)
        }
        for text, extra in self.late.items():
            action = Action.parse(text)
            table = found.setdefault(action.microbatch, self.durations)
            for kind in (each for each in DATAFLOW if action.kind in self._taken(each)):
                times = [*table[kind]]
                times[action.stage] += extra
                table = found[action.microbatch] = {**table, kind: times}
        return found

    def _taken(self, kind: Kind) -> tuple[Kind, ...]:
        """The kinds of action whose times add up to that of a kind: itself alone if it has a time of its own."""
        return kind, *(() if self.given.get(kind) else DATAFLOW[kind].takes)

    def pair(self, forward: int, backward: Kind, stage: int) -> float:
        """The time of a pair: a forward on stage `forward`, overlapped with a `backward` (B or I) on `stage`."""
        pair = Action(Kind.F, forward, 0), Action(backward, stage, 0)
        return pairing_of(self).time(pair, *(self.duration(action.kind, action.stage) for action in pair))

    def link(self, sender: int | None = None, receiver: int | None = None) -> Link:
        """The link from rank `sender` to rank `receiver`; without ranks, the default link."""
        usual = Link(self.latency, self.bandwidth)
        return usual if sender is None or receiver is None else self.links.get((sender, receiver), usual)

    def holding(
        self, stage: int, sender: int | None = None, receiver: int | None = None, route: Route | None = None
    ) -> float:
        """The time that the activation of `stage`, or its gradient, occupies a link, or of what passes on `route`."""
        if route is None and not self.activation_bytes:
            return 0.0
        size = self.activation_bytes[stage] if route is None else self.route_bytes[route]
        return size / self.link(sender, receiver).bandwidth

    def transfer(self, stage: int, sender: int | None = None, receiver: int | None = None) -> float:
        """The time to move the activation of `stage`, or its gradient, between two ranks over a link that is free."""
        return self.link(sender, receiver).latency + self.holding(stage, sender, receiver)


def pairing_of(cost: CostModel) -> Pairing:
    """What the two actions of a pair hide of each other."""
    return Pairing.of(cost.overlap, cost.exchange, (cost.durations[Kind.I], cost.durations[Kind.W]))


def slice_lengths(cost: CostModel, slices: int) -> tuple[float, ...]:
    """The share of each of so many slices in the length of its microbatch."""
    return shares_of(_slice_ends(cost, slices), 0.0)


def slice_works(cost: CostModel, slices: int) -> tuple[float, ...]:
    """The share of each of so many slices in the times of its microbatch."""
    return shares_of(_slice_ends(cost, slices), cost.attention)


def _slice_ends(cost: CostModel, slices: int) -> tuple[float, ...]:
    return cost.slice_ends or places_of(slices, cost.attention)


def costs_of(times: TimesByKind, sizes: BytesByContent | None = None, **others: Any) -> CostModel:
    """The costs with these times and bytes per stage. `others` are other arguments of `CostModel`."""
    arguments: dict[str, Any] = dict.fromkeys(REQUIRED, ()) | others
    given: list[tuple[Kind | Content, Sequence[float]]] = [*times.items(), *(sizes or {}).items()]
    for of, numbers in given:
        if of in NAMED:
            arguments[NAMED[of]] = tuple(numbers)
        elif numbers:
            table = arguments.setdefault("times" if isinstance(of, Kind) else "kept_bytes", {})
            table[of] = tuple(numbers)
    return CostModel(**arguments)


def read_costs(text: str) -> CostModel:
    """Reads JSON whose keys are fields of `CostModel`. Raises UsageError with the field that is wrong."""
    given = parse(text)
    known = [each.name for each in fields(CostModel) if each.init]
    if not isinstance(given, dict):
        raise UsageError(f"costs must be an object with some of {', '.join(known)}")
    if unknown := [name for name in given if name not in known]:
        raise UsageError(f"{unknown[0]!r} is not a cost; known: {', '.join(known)}")
    if missing := [name for name in REQUIRED if name not in given]:
        raise UsageError(f"{missing[0]} is missing: give a list with one number per stage")
    return CostModel(**{name: ARGUMENTS[name].read(name, value) for name, value in given.items()})


def even_costs(placement: Placement, numbers: Mapping[str, float]) -> CostModel:
    """`CostModel.even` with costs by their names in `EVEN_COSTS`, which has those of other kinds and contents, too."""
    stages, share = placement.num_stages, placement.chunks_per_rank
    given = {name: cost.default for name, cost in EVEN_COSTS.items()} | dict(numbers)
    per_stage = {
        cost.of: (given[name] / share,) * stages
        for name, cost in EVEN_COSTS.items()
        if cost.of is not None and (given[name] or name in REQUIRED)
    }
    return costs_of(
        {kind: times for kind, times in per_stage.items() if isinstance(kind, Kind)},
        {content: sizes for content, sizes in per_stage.items() if isinstance(content, Content)},
        latency=given["transfer"],
        overlap=given["overlap"],
        exchange=(given["exchange"],) * stages if given["exchange"] else (),
    )


def require_unit(unit: str) -> None:
    """Raises UsageError unless `unit` is "s" or ""."""
    if unit not in ("", "s"):
        raise UsageError(f"the unit is 's' (seconds) or '' (not known), got {unit!r}: convert the times to seconds")


def require_ends(ends: Sequence[float], slices: int) -> None:
    """Raises UsageError unless there is an end for each slice, or none at all."""
    if len(ends) not in (0, slices):
        raise UsageError(
            f"slice_ends has {len(ends)} numbers, but the schedule has {slices} slices: give one per slice, or none if "
            "all are equally long"
        )


def _require_groups(groups: tuple[tuple[int, ...], ...]) -> None:
    ranks = [rank for group in groups for rank in group]
    if twice := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        raise UsageError(f"copy_groups: rank {twice[0]} is in more than one group, but a rank has one link to its host")


def _tuple_of(what: str, given: object) -> tuple[float, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(f"{what} must be a list of numbers, got {given!r}")
    return tuple(given)


def require_cost_model(cost: object) -> None:
    """Raises UsageError for anything that is no CostModel, such as a number."""
    require_type("cost", cost, CostModel, "CostModel.even(placement) has the same times for all stages")


def _require_cost(what: str, number: float) -> None:
    if not isinstance(number, Real):
        raise UsageError(f"{what} must be a number, got {number!r}")
    if not (math.isfinite(number) and number >= 0):
        raise UsageError(f"{what} must be finite and not negative, got {number}")
    if number and not SMALLEST <= number <= LARGEST:
        raise UsageError(f"{what} must be 0, or from {SMALLEST:g} to {LARGEST:g}, got {number}")
