"""Layer extras: the seconds of modules that a backward computes again, of copies to the host, and the launches that
CUDA graphs save. Must not contain: what all layers have.
"""

from __future__ import annotations

from dataclasses import replace

from pipeflow.core.errors import UsageError
from pipeflow.planning.backward_work import recomputed_work
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.exchanges import expert_seconds
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.rates import Rates
from pipeflow.planning.recomputation import recomputed_modules
from pipeflow.planning.setup import GRAPHS, Setup
from pipeflow.planning.transformer_costs import layer_kept, tokens_of

ROUTED_LAUNCHES, EXPERT_LAUNCHES = 2.0, 0.12
"""Launches of a layer with experts, and of one more expert, as multiples of those of a layer without. With them,
layers of Qwen3 235B with 16 experts on a device of four tensor ranks take as long as Megatron's model zoo measured: 9
ms, where their computations take 6 ms.
"""
GROUPED = 16  # experts of a device whose products are launched one by one; programs with more of them have one kernel


def recomputed_seconds(model: Transformer, setup: Setup, mesh: Mesh, rates: Rates) -> float:
    """Seconds in which the backward of a layer computes its `recompute_modules` again, or what a checkpoint "op" does
    not keep, with their communication. The latter gathers the inputs of both MLP and attention, which together are as
    many bytes as one sum over tensor ranks.
    """
    modules, is_op = recomputed_modules(model, setup), setup.checkpoint == "op"
    if not (modules or is_op):
        return 0.0
    seconds = rates.seconds(recomputed_work(model, setup)).forward
    if (is_op and setup.sequence_parallel) or "mlp" in modules or "shared_experts" in modules:
        summed = tokens_of(model, setup) * model.hidden * setup.precision.weight
        seconds += rates.tensor_sum(mesh.tensor_group, summed)
    return seconds + (expert_seconds(model, setup, mesh, rates) if "moe" in modules else 0.0)


def launches(model: Transformer, setup: Setup) -> float:
    """How many times as long as a layer without experts the host takes to launch this one, without what CUDA graphs
    launch. Each of a device's experts has products of its own.
    """
    own = min(model.experts // setup.expert, GROUPED) if model.experts > 1 else 0
    whole = ROUTED_LAUNCHES + EXPERT_LAUNCHES * own if own else 1.0
    return whole * max(0.0, 1 - sum(GRAPHS[scope][model.experts > 1] for scope in setup.cuda_graphs))


def copy_seconds(model: Transformer, setup: Setup, rates: Rates) -> float:
    """Seconds to copy to the host what an offloaded layer keeps, or back. Raises UsageError where the speed of these
    copies is not known.
    """
    if not setup.offload_layers:
        return 0.0
    device = rates.cluster.device
    if not device.host_bandwidth:
        raise UsageError(
            f"device {device.name!r} has no host_bandwidth, which copies to the host take: give it in a cluster file"
        )
    copied = replace(setup, offload_layers=0)
    return tokens_of(model, setup) * layer_kept(model, copied) / device.host_bandwidth
