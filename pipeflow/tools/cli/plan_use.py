"""How a plan is used, in lines to type: what starts it, what a script has, the memory to expect, and what to measure
first, which corrects the plan. Must not contain: what a plan costs.
"""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.core.text import bytes_text
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.libraries import LIBRARIES, LibraryOptions
from pipeflow.planning.libraries.own import WIDTH, script
from pipeflow.planning.step_plan import Plan
from pipeflow.tools.cli.outputs import wrapped

MEETING = "--rdzv-backend c10d --rdzv-endpoint machine-1:29500"
APART = "--master-addr machine-0 --master-port 29500"  # where the order of nodes is given
CLUSTER_FILE = "cluster.json"  # which `pipeflow calibrate` writes
DESCRIBING = (
    "--device",
    "--network-bandwidth",
    "--link-bandwidth",
    "--devices-per-node",
    "--devices-per-nic",
    "--flops",
)
TYPED = "  "  # before what is typed


class Planned(NamedTuple):
    """A plan that may be used, with the options of its schedule, and its place in the list of a search."""

    plan: Plan
    options: Mapping[str, Any]
    place: int = 1


def use_lines(found: Sequence[Planned], words: Sequence[str]) -> Iterator[str]:
    """How the first plan that pipeflow can run is used, or why it can run none of them. `words` are those of the
    command that made the plans.
    """
    refused: list[str] = []
    for each, options, place in found:
        try:
            written = script(each, options)
        except UsageError as error:
            refused.append(str(error))
            continue
        yield from wrapped(f"Use it{f' (layout {place}: {refused[0]})' if refused else ''}")
        yield from _launch(each)
        yield "in train.py:"
        yield from (f"{TYPED}{line}" for line in written.text.splitlines())
        yield from (line for note in written.notes for line in wrapped(f"note: {note}"))
        yield from wrapped(expected(each))
        yield from _machine(each, words)
        yield "record a step with execute_pipeline(..., trace=True) as run.json; then"
        yield from _typed("pipeflow plan --measured run.json")
        return
    yield from wrapped(f"Use it: {refused[0]}; --for prints what other libraries take")
    yield from wrapped(expected(found[0].plan))
    yield from _machine(found[0].plan, words)


def started(devices: int, cluster: Cluster | None, script: str) -> str:
    """The command that starts a process for each device; on several nodes, it is run on each of them."""
    each = devices if cluster is None else min(devices, cluster.devices_per_node)
    nodes = -(-devices // each)
    if nodes == 1:
        return f"torchrun --nproc-per-node {each} {script}"
    return f"torchrun --nnodes {nodes} --nproc-per-node {each} {MEETING} {script}"


def _launch(found: Plan) -> Iterator[str]:
    """What starts the script of a plan, on each node of its kind."""
    cluster, mapped = found.cluster, found.device_map
    if cluster is None or mapped is None or not cluster.further:
        yield from _typed(started(found.devices, cluster, "train.py"))
        if cluster is not None and (rest := found.devices % cluster.devices_per_node) < found.devices and rest:
            yield f"on the last node with --nproc-per-node {rest}"
        return
    taken, times = cluster.taken(found.devices), 1 if mapped.is_mixed else found.setup.data
    sizes = [kind.devices_per_node for kind, _ in taken]
    counts = [-(-many // (size * times)) for (_, many), size in zip(taken, sizes, strict=True)]
    each = [
        f"{count} of {kind.device.name} with --nproc-per-node {size}"
        for (kind, _), count, size in zip(taken, counts, sizes, strict=True)
    ]
    yield from wrapped(f"nodes R = 0, 1, ... in this order{f', {times} times' if times > 1 else ''}: {', '.join(each)}")
    command = f"torchrun --nnodes {times * sum(counts)} --node-rank R --nproc-per-node N {APART} train.py"
    yield from _typed(command)
    if rest := taken[-1][1] % sizes[-1]:
        yield f"on the last node with --nproc-per-node {rest}"


def expected(found: Plan) -> str:
    """The memory to expect on the fullest device."""
    beside = f", {bytes_text(found.peak_bytes + found.outside_bytes)} with all else" if found.outside_bytes else ""
    return f"expect at most {bytes_text(found.peak_bytes)} of tensors on a device{beside}"


def _machine(found: Plan, words: Sequence[str]) -> Iterator[str]:
    """How the machine is measured, and the command that then plans with it; nothing where it was measured already."""
    if found.cluster is not None and found.cluster.further:
        yield from wrapped(
            "measure a node or two of each kind first (pipeflow calibrate --output KIND.json), then plan with "
            "--cluster KIND.json:NODES,KIND.json:NODES instead of --device"
        )
    elif not any(word.partition("=")[0] == "--cluster" for word in words):
        most = found.devices if found.cluster is None else min(found.devices, 2 * found.cluster.devices_per_node)
        yield "measure the machine first, then plan with its own rates:"
        yield from _typed(started(most, found.cluster, "-m pipeflow calibrate"))
        yield from _typed(f"pipeflow plan {shlex.join(measured_words(words))}")


def measured_words(words: Sequence[str]) -> list[str]:
    """The words of a command for the machine as it was measured, without what described it."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, given, _ = word.partition("=")
        if name not in DESCRIBING:
            kept.append(word)
        elif not given:
            next(rest, None)
    return [*kept, "--cluster", CLUSTER_FILE]


def _typed(command: str) -> Iterator[str]:
    """A command as a shell reads it, in lines that end in a backslash."""
    first, *more = textwrap.wrap(command, WIDTH - 6, break_long_words=False, break_on_hyphens=False)
    lines = [f"{TYPED}{first}", *(f"{TYPED}    {line}" for line in more)]
    yield from (f"{line} \\" for line in lines[:-1])
    yield lines[-1]


def print_options(name: str, found: Sequence[Planned]) -> None:
    """Prints the options of a library for the first of these plans that it can run, and on the error stream what they
    do not say, and how the plan is used. Raises UsageError if it can run none.
    """
    (chosen, options), notes = _first_options(name, found)
    library = LIBRARIES[name]
    seen = f"to see where a first step differs, add {library.recording}, and run pipeflow explain traces"
    about = f"options of {library.name} {library.version}; {expected(chosen)}; {seen}"
    for note in (*notes, *options.notes, about):
        print(f"pipeflow: note: {note}", file=sys.stderr)
    print(options.text)


def _first_options(name: str, found: Sequence[Planned]) -> tuple[tuple[Plan, LibraryOptions], list[str]]:
    """The first plan that has any options, these options, and why the plans before it have none."""
    library, refused = LIBRARIES[name], list[str]()
    for each, _, place in found:
        try:
            return (each, library.options(each)), refused
        except UsageError as error:
            if len(found) == 1:
                raise
            refused.append(f"layout {place} is left out: {error}")
    raise UsageError(f"{library.name} can run none of the {len(found)} best layouts; {refused[0]}")
