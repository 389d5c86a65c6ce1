"""Fields: everything that a link to the explorer can set, with the values that it takes, and the names that its field
`schedule` lists. The page makes its controls from this table, and `State` reads a link with it. Must not contain: what
an option means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from pipeflow.core.action import Kind as ActionKind
from pipeflow.core.cost import FIELDS as COSTS
from pipeflow.core.cost import CostField
from pipeflow.core.dataflow import DATAFLOW
from pipeflow.core.placement import Placement
from pipeflow.draw.page.timeline_data import MODES
from pipeflow.planning.catalog import MODELS
from pipeflow.planning.device import DEVICES
from pipeflow.planning.setup import CHOICES, Setup, meanings
from pipeflow.schedules import SCHEDULES
from pipeflow.schedules.orders.additions import STAGE_OPTIONS
from pipeflow.schedules.registry import Option, family_options

FILE = "file"


def split(text: str) -> tuple[str, dict[str, str] | None]:
    """A name without its own options, and these as texts. None: it has none of its own, and takes those of the link.
    Names have commas between, so values have underscores instead.

    >>> split("interleaved-1f1b:chunks=4")
    ('interleaved-1f1b', {'chunks': '4'})
    >>> split("interleaved-1f1b:"), split("interleaved-1f1b")
    (('interleaved-1f1b', {}), ('interleaved-1f1b', None))
    """
    name, colon, rest = text.partition(":")
    options = (each.partition("=") for each in rest.split(":") if each)
    return name, {option: value.replace("_", ",") for option, _, value in options} if colon else None


def joined(name: str, options: Mapping[str, str]) -> str:
    """The name with its own options, which `split` reads."""
    return f"{name}:" + ":".join(f"{option}={value.replace(',', '_')}" for option, value in options.items())


def file_of(text: str) -> str | None:
    """The name of the file; None for anything else.

    >>> file_of("file:run.json")
    'run.json'
    """
    kind, _, name = text.partition(":")
    return name if kind == FILE and is_file(name) else None


def is_file(name: str) -> bool:
    """Whether a file may have this name."""
    return re.fullmatch(r"[\w.-]{1,60}", name, re.ASCII) is not None


def title(text: str) -> str:
    """A name for people: its own options stand after it."""
    name, _, options = text.partition(":")
    return options if name == FILE else " ".join([name, *filter(None, options.split(":"))])


CUSTOM = "custom"  # the name of the schedule that the reader builds
Kind = Literal["names", "whole", "number", "numbers", "stages", "choice", "flag", "text"]


class Field(NamedTuple):
    """One thing that a link can set.

    Attributes:
        name: its name in the link.
        kind: the values that it takes: names of schedules, a whole number, a number, numbers with commas between, the
            stages that `stages_in` reads, one of `choices`, a flag that is "1" when set, or other text.
        group: what it is a part of: the schedule, its model or its costs; empty: it has no control.
        fold: the part of the form that hides its control until it is opened; empty: none.
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
    fold: str = ""


MORE, PRICES, MEMORY = "Options", "Costs", "Memory"
RANGES = {  # of the sliders of options: least, most, step
    "chunks": (1, 8, 1),
    "extra_warmup": (0, 16, 1),
    "group": (1, 32, 1),
    "memory_cap": (0.5, 16, 0.5),
    "waves": (1, 4, 1),
}
MOST = {
    "latency": 2,
    "overlap": 1,
    "exchange": 1,
    "reduce": 8,
}  # of the sliders of costs that are no bytes; of the others 4
COST_LABELS = {
    "forward": "forward (F)",
    "backward_input": "input half (I)",
    "backward_weight": "weight half (W)",
    "overlap": "pair overlap",
    "exchange": "expert exchange",
    "reduce": "reduction",
    "optimizer": "optimizer (S)",
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
    fold = MEMORY if name.endswith("_cap") else MORE
    field = Field(name, "choice", "Schedule", LABELS.get(name, name), option.meaning, takers=option.takers, fold=fold)
    if option.choices:
        return field._replace(absent="default", choices=option.choices)
    least, most, step = RANGES.get(name, (0, 0, 1))
    field = field._replace(kind="numbers" if option.per_rank else "number", least=least, most=most, step=step)
    if name == "memory_cap":  # every schedule is drawn with its cap
        field = field._replace(takers=())
    return field._replace(absent="none" if name.endswith("_cap") else "auto")


def _schedule_size(name: str, help_: str, default: str, most: float) -> Field:
    """A size of named schedules; files and the reader's own schedule have theirs."""
    return Field(name, "whole", "Schedule", name, help_, default, 1, most, takers=tuple(SCHEDULES))


_NAMED = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)
_BESIDE = {
    "recompute": "recompute_stages",
    "input_bytes": "recompute_stages",
    "unshard": "unshard_stages",
    "whole_weights_bytes": "unshard_stages",
    "offload": "offload_stages",
}
"""The costs of kinds that a schedule has on given stages, and the field of these."""


