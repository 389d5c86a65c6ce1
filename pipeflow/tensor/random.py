"""Random numbers of a tensor rank. All ranks of a group share one stream, for tensors that are the same on all of them.
Each rank also has its own stream, for tensors that are split. Both use explicit generators, because ranks may be
threads and all threads share torch's default generator.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager

import torch
from torch import Generator, Tensor

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import context_if_launched, keep, keeping, kept
from pipeflow.parallel.transport.group import Group


class RandomTracker:
    """The two random generators of one rank.

    Args:
        seed: seed, the same on every rank; replicas and pipeline ranks draw different numbers from it.
        device: device of the generators, which must be that of the activations.
        place: this rank's (data, pipeline, tensor) indices.

    Attributes:
        shared: generator that draws the same numbers on all ranks of a tensor group.
        own: generator that draws different numbers on each rank.
        is_replay: True if it replays numbers that another tracker drew before.
    """

    is_replay = False

    def __init__(
        self, seed: int, *, device: torch.device | str = "cpu", place: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        data, pipeline, tensor = place
        self.shared = _generator(device, seed, "shared", data, pipeline)
        self.own = _generator(device, seed, "own", data, pipeline, tensor)

    def get_state(self) -> dict[str, Tensor]:
        """The states of both generators as byte tensors, for a checkpoint of this rank."""
        return {"shared": self.shared.get_state(), "own": self.own.get_state()}

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Restores a state from `get_state`. Raises UsageError for anything else."""
        if state.keys() != {"shared", "own"}:
            raise UsageError(f"the state of a RandomTracker must have the entries own and shared, got {sorted(state)}")
        self.shared.set_state(state["shared"])
        self.own.set_state(state["own"])

    def rewound(self, state: dict[str, Tensor]) -> AbstractContextManager[None]:
        """Returns a context manager: inside it, the thread that entered draws from `state` on. Other threads, and this
        tracker, are not affected.
        """
        return keeping(_KEY, lambda: _Replay(self, state))


class _Replay(RandomTracker):
    """Replays the generators of another tracker from a given state."""

    is_replay = True

    def __init__(self, tracker: RandomTracker, state: dict[str, Tensor]) -> None:
        self.shared, self.own = Generator(tracker.shared.device), Generator(tracker.own.device)
        self.set_state(state)


_KEY = "random tracker"


def manual_seed(seed: int) -> RandomTracker:
    """Makes and returns the current RandomTracker for this rank's place in the context, or for a world of one without a
    launch. Every rank calls it with the same seed, before dropout is first used.
    """
    tracker = RandomTracker(seed)
    if (context := context_if_launched()) is not None:
        place = (context.data_rank, context.pipeline_rank, context.tensor_rank)
        tracker = RandomTracker(seed, device=context.device, place=place)
    set_tracker(tracker)
    return tracker


def set_tracker(tracker: RandomTracker) -> None:
    """Sets the current tracker for all threads of this rank. Use it for places that the context does not know."""
    keep(_KEY, tracker)


def current_tracker() -> RandomTracker | None:
    """The current tracker of this rank, or None. Raises UsageError on a thread that is no rank."""
    tracker: RandomTracker | None = kept(_KEY)
    return tracker


def share_default_state(group: Group, device: torch.device) -> None:
    """Sets torch's default generators, from which stock dropout draws, to the state on the group's first rank.

    Tensors that are the same on all ranks must get the same masks. From then on all ranks draw equally many numbers,
    because split tensors have equal parts.
    """
    if group.size == 1:
        return
    state = torch.get_rng_state().to(device)
    group.broadcast(state, 0).wait()
    torch.set_rng_state(state.cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device).to(device)
        group.broadcast(state, 0).wait()
        torch.cuda.set_rng_state(state.cpu(), device)


def _generator(device: torch.device | str, *what: object) -> Generator:
    digest = hashlib.sha256("/".join(map(str, what)).encode()).digest()
    return Generator(device).manual_seed(int.from_bytes(digest[:7]))
