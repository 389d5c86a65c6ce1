"""Tensor parallelism: forward and backward of one transformer block on two processes, beside torch's DTensor styles."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Times, paired, step_times
from benchmarks.processes import run_ranks
from benchmarks.report import Report

if TYPE_CHECKING:
    from torch import Tensor, nn

    from benchmarks.task import Contender

RANKS, LENGTH, SAMPLES, HEAD_WIDTH = 2, 128, 4, 64
ROUNDS = {256: 41, 1024: 11}  # by width
LAYOUTS = {"whole": False, "sequence": True}  # whether the sequence is split between the layers


def run(rounds: int | None = None) -> Report:
    planned = {width: rounds or usual for width, usual in ROUNDS.items()}
    title = (
        f"tensor: a block on {RANKS} processes, {SAMPLES} x {LENGTH}, {' and '.join(map(str, planned.values()))} rounds"
    )
    report = Report("tensor", title, ["", "median ms", "x torch", "middle half", "CPU ms", "x torch"])
    for width, number in planned.items():
        results = run_ranks("tensor:measure", RANKS, {"width": width, "rounds": number}, deadline=120 + 12 * number)
        times, used = step_times([each["seconds"] for each in results]), _summed([each["used"] for each in results])
        report.data |= {f"seconds, width {width}": times, f"CPU seconds, width {width}": used}
        for name in times:
            other = f"{name.partition(':')[0]}: torch"
            low, high = _middle_half(times, name, other)
            row = [*_cells(times, name, other), f"{low:.2f} to {high:.2f}", *_cells(used, name, other)]
            report.rows.append([f"width {width}, {name}", *row])
    report.notes.append(
        "torch: ColwiseParallel and RowwiseParallel, SequenceParallel norms where the sequence is split"
    )
    report.notes.append(
        "where it is split, a step of pipeflow ends with the sum of the norms' gradients over the ranks"
    )
    report.notes.append(
        "CPU: of both processes with all of their threads, which other work on the machine hardly moves"
    )
    report.notes.append("target: below torch; ratios are medians over rounds of two times of the same round")
    return report


def _summed(per_rank: list[Times]) -> Times:
    return {name: [sum(each) for each in zip(*(used[name] for used in per_rank), strict=True)] for name in per_rank[0]}


def _cells(times: Times, name: str, other: str) -> list[str]:
    return [f"{1e3 * statistics.median(times[name]):.1f}", f"{paired(times, name, other):.3f}"]


def _middle_half(times: Times, name: str, other: str) -> tuple[float, float]:
    """The quartiles of the ratios: how much the machine's other work moves them."""
    ratios = [mine / theirs for mine, theirs in zip(times[name], times[other], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return low, high


def measure(width: int, rounds: int) -> dict[str, Times]:
    """On every rank: checks that all contenders find the same, then takes the times."""
    import torch

    from benchmarks.measure import alternate

    torch.manual_seed(0)
    block, whole = _block(width), torch.randn(2, SAMPLES, LENGTH, width)
    contenders: dict[str, Contender] = {}
    used: Times = {}
    for layout, sequence in LAYOUTS.items():
        pieces = whole.chunk(RANKS, 2)[torch.distributed.get_rank()].contiguous() if sequence else whole
        found = {}
        for name, module in _modules(block, sequence=sequence).items():
            label = f"{layout}: {name}"
            contenders[label] = _contender(label, module, pieces, used.setdefault(label, []))
            outcome: Any = contenders[label].step()
            found[name] = [*outcome, *_gradients(module)]
        _check(found)
    times = alternate(contenders, rounds)
    return {"seconds": times, "used": {name: seconds[-rounds:] for name, seconds in used.items()}}


def _modules(block: nn.Module, *, sequence: bool) -> dict[str, nn.Module]:
    from pipeflow.engine.deferral.module import defer_weight_gradients

    modules = {"torch": _torchs(block, sequence=sequence), "pipeflow": _ours(block, sequence=sequence)}
    modules["pipeflow, deferring"] = _ours(block, sequence=sequence)
    defer_weight_gradients(modules["pipeflow, deferring"])
    return modules


def _contender(name: str, module: nn.Module, pieces: Tensor, used: list[float]) -> Contender:
    """Forward and backward of `module` from this rank's pieces of an input and an output's gradient; its step gives
    the output and the input's gradient, and adds the CPU time that it took to `used`.
    """
    from benchmarks.task import Contender
    from pipeflow.engine.parallel.sharding import partial_in

    group, partial = _group(), partial_in(module)
    input, gradient = pieces.unbind()

    def step() -> list[Tensor | None]:
        start = time.process_time()
        hidden = input.detach().requires_grad_()
        output = module(hidden)
        output.backward(gradient)
        for work in [group.all_reduce(parameter.grad) for parameter in partial]:
            work.wait()
        used.append(time.process_time() - start)
        return [output.detach(), hidden.grad]

    return Contender(name, step, [module])


def _block(width: int, layers: dict[str, Any] | None = None) -> Any:
    """A pre-norm block; queries, keys and values lie together per head, so that a part of them is whole heads."""
    import torch
    from torch.nn import functional

    class Block(torch.nn.Module):
        query_key_value: torch.nn.Module
        project: torch.nn.Module
        up: torch.nn.Module
        down: torch.nn.Module
        attention_norm: torch.nn.Module
        perceptron_norm: torch.nn.Module

        def forward(self, hidden: Tensor) -> Tensor:
            joint = self.query_key_value(self.attention_norm(hidden)).unflatten(-1, (-1, 3, HEAD_WIDTH))
            query, key, value = joint.permute(3, 0, 2, 1, 4)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            hidden = hidden + self.project(mixed.transpose(1, 2).flatten(2))
            widened: Tensor = self.down(functional.gelu(self.up(self.perceptron_norm(hidden))))
            return hidden + widened

    stock = {
        "attention_norm": torch.nn.LayerNorm(width),
        "query_key_value": torch.nn.Linear(width, 3 * width),
        "project": torch.nn.Linear(width, width),
        "perceptron_norm": torch.nn.LayerNorm(width),
        "up": torch.nn.Linear(width, 4 * width),
        "down": torch.nn.Linear(4 * width, width),
    }
    block = Block()
    for name, layer in (layers or stock).items():
        block.add_module(name, layer)
    return block


def _group() -> Any:
    from pipeflow.engine.parallel.context import current_context

    return current_context().world.group(range(RANKS))


def _ours(block: Any, *, sequence: bool) -> Any:
    from pipeflow.tensor import ColumnParallelLinear, LayerNorm, RowParallelLinear

    kinds: dict[str, Any] = {
        "attention_norm": LayerNorm,
        "query_key_value": ColumnParallelLinear,
        "project": RowParallelLinear,
        "perceptron_norm": LayerNorm,
        "up": ColumnParallelLinear,
        "down": RowParallelLinear,
    }
    group, layers = _group(), dict(block.named_children())
    made = {
        name: kind.from_native_module(layers[name], group, sequence_parallel=sequence) for name, kind in kinds.items()
    }
    return _block(0, made)


def _torchs(block: Any, *, sequence: bool) -> Any:
    import copy

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    into: dict[str, Any] = {"input_layouts": Shard(1)} if sequence else {}
    out_of: dict[str, Any] = {"output_layouts": Shard(1)} if sequence else {}
    plan: dict[str, Any] = {
        "query_key_value": ColwiseParallel(**into),
        "project": RowwiseParallel(**out_of),
        "up": ColwiseParallel(**into),
        "down": RowwiseParallel(**out_of),
    }
    if sequence:
        plan |= {"attention_norm": SequenceParallel(), "perceptron_norm": SequenceParallel()}
    return parallelize_module(copy.deepcopy(block), init_device_mesh("cpu", (RANKS,)), plan)


def _gradients(module: Any) -> list[Tensor]:
    """Of this rank's parts; of a DTensor that every rank has whole, or has a term of, the whole."""
    from torch.distributed.tensor import DTensor, Shard

    found = []
    for _, parameter in sorted(module.named_parameters()):
        grad = parameter.grad
        if isinstance(grad, DTensor):
            grad = grad.to_local() if isinstance(grad.placements[0], Shard) else grad.full_tensor()
        found.append(grad)
    return found


def _check(found: dict[str, list[Tensor]]) -> None:
    """Every contender finds the same output and gradients. Raises AssertionError."""
    import torch

    for name, tensors in found.items():
        for mine, theirs in zip(tensors, found["torch"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, msg=f"{name} finds something else")
