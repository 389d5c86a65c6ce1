"""Counts Python calls by what they serve. Calls of functions written in C do not count."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType

Category = Callable[[FrameType], str | None]

FOREIGN = (  # the user's module, and autograd; below them only the library's own calls count
    "/benchmarks/models.py",
    "/pipeflow/engine/deferral/layers.py",  # stands in for torch's layers
    "/torch/nn/",
    "/torch/_tensor.py",
    "/torch/autograd/__init__.py",
    "/torch/autograd/function.py",
    "/torch/autograd/graph.py",
)
LIBRARY = ("/pipeflow/", "/torch/distributed/", "/benchmarks/by_hand.py")
TORCH_ACTIONS = {
    "FORWARD": "F",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
    "SEND_F": "P2P",
    "RECV_F": "P2P",
    "SEND_B": "P2P",
    "RECV_B": "P2P",
}
TORCH_FUNCTIONS = {
    "forward_one_chunk": "F",
    "_maybe_compute_loss": "F",
    "backward_one_chunk": "B",
    "backward_weight_one_chunk": "W",
    "_maybe_get_loss": "B",
    "get_fwd_recv_ops": "P2P",
    "get_bwd_recv_ops": "P2P",
    "get_fwd_send_ops": "P2P",
    "get_bwd_send_ops": "P2P",
    "_batch_p2p": "P2P",
    "_wait_batch_p2p": "P2P",
}
HAND_FUNCTIONS = {"_forward": "F", "_backward": "B", "_send": "P2P", "post": "P2P", "values": "P2P"}
PIPEFLOW_METHODS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W", "recompute": "C"}


def of_torch(frame: FrameType) -> str | None:
    name = frame.f_code.co_name
    if name == "_perform_action":
        return TORCH_ACTIONS.get(frame.f_locals["action"].computation_type.name)
    if name == "backward_one_chunk" and not frame.f_locals["full_backward"]:
        return "I"
    return TORCH_FUNCTIONS.get(name) if "/pipelining/" in frame.f_code.co_filename else None


def by_hand(frame: FrameType) -> str | None:
    ours = frame.f_code.co_filename.endswith("/by_hand.py")
    return HAND_FUNCTIONS.get(frame.f_code.co_name) if ours else None


def of_pipeflow(frame: FrameType) -> str | None:
    from pipeflow.engine.runtime.program.microbatches import Microbatch
    from pipeflow.engine.runtime.program.wires import Wire

    called = frame.f_code.co_name
    match frame.f_locals.get("self"):
        case Microbatch() if called in PIPEFLOW_METHODS:
            return PIPEFLOW_METHODS[called]
        case Wire() if called in ("post", "wait", "send", "release"):
            return "P2P"
        case _:
            return None


def all_calls(step: Callable[[], object]) -> int:
    """All Python calls of one step in this thread, also those of the user's module and of torch's layers."""
    calls = 0

    def profile(_: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def count_calls(step: Callable[[], object], category: Category) -> Counter[str]:
    """The Python calls of one step by category: the innermost that applies, else "rest"."""
    counts: Counter[str] = Counter()
    stack: list[tuple[str, bool]] = []  # per frame: what it serves, and whether it is foreign

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            serves, below = stack[-1] if stack else ("rest", False)
            path = frame.f_code.co_filename
            foreign = any(part in path for part in FOREIGN) or (below and not any(part in path for part in LIBRARY))
            serves = category(frame) or serves
            stack.append((serves, foreign))
            counts[serves] += not foreign
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return counts
