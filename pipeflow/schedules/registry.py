"""The registry: the names of the families of schedules, the function that makes a schedule by name, what the options of
schedules mean, and the names under which it makes a given schedule. Must not contain: the orders themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

from pipeflow.core.action import Kind, actions_of
from pipeflow.core.dataflow import SEVERAL
from pipeflow.core.errors import UsageError, require_type, unknown
from pipeflow.core.placement import Placement, require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.families import FAMILIES, keywords, sizes_on
from pipeflow.schedules.gpipe import naive
from pipeflow.schedules.one_f_one_b import seq1f1b
from pipeflow.schedules.orders.additions import with_memory_kinds
from pipeflow.schedules.zb_auto import zb_auto

SCHEDULES: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {**FAMILIES, "zb-auto": zb_auto, "naive": naive, "seq1f1b": seq1f1b}
)
"""The functions that make schedules, by the schedules' names."""

COMPARED = tuple(name for name in SCHEDULES if name not in ("naive", "seq1f1b"))
"""The schedules that are compared, planned and searched from unless others are named: "naive" only shows what they
improve on, and "seq1f1b" without slices is "1f1b".
"""


_OTHERS = {  # in lower case, without "-" and "_"
    "'1f1b'": "schedule1f1b onefoneb oneforwardonebackward oneforwardonebackwardschedule "
    "oneforwardonebackwardpipelineengine pipedream pipedreamflush trainschedule dapple "
    "forwardbackwardpipeliningwithoutinterleaving",
    "'gpipe'": "schedulegpipe afab fillanddrain fthenb allforwardallbackward allforwardallbackwardpipelineengine",
    "'interleaved-1f1b'": "interleaved interleaved1f1b 1f1binterleaved interleavedschedule interleavedpipelineschedule "
    "scheduleinterleaved1f1b virtual vpp circular depthfirst forwardbackwardpipeliningwithinterleaving "
    "numlayerspervirtualpipelinestage numvirtualstagesperpipelinerank virtualpipelinemodelparallelsize "
    "microbatchgroupsizepervirtualpipelinestage",
    "'interleaved-zb'": "scheduleinterleavedzerobubble interleavedzerobubble interleavedzb1p",
    "'looped-bfs'": "scheduleloopedbfs loopedbfs breadthfirst bfs",
    "'zb-h1' or 'zb-v'": "zerobubble zb zb1p zbh enablezerobubble zerobubbleschedule",
    "'zb-h2'": "zb2p",
    "'zb-v'": "schedulezbvzerobubble zbvzerobubble zbv zbvpp zerobubblev zerobubblevschedule zerobubblevpipescheduler",
    "'v-half' or 'v-min'": "zerobubblevschedulememsetup vschedule",
    "'dualpipe-v' or 'dualpipe'": "scheduledualpipev dualpipev",
    "'dualpipe' or 'chimera'": "bidirectional",
}
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {name: ours for ours, names in _OTHERS.items() for name in names.split()}
)
"""What is meant by names of torch's classes, by names and options of other programs, and by those of papers, for
`pipeflow.core.errors.unknown`.
"""


def options_of(name: str) -> tuple[str, ...]:
    """The names of the options of the schedule `name`, besides ranks and microbatches. Raises KeyError for an unknown
    name.
    """
    return keywords(SCHEDULES[name])


def is_searched(name: str) -> bool:
    """Whether a search makes the schedule `name` for given costs, so that no order of its own has the name."""
    return name in SCHEDULES and "cost" in options_of(name)


def make_schedule(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    recompute: object = False,
    unshard: object = False,
    offload: object = False,
    **options: object,
) -> Schedule:
    """Makes a schedule by its name.

    Args:
        name: a name in `SCHEDULES`, in upper or lower case.
        ranks: number of pipeline ranks. Schedules in two directions need an even number.
        microbatches: number of microbatches per step; any number is allowed.
        recompute: True, or a list of stages, to recompute what their forwards save, as `with_recompute` does.
        unshard: True, or a list of stages under fully_shard, to gather their weights ahead, as `with_unshard` does.
        offload: True, or a list of stages, to offload what their forwards save, as `with_offload` does. It needs
            `cost=`, a CostModel with the time of a copy.
        **options: options of the schedule, such as `chunks=2` for "interleaved-1f1b"; see `options_of`.

    Raises UsageError for an unknown name (the message suggests the nearest one), an unknown option, numbers below 1,
    and whatever else the schedule cannot do.

    >>> print(make_schedule("1f1b", ranks=2, microbatches=3))
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    require_type("name", name, str)
    name = name if name in SCHEDULES else name.lower()
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES, OTHER_NAMES)
    require_positive(ranks=ranks, microbatches=microbatches)
    known = options_of(name)
    cost = options.get("cost") if "cost" in known or offload is False else options.pop("cost", None)
    if others := sorted(set(options) - set(known)):
        takes = f"its options are {', '.join(known)}" if known else "it has no options"
        raise UsageError(f"schedule {name!r} does not take {', '.join(others)}; {takes}")
    made = SCHEDULES[name](ranks, microbatches, **options)
    return with_memory_kinds(made, recompute=recompute, unshard=unshard, offload=offload, cost=cost)


MEANINGS = {  # an option without an entry is described by its schedules alone
    "bytes_cap": "most bytes of saved and deferred values kept on a rank",
    "chunks": "stages per rank",
    "extra_warmup": "additional forwards in the warm-up",
    "group": "microbatches that go through a chunk together",
    "kinds": "what may save memory under a cap: copies to the host, recomputation, or both (default: none)",
    "memory_cap": "most activations kept on a rank, in microbatches",
    "objective": "what the search makes small (default: makespan)",
    "slices": "into how many slices each microbatch is cut, for causal models",
    "waves": "how often the stages go down the ranks and back up",
}


class Option(NamedTuple):
    """An option of schedules.

    Attributes:
        name: its name.
        takers: the schedules that have it.
        meaning: what it sets; empty if that is not described.
        choices: the words it takes; empty if it takes numbers.
        per_rank: whether it also takes one number per rank.
    """

    name: str
    takers: tuple[str, ...]
    meaning: str
    choices: tuple[str, ...]
    per_rank: bool

    @classmethod
    def named(cls, name: str) -> Option:
        """The option with this name, as the first schedule that has it declares it."""
        takers = tuple(each for each in SCHEDULES if name in options_of(each))
        hint = get_type_hints(SCHEDULES[takers[0]])[name]
        choices = tuple(get_args(hint)) if get_origin(hint) is Literal else ()
        per_rank = any(get_origin(part) is Sequence for part in get_args(hint))
        return cls(name, takers, MEANINGS.get(name, ""), choices, per_rank)


def family_options() -> list[str]:
    """The names of all schedules' options, without costs, which have options of their own."""
    return sorted({option for name in SCHEDULES for option in options_of(name)} - {"cost"})


