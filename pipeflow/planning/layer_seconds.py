"""Layer times: the seconds of one layer's forward and backward on a device, with launches and communication. Must not
contain: stages, and what is once per step.
"""

from __future__ import annotations

from dataclasses import replace

from pipeflow.planning.adapters import adapter_work
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.exchanges import NOTHING, Exchanged, layer_exchanges
from pipeflow.planning.layer_extras import copy_seconds, launches, recomputed_seconds
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.programs import stops_early
from pipeflow.planning.rates import FROZEN, Rates, Seconds
from pipeflow.planning.setup import Setup
from pipeflow.planning.work import layer_work

WEIGHT_LAUNCHES = 0.4  # of a backward's launches, those of weight gradients: about their share of its computations


def layer_times(
    layer: Seconds,
    rates: Rates,
    checkpoint: str,
    *,
    exchanged: Exchanged = NOTHING,
    sync: float = 0.0,
    launches: float = 1.0,
    again: float = 0.0,
    skipped: float = 0.0,
) -> tuple[float, float, float]:
    """Seconds of a layer's forward, of its whole backward including recomputation, and of the weight gradients in the
    backward. They are at least the times to launch `launches` transformer layers. If the device launches operations
    itself, these times are added. Each half of the backward has its own launches. If the launches were divided like the
    computations, a faster chip could make one half longer.

    Args:
        layer: its computations.
        rates: of the cluster.
        checkpoint: what the backward recomputes.
        exchanged: its communication.
        sync: seconds that each collective of tensor ranks adds to a launch.
        launches: the number of transformer layers that take as long to launch as this layer.
        again: seconds of what the backward computes again besides `checkpoint`.
        skipped: seconds of the forward that a full `checkpoint` does not compute again.
    """
    known, runs_ahead = rates.efficiency, rates.cluster.device.runs_ahead
    checkpoint = "none" if "recomputation" in rates.free else checkpoint
    waiting = exchanged.sums * sync if runs_ahead else 0.0  # else `exchanged` has it

    def taken(computed: float, launch: float) -> float:
        return max(computed, launch) if runs_ahead else computed + launch

    forward = taken(layer.forward + exchanged.forward, launches * known.forward_launch + waiting)
    again = 0.0 if "recomputation" in rates.free else again
    again += {"full": layer.forward + exchanged.forward - skipped, "selective": layer.scores}.get(checkpoint, 0.0)
    relaunch = launches * known.forward_launch + waiting if checkpoint == "full" else 0.0
    for_weights = WEIGHT_LAUNCHES * launches * known.backward_launch if layer.weight else 0.0
    rest = launches * known.backward_launch - for_weights + relaunch
    inputs = taken(layer.backward - layer.weight + again + exchanged.backward, rest + waiting)
    weights = taken(layer.weight, for_weights)
    return forward, inputs + weights, weights


def model_layer_times(model: Transformer, setup: Setup, mesh: Mesh, rates: Rates) -> tuple[float, float, float, float]:
    """The seconds of `layer_times` for one layer of a model, and those of communication in them."""
    layer = rates.seconds(layer_work(model, setup))
    if setup.lora_rank:
        adapters = replace(rates, free=rates.free - {FROZEN}).seconds(adapter_work(model, setup))
        layer = Seconds(*map(sum, zip(layer, adapters, strict=True)))
    exchanged = layer_exchanges(model, setup, mesh, rates, layer)
    sync = rates.efficiency.sync * (mesh.tensor - 1)
    skipped = _skipped(model, setup, rates)
    summed = exchanged.last if skipped else 0.0
    again = exchanged.forward - summed if setup.checkpoint == "full" else 0.0
    further, launched = recomputed_seconds(model, setup, mesh, rates), launches(model, setup)
    forward, backward, weight = layer_times(
        layer,
        rates,
        str(setup.checkpoint),
        exchanged=exchanged,
        sync=sync,
        launches=launched,
        again=further,
        skipped=skipped + summed,
    )
    copied = copy_seconds(model, setup, rates)
    times = max(forward, copied), max(backward - weight, copied) + weight, weight
    return *times, exchanged.forward + exchanged.backward + again


def _skipped(model: Transformer, setup: Setup, rates: Rates) -> float:
    """Seconds of a layer's last product, which recomputation leaves out if it stops early. Outputs of experts are
    needed, since the backward of their weights reads them.
    """
    if not stops_early(setup) or model.experts > 1:
        return 0.0
    return rates.product(layer_work(model, setup).products[-1])
