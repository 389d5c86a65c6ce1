"""What a script of pipeflow has for a plan: the ranks, the schedule, the stages and the optimizer. Must not contain:
how it is started, and what a plan costs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.core.text import listed
from pipeflow.planning.libraries.library import SINGLE, LibraryOptions
from pipeflow.planning.setup import FEW_BITS
from pipeflow.planning.step_plan import Plan
from pipeflow.schedules import SCHEDULES
from pipeflow.schedules.registry import is_searched

WIDTH = 76  # letters of a line
LAYERS = "layers"  # what a script may call its layers


def script(found: Plan, options: Mapping[str, Any]) -> LibraryOptions:
    """The lines of a script, and what they do not say. `options` are those of the schedule, if it has a name in
    SCHEDULES; any other name is that of a file. Raises UsageError for what pipeflow cannot run.
    """
    if given := [name for name in SINGLE if getattr(found.setup, name) > 1]:
        none, change = listed([f"no {name} ranks" for name in given]), " ".join(f"--{name} 1" for name in given)
        raise UsageError(f"pipeflow has {none}: {change} plans without them")
    if any(start == end for start, end in found.cut):
        raise UsageError("from_module needs a layer in each stage: the nearest is another --cut")
    return LibraryOptions("\n".join(_lines(found, options)), tuple(_notes(found)))


def _lines(found: Plan, options: Mapping[str, Any]) -> Iterator[str]:
    setup, precision = found.setup, found.setup.precision
    tensor = [f"tensor={setup.tensor}"] * (setup.tensor > 1)
    yield _call("context = pipeflow.launch", [f"pipeline={len(found.ranks)}", *tensor])
    yield _schedule(found, options)
    if setup.data > 1:
        yield "schedule = schedule.with_reductions()"
    if precision.weight == 2:
        yield f"module = module.to(torch.{'float16' if precision.products == 'fp16' else 'bfloat16'})"
    given = ["module", "schedule", "example=batch"]
    if len({end - start for start, end in found.cut}) > 1:
        ends = ", ".join(str(end - 1) for _, end in found.cut[:-1])
        yield textwrap.fill(f'cuts = [f"{LAYERS}.{{n}}" for n in [{ends}]]', WIDTH, subsequent_indent="    ")
        given.append("cuts=cuts")
    if precision.gradient > precision.weight:
        given.append("gradient_dtype=torch.float32")
    yield _call("model = pipeflow.Pipeline.from_module", given)
    yield "optimizer = torch.optim.AdamW(model.parameters())"
    if setup.zero == 1 and setup.data > 1:
        yield "optimizer = pipeflow.Zero(model, optimizer)"
    if precision.master:
        scaler = ", scaler=pipeflow.LossScaler()" if precision.products == "fp16" else ""
        yield f"optimizer = pipeflow.MasterWeights(model, optimizer{scaler})"


def _call(name: str, given: list[str]) -> str:
    """A call, in several lines if one is too long."""
    line = f"{name}({', '.join(given)})"
    if len(line) <= WIDTH:
        return line
    inside = textwrap.fill(", ".join(given), WIDTH - 4, initial_indent="    ", subsequent_indent="    ")
    return f"{name}(\n{inside}\n)"


def _schedule(found: Plan, options: Mapping[str, Any]) -> str:
    name = found.schedule.name
    if name not in SCHEDULES:
        return f"schedule = pipeflow.Schedule.from_csv(open({_literal(name)}).read())"
    sizes = {"ranks": len(found.ranks), "microbatches": found.schedule.num_microbatches}
    given = [f"{option}={_literal(value)}" for option, value in (sizes | _writable(options)).items()]
    return _call("schedule = pipeflow.make_schedule", [f'"{name}"', *given])


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _writable(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without what an order was searched for, which a script measures itself."""
    return {name: value for name, value in options.items() if name not in {"cost", "bytes_cap", "candidates"}}


def _notes(found: Plan) -> Iterator[str]:
    setup = found.setup
    if setup.precision.products in FEW_BITS:
        yield f"products in {setup.precision.name} come from the layers of your module"
    if setup.lora_rank:
        yield "adapters come from your module, such as with peft"
    if setup.tensor > 1 and setup.sequence_parallel:
        yield (
            "from_module splits layers over tensor ranks, but no sequences, and hides none of their sums: "
            "--no-sequence-parallel plans that"
        )
    if setup.zero > 1:
        yield f"for ZeRO-{setup.zero}, apply torch's fully_shard to the stages"
    elif setup.zero and setup.shards < setup.replicas:
        yield "pipeflow.Zero divides over all replicas: plan without --shard-ranks"
    if setup.checkpoint != "none" or setup.recompute_modules:
        yield "recomputation comes from your module, such as with torch.utils.checkpoint"
    if is_searched(found.schedule.name):
        yield f"{found.schedule.name} is searched for under costs: give it cost=, and bytes_cap= for memory"
    if len({end - start for start, end in found.cut}) > 1:
        yield f"{LAYERS} is the list of layers in your module"
