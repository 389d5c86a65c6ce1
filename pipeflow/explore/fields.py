"""Fields: everything that a link to the explorer can set, with the values that it takes. The page makes its controls
from this table, and `State` reads a link with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from pipeflow.core.action import Kind as ActionKind
from pipeflow.core.cost import BYTES, TIMES
from pipeflow.core.dataflow import DATAFLOW
from pipeflow.core.even_costs import EVEN_COSTS, EvenCost
from pipeflow.core.placement import Placement
from pipeflow.draw.page.block_colours import MODES
from pipeflow.explore.names import FILE
from pipeflow.planning.catalog import MODELS
from pipeflow.planning.device import DEVICES
from pipeflow.planning.setup import CHECKPOINTS, PRECISIONS
from pipeflow.schedules import SCHEDULES
from pipeflow.schedules.memory import STAGE_OPTIONS
from pipeflow.schedules.options import Option, family_options

CUSTOM = "custom"  # the name of the schedule that the reader builds
Kind = Literal["names", "whole", "number", "numbers", "stages", "choice", "flag", "text"]


class Field(NamedTuple):
    """One thing that a link can set.

    Attributes:
        name: its name in the link.
        kind: the values that it takes: names of schedules, a whole number, a number, numbers with commas between, the
            stages that `stages_in` reads, one of `choices`, a flag that is "1" when set, or other text.
        group: the group of controls that it stands in; empty: it has no control.
        label, help: what the page calls it, and one sentence about it.
        default: its value where a link does not set it; empty: none.
        least, most, step: the range of its slider; `most` 0: no slider. A link may go beyond `most`.
        absent: what holds while it is empty, in a word.
        choices: the words that it takes.
        takers: the schedules that it applies to, `FILE` for files; empty: all.
        beside: a field that, if it is set, makes this one apply to all schedules.
        model: whether it describes the costs of a model (True) or costs by hand (False); None: neither. The page shows
            the controls that apply.
        shown: whether it says how the timelines are shown, so that it changes none of them.
    """

    name: str
    kind: Kind
    group: str = ""
    label: str = ""
    help: str = ""
    default: str = ""
    least: float = 0
    most: float = 0
    step: float = 1
    absent: str = ""
    choices: tuple[str, ...] = ()
    takers: tuple[str, ...] = ()
    beside: str = ""
    model: bool | None = None
    shown: bool = False


EVEN = {"latency" if cost == "transfer" else cost: cost for cost in EVEN_COSTS}
"""The fields that are costs of stages that are all equal, and the names of these costs."""

RANGES = {  # of the sliders of options: least, most, step
    "chunks": (1, 8, 1),
    "extra_warmup": (0, 16, 1),
    "group": (1, 32, 1),
    "memory_cap": (0.5, 16, 0.5),
    "waves": (1, 4, 1),
}
MOST = {"latency": 2, "overlap": 1, "reduce": 8}  # of the sliders of costs that are no bytes; of the others 4
COST_LABELS = {
    "forward": "forward (F)",
    "backward_input": "input half (I)",
    "backward_weight": "weight half (W)",
    "overlap": "pair overlap",
    "reduce": "reduction",
    "optimizer": "optimizer (S)",
}
SENT = {  # what is sent, in bytes; the command has only the latency
    "activation_bytes": EvenCost("bytes of a microbatch's activation between ranks", unit="bytes"),
    "bandwidth": EvenCost("bytes per unit of time between two ranks", unit="bytes"),
}
LABELS = {
    "extra_warmup": "extra warm-up",
    "memory_cap": "memory cap",
    "bytes_cap": "memory cap in bytes",
    "recompute_stages": "recomputed",
    "unshard_stages": "unsharded",
    "offload_stages": "offloaded",
}


def _option(name: str) -> Field:
    """The field of an option of schedules."""
    option = Option.named(name)
    label = LABELS.get(name, name)
    if option.choices:
        return Field(
            name,
            "choice",
            "Schedule",
            label,
            option.meaning,
            absent="default",
            choices=option.choices,
            takers=option.takers,
        )
    range_ = RANGES.get(name, (0, 0, 1))
    kind: Kind = "numbers" if option.per_rank else "number"
    takers = () if name == "memory_cap" else option.takers  # every schedule is drawn with its cap
    absent = "none" if name.endswith("_cap") else "auto"
    return Field(name, kind, "Schedule", label, option.meaning, "", *range_, absent, takers=takers)


def _schedule_size(name: str, help_: str, default: str, most: float) -> Field:
    """A size of named schedules; files and the reader's own schedule have theirs."""
    return Field(name, "whole", "Schedule", name, help_, default, 1, most, takers=tuple(SCHEDULES))


def _stages(name: str, meaning: str) -> Field:
    """A choice of stages; the reader's own schedule has what its rows have."""
    label = LABELS[name]
    return Field(name, "stages", "Schedule", label, meaning, absent="none", takers=(*SCHEDULES, FILE))


def _costs() -> Iterator[Field]:
    for name, cost in EVEN.items():
        yield _cost(name, EVEN_COSTS[cost])
        if name == "latency":
            yield from (_cost(name, cost) for name, cost in SENT.items())


_NAMED = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)
_BESIDE = {
    "recompute": "recompute_stages",
    "input_bytes": "recompute_stages",
    "unshard": "unshard_stages",
    "whole_weights_bytes": "unshard_stages",
    "offload": "offload_stages",
}
"""The costs of kinds that a schedule has on given stages, and the field of these."""


