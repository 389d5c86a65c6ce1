"""The registry: the names of the families of schedules, and the function that makes a schedule by name. Must not
contain: the orders themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError, require_type, unknown
from pipeflow.core.placement import require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.families import FAMILIES, keywords
from pipeflow.schedules.memory import with_memory_kinds
from pipeflow.schedules.naive import naive
from pipeflow.schedules.zb_auto import zb_auto

SCHEDULES: Mapping[str, Callable[..., Schedule]] = MappingProxyType({**FAMILIES, "zb-auto": zb_auto, "naive": naive})
"""The functions that make schedules, by the schedules' names."""

COMPARED = tuple(name for name in SCHEDULES if name != "naive")
"""The schedules that are compared, planned and searched from unless others are named: "naive" only shows what they
improve on.
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
    return with_memory_kinds(made, recompute=recompute, unshard=unshard, offload=offload, cost=_model(cost))


def _model(cost: object) -> CostModel | None:
    if cost is None or isinstance(cost, CostModel):
        return cost
    raise UsageError(f"cost must be a CostModel, got {cost!r}")
