"""`pipeflow calibrate`: measures this machine, or the world that torchrun has started, into a cluster file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeflow.core.errors import UsageError
from pipeflow.core.text import number, percent, printable, seconds_text
from pipeflow.draw import Table
from pipeflow.tools.cli.options import Commands
from pipeflow.tools.cli.outputs import doing, show, wrapped

if TYPE_CHECKING:
    from pipeflow.planning.cluster import Cluster
    from pipeflow.tools.calibration.machine_times import Measured

SECONDS = 60.0
FEWEST, MOST = 1.0, 3600.0  # seconds
EXAMPLES = """\
examples:
  pipeflow calibrate
  OMP_NUM_THREADS=2 pipeflow calibrate --device cpu --ranks 2 --output two.json
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint machine-1:29500 -m pipeflow calibrate
"""


def add_calibrate(commands: Commands) -> None:
    """Adds the command and its options."""
    command = commands.add_parser(
        "calibrate",
        help="measure this machine into a cluster file, for plans",
        epilog=EXAMPLES,
    )
    add = command.add_argument
    add("--output", metavar="FILE", default="cluster.json", help="file to write (default: %(default)s)")
    add("--ranks", type=int, metavar="N", help="number of processes to start (default: one per GPU, or 4 on a CPU)")
    add("--device", metavar="TYPE", help="cpu or cuda (default: cuda if there is a GPU)")
    add("--seconds", type=float, default=SECONDS, metavar="S", help="time to measure for (default: %(default)g)")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints a table, and writes the file."""
    if not FEWEST <= arguments.seconds <= MOST:
        raise UsageError(f"--seconds must be from {FEWEST:g} to {MOST:g}, got {arguments.seconds:g}")
    _require_writable(arguments.output)
    rank, measured = _measured(arguments)
    if rank == 0:
        from pipeflow.tools.calibration.fit import fitted

        cluster = fitted(measured)
        cluster.save(arguments.output)
        show(*_lines(measured, cluster), "", f"wrote {printable(arguments.output)}")
    return 0


def _measured(arguments: argparse.Namespace) -> tuple[int, Measured]:
    """This process's rank, and what was measured."""
    what = f"measuring for about {arguments.seconds:g} s"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if arguments.ranks is not None:
            raise UsageError("--ranks is for processes that pipeflow starts: leave it out under torchrun")
        from pipeflow.tools.calibration.measurement import measured_in_world

        if os.environ["RANK"] != "0":
            return measured_in_world(arguments.device, arguments.seconds)
        with doing(what, seconds=arguments.seconds):
            return measured_in_world(arguments.device, arguments.seconds)
    with doing(what, seconds=arguments.seconds):
        from pipeflow.tools.calibration.measurement import measured_here

        return 0, measured_here(arguments.ranks, arguments.device, arguments.seconds)


def _require_writable(path: str) -> None:
    """Raises UsageError, before anything is measured, for a path at which no file can be written."""
    real = os.path.realpath(path)
    folder = os.path.dirname(real)
    if os.path.isdir(real):
        raise UsageError(f"{path}: Is a directory")
    if not os.path.isdir(folder):
        raise UsageError(f"{path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{path}: Permission denied")


def _lines(measured: Measured, cluster: Cluster) -> Iterator[str | Table]:
    device, known = cluster.device, cluster.efficiency
    products = f"{_rate(device.flops[measured.precision], 'FLOP/s')} in products of {measured.precision}"
    reached = f"of which plans expect {percent(known['products'])}"
    yield from wrapped(f"A device of this machine reaches at most {products}, {reached}.")
    yield ""
    yield f"{device.name}; {cluster.devices_per_node} in each node"
    yield ""
    yield _table(measured, cluster)
    yield ""
    launches = known["forward_launch"], known["backward_launch"]
    yield f"launching a layer: {seconds_text(launches[0])} forward, {seconds_text(launches[1])} backward"
    yield f"products take twice as long at depth {number(known['depth'])} and at {number(known['rows'])} rows"
    if measured.transfers:
        start = cluster.link_latency + known["transfer_start"]
        begin = cluster.link_latency + known["collective"]
        yield f"a transfer starts in {seconds_text(start)}, a sum in {seconds_text(begin)}"
    if "network" not in known:
        one = f"one {'node' if measured.transfers else 'device'}"
        yield f"not measured, since there is {one}: the network, taken as {_rate(cluster.network_bandwidth, 'B/s')}"


def _table(measured: Measured, cluster: Cluster) -> Table:
    """A line per kind: the best rate, the share of it that the fit expects, and how well the fit gives back what was
    measured.
    """
    from pipeflow.tools.calibration.fit import mean_errors

    device, known = cluster.device, cluster.efficiency
    best = {
        **{f"products in {name}": _rate(rate, "FLOP/s") for name, rate in device.flops.items()},
        "elementwise": _rate(device.memory_bandwidth, "B/s"),
        **dict.fromkeys(("sums", "transfers"), _rate(cluster.link_bandwidth, "B/s")),
        **dict.fromkeys(("sums between nodes", "transfers between nodes"), _rate(cluster.network_bandwidth, "B/s")),
    }
    share = {
        f"products in {measured.precision}": "products",
        "elementwise": "memory",
        "attention": "attention",
        "sums": "link",
        "transfers": "transfer",
        "sums between nodes": "network",
        "gradient sums": "gradients",
        "gradient sums between nodes": "reduction",
        "optimizer": "optimizer",
    }
    rows = [
        [kind, best.get(kind, ""), percent(known[share[kind]]) if kind in share else "", str(times), percent(error)]
        for kind, (error, times) in mean_errors(measured, cluster).items()
    ]
    return Table(["", "best", "reached", "times", "mean\nerror"], rows)


def _rate(value: float, unit: str) -> str:
    """A rate with a decimal unit, such as 1.5 GB/s."""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
