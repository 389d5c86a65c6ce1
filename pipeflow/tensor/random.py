"""Random numbers of a tensor rank: one stream that all ranks of a group share, for what they hold alike, and one of
its own, for what is split. Explicit generators, since ranks may be threads, and torch's default generator is one for
all threads.
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
    """The two generators of one rank.

    Args:
        seed: the same on every rank; replicas and pipeline ranks draw other numbers from it.
        device: where the numbers are drawn: that of the activations.
        place: this rank's (data, pipeline, tensor) indices.

    Attributes:
        shared: draws the same numbers on the ranks of a tensor group.
        own: draws other numbers on each.
        is_replay: whether what is drawn was drawn before, by another tracker.
    """

    is_replay = False

    def __init__(
        self, seed: int, *, device: torch.device | str = "cpu", place: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        data, pipeline, tensor = place
        self.shared = _generator(device, seed, "shared", data, pipeline)
        self.own = _generator(device, seed, "own", data, pipeline, tensor)

    def get_state(self) -> dict[str, Tensor]:
        """Where both streams are: byte tensors, for a checkpoint of this rank."""
        return {"shared": self.shared.get_state(), "own": self.own.get_state()}

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Goes to where `get_state` was called. Raises UsageError for anything else."""
        if state.keys() != {"shared", "own"}:
            raise UsageError(f"the state of a RandomTracker has the entries own and shared, got {sorted(state)}")
        self.shared.set_state(state["shared"])
        self.own.set_state(state["own"])

    def rewound(self, state: dict[str, Tensor]) -> AbstractContextManager[None]:
        """Inside, the thread that enters draws from `state` on; this tracker stays where it is, for all others."""
        return keeping(_KEY, lambda: _Replay(self, state))


class _Replay(RandomTracker):
    """The streams of another tracker, from a state on."""

    is_replay = True

    def __init__(self, tracker: RandomTracker, state: dict[str, Tensor]) -> None:
        self.shared, self.own = Generator(tracker.shared.device), Generator(tracker.own.device)
        self.set_state(state)


_KEY = "random tracker"


def manual_seed(seed: int) -> RandomTracker:
    """Makes a tracker for this rank's place in the context (without a launch, a world of one) the current one, and
    returns it. Every rank calls it with the same seed, before dropout is first applied.
    """
    tracker = RandomTracker(seed)
    if (context := context_if_launched()) is not None:
        place = (context.data_rank, context.pipeline_rank, context.tensor_rank)
        tracker = RandomTracker(seed, device=context.device, place=place)
    set_tracker(tracker)
    return tracker


def set_tracker(tracker: RandomTracker) -> None:
    """Makes `tracker` the current one on all threads of this rank; for places that no context knows."""
    keep(_KEY, tracker)


def current_tracker() -> RandomTracker | None:
    """The tracker of this rank, if any. Raises UsageError on a thread without a context, where ranks are threads."""
    tracker: RandomTracker | None = kept(_KEY)
    return tracker


def share_default_state(group: Group, device: torch.device) -> None:
    """Puts torch's default generators, from which stock dropout draws, where those of the group's first rank are: what
    ranks hold alike must be dropped alike. From there on all draw as many numbers: what is split has equal parts.
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