def _takers(name: str, cost: EvenCost) -> tuple[str, ...]:
    """Named schedules have forwards, backwards, and what costs add to them. Others come from tables or `_BESIDE`."""
    of = cost.of or TIMES.get(name) or BYTES.get(name)
    named = {kind: flow for kind, flow in DATAFLOW.items() if kind in _NAMED or flow.joint}
    is_theirs = of is None or of in named or any((of, 0) in flow.makes for flow in named.values())
    return () if is_theirs else (CUSTOM, FILE)


def _cost(name: str, cost: EvenCost) -> Field:
    most, step = (MOST.get(name, 4), 0.05) if cost.unit != "bytes" else (64, 1)
    help_ = f"{cost.meaning}, in units of time" if cost.unit == "time" else cost.meaning
    help_ += f"; 0: {cost.absent}" if cost.absent else ""
    label = COST_LABELS.get(name, name.replace("_", " "))
    if name == "bandwidth":  # 0 bytes per unit of time are no bandwidth
        return Field(
            name, "number", "Costs", label, f"{help_}; empty: no limit", "", 1, most, step, "no limit", model=False
        )
    takers = _takers(name, cost)
    default, beside = str(cost.default), _BESIDE.get(name, "")
    return Field(
        name, "number", "Costs", label, help_, default, 0, most, step, takers=takers, beside=beside, model=False
    )


def _size(name: str, label: str, help_: str, default: str, most: float) -> Field:
    return Field(name, "whole", "Model", label, help_, default, 1, most, model=True)


def _choice(name: str, label: str, help_: str, default: str, choices: Iterable[str]) -> Field:
    return Field(name, "choice", "Model", label, help_, default, choices=tuple(choices), model=True)


def _bandwidth(name: str, label: str, help_: str) -> Field:
    return Field(name, "number", "Model", label, help_, absent="auto", model=True)


SHOWN: tuple[Field, ...] = (
    Field("colour", "choice", default=MODES[0], choices=MODES, shown=True),
    Field("path", "flag", shown=True),  # whether the critical path is marked
    Field("follow", "whole", least=0, shown=True),  # a microbatch
    Field("find", "text", shown=True),
    Field("from", "number", shown=True),  # the selected range of time, in the unit that the page writes
    Field("to", "number", shown=True),
    Field("zoom", "numbers", shown=True),  # the times at the edges of the lanes, in that unit
)
"""How the timelines are shown."""

MODEL: tuple[Field, ...] = (
    Field(
        "model",
        "choice",
        "Model",
        "model",
        "a model whose layers are priced on a cluster, in seconds and bytes; none: costs by hand",
        absent="none",
        choices=tuple(MODELS),
    ),
    _choice("device", "device", "what one rank computes on", "a100-80gb", DEVICES),
    _size("tensor", "tensor ranks", "devices that share each layer of a stage", "1", 8),
    _size("data", "replicas", "copies of the pipeline, each with its own part of the batch", "1", 64),
    _size("microbatch_size", "microbatch size", "sequences per microbatch", "1", 16),
    _choice(
        "precision", "precision", "number format of weights, gradients, optimizer and products", "bf16", PRECISIONS
    ),
    _choice("checkpoint", "recompute", "what a layer's backward computes again", "none", CHECKPOINTS),
    _choice(
        "zero",
        "ZeRO",
        "what replicas share out: 1 the optimizer's state, 2 gradients too, 3 weights too, which stages gather",
        "0",
        ("0", "1", "2", "3"),
    ),
    Field(
        "sequence_parallel", "flag", "Model", "sequence parallel", "tensor ranks share what each had whole", model=True
    ),
    _size("devices_per_node", "devices per node", "devices that share the fast links of a node", "8", 16),
    _bandwidth(
        "link_bandwidth",
        "link bytes/s",
        "bytes per second of a device inside its node, one way; empty: the device's own",
    ),
    _bandwidth(
        "network_bandwidth", "network bytes/s", "bytes per second of a device between nodes, one way; empty: 25e9"
    ),
)

ALL: tuple[Field, ...] = (
    Field(
        "schedule", "names", "Schedule", "schedule", "the schedules that are drawn", "1f1b", choices=tuple(SCHEDULES)
    ),
    _schedule_size("ranks", "number of pipeline ranks", "4", 32),
    _schedule_size("microbatches", "number of microbatches per step", "8", 128),
    *map(_option, family_options()),
    *(_stages(name, meaning) for name, meaning in STAGE_OPTIONS.items()),
    *MODEL,
    *_costs(),
    Field(
        "factors",
        "numbers",
        "Costs",
        "depth factors",
        "relative time of equal parts of the model, from the first layers to the last, such as 1,1,1,1.5",
        absent="none",
    ),
    Field("differences", "choice", default="on", choices=("on", "off"), shown=True),
    Field("width", "whole", help="pixels of the plot of all schedules", default="720", least=280, shown=True),
    Field("files", "text", help="the texts of opened files, as a JSON object; in questions, not in links"),
    Field("rows", "text"),
    Field("placement", "text"),
    Field("tour", "whole", least=1, shown=True),
    Field("rows_file", "text", help="the name of the file that the rows come from"),
    Field("rows_microbatches", "whole", help="least number of microbatches of the rows", least=1),
    *SHOWN,
    Field("edit", "flag", shown=True),  # whether the reader builds a schedule
)
"""Every field."""

FIELDS = {field.name: field for field in ALL}


def option_text(value: object) -> str:
    """The value of an option of schedules, as a link and a command have it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "all" if value is True else str(value)


def placement_text(placement: Placement) -> str:
    """A placement as a link has it: the rank of each stage with dots between, and an underscore between paths."""
    return "_".join(".".join(map(str, path)) for path in placement.paths)