LARGEST = 4096  # stages times microbatches, so that comparing takes no second
KINDS = list(Kind)

Rows = tuple[tuple[tuple[int, ...], ...], ...]
Options = dict[str, int]


def recognised(schedule: Schedule) -> tuple[str, ...]:
    """The named schedules, with the options that they need, that have the rows of `schedule`: such as "1f1b" and
    "interleaved-1f1b with chunks=1". Ranks and microbatches may be numbered in another order; reductions do not count.
    Each name stands there at most once, without options if it needs none. Empty also for schedules that are very large.
    """
    turns = schedule.placement.in_turn
    schedule = schedule.with_ranks([turns.index(rank) for rank in range(len(turns))])
    rows = _alike(schedule)
    large = schedule.placement.num_stages * schedule.num_microbatches * schedule.slices > LARGEST
    known = _known(schedule.placement, schedule.num_microbatches, schedule.slices)
    return () if rows is None or large else known.get(rows, ())


def _alike(schedule: Schedule) -> Rows | None:
    """The rows as numbers, which are equal for schedules that differ only in the numbers of microbatches. Microbatches
    are renumbered in the order in which they begin, separately for each path. None if one does not begin exactly once.
    """
    paths, stages, many = schedule.placement.paths, schedule.placement.num_stages, schedule.num_microbatches
    slices = schedule.slices
    numbers: dict[int, int] = {}
    begun = [0] * len(paths)
    firsts = {path[0] for path in paths}
    for rank in firsts:
        for action in schedule.actions(rank):
            path = action.microbatch % len(paths)
            if action.kind is Kind.F and action.stage == 0 and not action.slice and paths[path][0] == rank:
                numbers[action.microbatch] = path + begun[path] * len(paths)
                begun[path] += 1
    if sum(begun) != many or len(numbers) != many:
        return None
    first = {kind: index * stages * many * slices for index, kind in enumerate(KINDS)}
    return tuple(
        tuple(
            tuple(
                first[each.kind] + (each.stage * many + numbers.get(each.microbatch, -1)) * slices + (each.slice or 0)
                for each in actions_of(entry)
            )
            for entry in row
            if actions_of(entry)[0].kind not in SEVERAL
        )
        for row in schedule.rows
    )


@lru_cache(16)
def _known(placement: Placement, microbatches: int, slices: int) -> dict[Rows, tuple[str, ...]]:
    """The names of all rows that the registry has for a placement."""
    found: dict[Rows, tuple[str, ...]] = {}
    for name in SCHEDULES:
        mine: set[Rows] = set()
        for options in () if is_searched(name) else _variants(name, placement, microbatches, slices):
            rows = _rows(name, placement, microbatches, options)
            if rows is not None and rows not in mine:
                mine.add(rows)
                said = ", ".join(f"{option}={value}" for option, value in options.items())
                found[rows] = (*found.get(rows, ()), f"{name} with {said}" if said else name)
    return found


def _rows(name: str, placement: Placement, microbatches: int, options: Options) -> Rows | None:
    """The rows of a schedule; None if it does not exist or has another placement."""
    try:
        if make_schedule(name, ranks=placement.num_ranks, microbatches=1, **options).placement != placement:
            return None
        return _alike(make_schedule(name, ranks=placement.num_ranks, microbatches=microbatches, **options))
    except UsageError:
        return None


def _variants(name: str, placement: Placement, microbatches: int, slices: int) -> Iterator[Options]:
    """Options that a schedule on `placement` may have, those that it needs not first."""
    known, ranks = options_of(name), placement.num_ranks
    if (slices > 1 and "slices" not in known) or (slices == 1 and name == "seq1f1b"):
        return
    cut = {"slices": slices} if slices > 1 else {}
    sizes = [size | cut for size in sizes_on(SCHEDULES[name], placement)]
    yield from sizes
    more: list[Options] = []
    if "extra_warmup" in known:
        more += ({"extra_warmup": extra} for extra in range(1, min(microbatches, 2 * ranks)))
    if "group" in known:
        groups = (group for group in range(1, microbatches + 1) if microbatches % group == 0 or group % ranks == 0)
        more += ({"group": group} for group in groups)
    yield from ({**size, **each} for each in more for size in sizes)
