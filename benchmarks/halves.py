"""The two halves of a backward: what I and W cost together, beside autograd's B and torch's split of the graph.

All contenders train the same parameters of one transformer block. Also: how often a checkpointed block runs forward,
and the Python calls of a W.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.measure import Times, paired
from benchmarks.report import Report

WIDTH, HEADS, LENGTH, SAMPLES = 256, 4, 128, 8
PLAIN = "torch: B"
Backward = Callable[[Any, Any, Any], None]  # from the input, the output and its gradient


def run(rounds: int | None = None) -> Report:
    import torch

    rounds = rounds or 51
    torch.set_num_threads(1)
    _keep_freed_memory()
    title = f"halves: a pre-norm block of width {WIDTH}, {SAMPLES} x {LENGTH}, one thread's CPU time, {rounds} rounds"
    columns = [
        "",
        "F ms",
        "x torch's F",
        "B or I + W ms",
        "x torch's B",
        "the same, no .grad yet",
        "forwards, checkpointed",
    ]
    report = Report("halves", title, columns)
    later, first = _measure(rounds, cleared=False), _measure(rounds, cleared=True)
    forwards = _forwards_checkpointed()
    for name in later["backward"]:
        cells = [f"{cell}" for times in (later["forward"], later["backward"]) for cell in _cells(times, name)]
        report.rows.append([name, *cells, f"{paired(first['backward'], name, PLAIN):.3f}", f"{forwards[name]}"])
    calls = _calls_of_w()
    report.data = {"seconds": later, "seconds without .grad": first, "forwards": forwards, "calls per W": calls}
    report.notes.append("targets: I + W at most 1.03 x torch's B, F at most 1.05 x, 2 forwards of a checkpointed block")
    report.notes.append(f"Python calls per W of a stage with one linear: {calls[1]}, {calls[0]} the first time")
    report.notes.append("ratios are medians over rounds of two times of the same round")
    report.notes.append(
        "malloc keeps freed memory, as torch does on a GPU: otherwise page faults add a few percent to every I + W"
    )
    return report


def _cells(times: Times, name: str) -> tuple[str, str]:
    return f"{1e3 * statistics.median(times[name]):.1f}", f"{paired(times, name, PLAIN):.3f}"


def _keep_freed_memory() -> None:
    trim_threshold, mmap_threshold = -1, -3  # of malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(trim_threshold, 2**30)
    libc.mallopt(mmap_threshold, 2**25)


def _contenders(block: Any) -> dict[str, tuple[Any, Backward]]:
    """By name: the block, or one that defers and has the same parameters, and how its backward runs. Those that are
    fused add products to gradients while they compute them.
    """
    found: dict[str, tuple[Any, Backward]] = {PLAIN: (block, _whole), "torch: I + W": (block, _torch_halves(block))}
    for fuses in (False, True):
        name, (deferring, halves) = "fused" if fuses else "deferring", _deferring(block, fuses=fuses)
        found |= {f"{name}: B": (deferring, _whole), f"{name}: I + W": (deferring, halves)}
    return found


def _deferring(block: Any, *, fuses: bool) -> tuple[Any, Backward]:
    from pipeflow.engine.deferral.module import defer_weight_gradients
    from pipeflow.engine.deferral.products import Queue, run_products

    module = copy.deepcopy(block)
    for mine, theirs in zip(module.modules(), block.modules(), strict=True):
        mine._parameters.update(theirs._parameters)
    deferral = defer_weight_gradients(module)
    deferral.fuses = fuses

    def halves(_: Any, output: Any, gradient: Any) -> None:
        queue: Queue = {}
        deferral.queue = queue
        output.backward(gradient)
        deferral.queue = None
        run_products(queue)

    return module, halves


def _whole(_: Any, output: Any, gradient: Any) -> None:
    output.backward(gradient)


def _torch_halves(block: Any) -> Backward:
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    def halves(hidden: Any, output: Any, gradient: Any) -> None:
        _, groups = stage_backward_input([output], [gradient], [hidden], block.parameters())
        stage_backward_weight(block.parameters(), groups)

    return halves


def _measure(rounds: int, *, cleared: bool) -> dict[str, Times]:
    """Per half and contender the seconds of the rounds, in which contenders take turns; two of warm-up come first."""
    import torch

    from benchmarks.models import Block

    torch.manual_seed(0)
    block = Block(WIDTH, HEADS)
    contenders = _contenders(block)
    _check(block, contenders)
    start, gradient = torch.randn(2, SAMPLES, LENGTH, WIDTH)
    names = list(contenders)
    times: dict[str, Times] = {half: {name: [] for name in names} for half in ("forward", "backward")}
    gc.collect()
    gc.freeze()
    for number in range(-2, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            module, backward = contenders[name]
            if cleared:
                block.zero_grad()
            hidden = start.detach().requires_grad_()
            moments = [time.thread_time()]
            output = module(hidden)
            moments.append(time.thread_time())
            backward(hidden, output, gradient)
            moments.append(time.thread_time())
            if number >= 0:
                times["forward"][name].append(moments[1] - moments[0])
                times["backward"][name].append(moments[2] - moments[1])
    return times


def _check(block: Any, contenders: dict[str, tuple[Any, Backward]]) -> None:
    """Every contender leaves the same gradients, of the parameters and of the input. Raises AssertionError."""
    import torch

    start, gradient = torch.randn(2, 2, 3, WIDTH)
    expected: list[Any] = []
    for name, (module, backward) in contenders.items():
        block.zero_grad()
        hidden = start.detach().requires_grad_()
        backward(hidden, module(hidden), gradient)
        found = [tensor.grad.clone() for tensor in (hidden, *block.parameters())]
        expected = expected or found
        for mine, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-4, msg=f"{name}: another gradient")


def _forwards_checkpointed() -> dict[str, int]:
    """Per contender, how often a checkpointed block runs forward for one microbatch."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    from benchmarks.models import Block

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(16, 2)
            self.forwards = 0

        def count(self, *_: object) -> None:
            self.forwards += 1

        def forward(self, hidden: Any) -> Any:
            return checkpoint(self._block, hidden, use_reentrant=False)

        def _block(self, hidden: Any) -> Any:
            self.count()
            return self.block(hidden)

    found = {}
    for name, (module, backward) in _contenders(Checkpointed()).items():
        module.forwards = 0
        hidden = torch.randn(2, 3, 16, requires_grad=True)
        backward(hidden, output := module(hidden), torch.ones_like(output))
        found[name] = module.forwards
    return found


def _calls_of_w() -> list[int]:
    """Of a stage with one linear layer: the calls of its first W, and of a later one."""
    import torch

    from benchmarks.count import count_calls
    from pipeflow.engine.deferral.module import defer_weight_gradients
    from pipeflow.engine.deferral.products import Queue, run_products

    layer = torch.nn.Linear(4, 4)
    deferral, calls = defer_weight_gradients(layer), []
    for _ in range(2):
        queue: Queue = {}
        deferral.queue = queue
        layer(torch.ones(2, 4)).sum().backward()
        deferral.queue = None

        def weight_gradients(queue: Queue = queue) -> None:
            run_products(queue)

        ours = count_calls(weight_gradients, lambda frame: "W" if "/pipeflow/" in frame.f_code.co_filename else None)
        calls.append(ours["W"])
    return calls