def _takers(cost: CostField) -> tuple[str, ...]:
    """Named schedules have forwards, backwards, and what costs add to them. Others come from tables or `_BESIDE`."""
    named = {kind: flow for kind, flow in DATAFLOW.items() if kind in _NAMED or flow.joint}
    is_theirs = cost.of is None or cost.of in named or any((cost.of, 0) in flow.makes for flow in named.values())
    return () if is_theirs else (CUSTOM, FILE)


def _cost(name: str, cost: CostField) -> Field:
    most, step = (MOST.get(name, 4), 0.05) if cost.unit != "bytes" else (64, 1)
    help_ = f"{cost.meaning}, in units of time" if cost.unit == "time" else cost.meaning
    help_ += f"; 0: {cost.absent}" if cost.absent else ""
    label = COST_LABELS.get(name, name.replace("_", " "))
    fold = MEMORY if name.startswith(("saved", "deferred")) or name in _BESIDE else PRICES
    field = Field(name, "number", "Costs", label, help_, str(cost.default), 0, most, step, model=False, fold=fold)
    if name == "bandwidth":  # 0 bytes per unit of time are no bandwidth
        return field._replace(help=f"{help_}; empty: no limit", default="", least=1, absent="no limit")
    return field._replace(takers=_takers(cost), beside=_BESIDE.get(name, ""))


def _size(name: str, label: str, help_: str, default: str, most: float) -> Field:
    return Field(name, "whole", "Model", label, help_, default, 1, most, model=True, fold=PRICES)


def _choice(name: str, label: str, help_: str, default: str, choices: Iterable[str]) -> Field:
    return Field(name, "choice", "Model", label, help_, default, choices=tuple(choices), model=True, fold=PRICES)


def _setup(name: str, label: str, most: float) -> Field:
    """A field of `Setup`, whose docstring says what it is."""
    help_, default = meanings(Setup)[name].replace("`", "").rstrip("."), getattr(Setup(), name)
    if default is False:
        return Field(name, "flag", "Model", label, help_, model=True, fold=PRICES)
    if name in CHOICES:
        return _choice(name, label, help_, str(getattr(default, "name", default)), map(str, CHOICES[name]))
    return _size(name, label, help_, str(default), most)


def _bandwidth(name: str, label: str, help_: str) -> Field:
    return Field(name, "number", "Model", label, help_, absent="auto", model=True, fold=PRICES)


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
        fold=PRICES,
    ),
    _choice("device", "device", "what one rank computes on", "a100-80gb", DEVICES),
    *(
        _setup(name, label, most)
        for name, label, most in (
            ("tensor", "tensor ranks", 8),
            ("data", "replicas", 64),
            ("microbatch_size", "microbatch size", 16),
            ("precision", "precision", 0),
            ("checkpoint", "recompute", 0),
            ("zero", "ZeRO", 0),
            ("sequence_parallel", "sequence parallel", 0),
        )
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
    *(  # the reader's own schedule has what its rows have
        Field(name, "stages", "Schedule", LABELS[name], meaning, absent="none", takers=(*SCHEDULES, FILE), fold=MEMORY)
        for name, meaning in STAGE_OPTIONS.items()
    ),
    *MODEL,
    *(_cost(name, cost) for name, cost in COSTS.items()),
    Field(
        "factors",
        "numbers",
        "Costs",
        "depth factors",
        "relative time of equal parts of the model, from the first layers to the last, such as 1,1,1,1.5",
        absent="none",
        fold=PRICES,
    ),
    Field("wipe", "whole", shown=True),  # the part in percent that shows the worse of two timelines on each other
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
