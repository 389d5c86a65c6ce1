"""Position: where training is in an epoch's data, and how to resume there. Must not contain: how steps are taken, or
the other contents of a checkpoint.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any

import torch
from torch.utils.data import RandomSampler

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.transport.agreement import all_gather_object
from pipeflow.engine.torch_private.tensors import default_states, set_default_states
from pipeflow.training.checkpoint.storage import to_bytes
from pipeflow.training.data import DataParallelLoader

LOG = logging.getLogger("pipeflow")


class Position:
    """The number of used batches of an epoch, and sums over them.

    A DataParallelLoader resumes at the next sample, with any number of data ranks and any batch size. A loader with
    `state_dict` and `load_state_dict`, such as torchdata's StatefulDataLoader, resumes from its own state. Any other
    loader starts the epoch again and its used batches are skipped, so it must yield them in the same order.

    Attributes:
        loader: the loader of the batches; see `attach`.
        epoch: index of the epoch; -1 before the first.
        batches: number of batches of this epoch that each replica used.
        is_trained: True if all steps of this epoch were taken.
        is_told: True if the hooks' `after_training` was called for this epoch.
    """

    def __init__(self, context: Context) -> None:
        self.loader: Iterable[Any] = ()
        self._context = context
        self._is_attached = False
        self._reset(-1)

    def _reset(self, epoch: int) -> None:
        self.epoch, self.batches, self.is_trained, self.is_told = epoch, 0, False, False
        self._loss = self._weight = 0.0
        self._place: Any = None  # of the loader
        self._iterator: Iterator[Any] | None = None

    def attach(self, loader: Iterable[Any]) -> None:
        """Takes batches from `loader`. If another loader was attached before, its unfinished epoch is dropped."""
        if self.loader is not loader and self._is_attached:
            self._reset(-1)
        self.loader, self._is_attached = loader, True

    @property
    def mean_loss(self) -> float:
        """Mean loss of this epoch so far, without steps whose loss is not finite; NaN if there are no others."""
        return self._loss / self._weight if self._weight else math.nan

    def begin(self, epoch: int) -> Iterator[Any]:
        """Returns an iterator over the unused batches of `epoch`."""
        if epoch != self.epoch:
            self._reset(epoch)
        loader = self.loader
        if isinstance(loader, DataParallelLoader):
            if self._place is None:
                loader.set_epoch(epoch)
            else:
                loader.load_state_dict(self._place)
            return iter(loader)
        if self._iterator is None:
            self._iterator = self._unused(loader)
        return self._iterator

    def _unused(self, loader: Iterable[Any]) -> Iterator[Any]:
        sampler: Any = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        if not self.batches:
            return iter(loader)
        before = default_states()  # skipping must not draw random numbers again
        try:
            if self._place is not None:
                loader.load_state_dict(self._place)  # type: ignore[attr-defined]  # it was saved with one
                return iter(loader)
            if isinstance(sampler, RandomSampler) and self._context.rank == 0:
                LOG.warning(
                    "a %s that shuffles has another order each time, so some samples of this epoch may be used twice "
                    "and others not at all: use pipeflow.get_dataloader",
                    type(loader).__name__,
                )
            batches = iter(loader)
            next(islice(batches, self.batches - 1, self.batches), None)
            return batches
        finally:
            set_default_states(before)

    def batches_left(self) -> int:
        """Number of unused batches of this epoch. Call it before the first of them is taken."""
        loader = self.loader
        if isinstance(loader, DataParallelLoader):
            return loader.batches_left() if loader.epoch == self.epoch else 0
        return length_of(loader) - self.batches

    def count(self, loss: float, weight: float, batches: int) -> None:
        """Counts a step.

        Args:
            loss: mean loss of the step's batches; if it is not finite, the step was skipped.
            weight: weight of these batches in the mean of the epoch.
            batches: number of batches of each replica.
        """
        if math.isfinite(loss):
            self._loss, self._weight = self._loss + loss * weight, self._weight + weight
        self.batches += batches
        if isinstance(self.loader, DataParallelLoader):
            self._place = self.loader.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position as plain values, the same on every rank. All ranks call it together."""
        loader, kind = self.loader, _kind(self.loader)
        if kind == _OWN and not self.is_trained and self.batches:
            own = to_bytes("the loader's state_dict()", loader.state_dict()).hex()  # type: ignore[attr-defined]  # it has one
            with self._context.alarm.raised_everywhere():
                everyone: list[Any] = all_gather_object(self._context.world, own)
            place: Any = [everyone[rank] for rank in self._context.readers]
        else:
            place = self._place
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "is_trained": self.is_trained,
            "is_told": self.is_told,
            "loss": self._loss,
            "weight": self._weight,
            "kind": kind,
            "length": _extent(loader),
            "replicas": self._context.data_size,
            "place": place,
        }

    def require_fits(self, state: dict[str, Any], epoch: int) -> None:
        """Raises UsageError if `state` was saved within `epoch` and this loader cannot resume from it."""
        if state["epoch"] != epoch or state["is_trained"] or not state["batches"]:
            return
        kind, replicas = _kind(self.loader), self._context.data_size
        was = f"the checkpoint was saved after {state['batches']} batches of an epoch"
        if kind != state["kind"]:
            raise UsageError(f"{was} of {state['kind']}, but this is {kind}: resume with a loader of the same kind")
        if _extent(self.loader) != state["length"]:
            unit = "samples" if kind == _PARALLEL else "batches"
            raise UsageError(
                f"{was} of {state['length']} {unit}, but this loader has {_extent(self.loader)}: resume with the same "
                "data, or from the end of an epoch"
            )
        if kind != _PARALLEL and replicas != state["replicas"]:
            raise UsageError(
                f"{was} on {state['replicas']} data ranks, but there are {replicas} now: use a loader from "
                "get_dataloader, which can resume with another number, or resume from the end of an epoch"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved position; the next `begin` resumes there."""
        self._reset(state["epoch"])
        self.batches, self.is_trained, self.is_told = state["batches"], state["is_trained"], state["is_told"]
        self._weight = state["weight" if "weight" in state else "samples"]  # as earlier versions called it
        self._loss, self._place = state["loss"], state["place"]
        if state["kind"] == _OWN and self._place is not None:
            mine = bytes.fromhex(self._place[self._context.data_rank])
            self._place = torch.load(io.BytesIO(mine), weights_only=True)


_PARALLEL, _OWN, _OTHER = "a loader of get_dataloader", "a loader with a state_dict", "a loader without a state_dict"


def _kind(loader: Iterable[Any]) -> str:
    if isinstance(loader, DataParallelLoader):
        return _PARALLEL
    return _OWN if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") else _OTHER


def _extent(loader: Iterable[Any]) -> int:
    """Number of samples in an epoch, over all replicas; the number of batches if that is unknown."""
    if isinstance(loader, DataParallelLoader):
        assert isinstance(loader.dataset, Sized)
        return len(loader.dataset)
    return length_of(loader)


def require_batches(loader: Iterable[Any], name: str) -> None:
    """Raises UsageError if the argument `name` has no length or no batch."""
    if not isinstance(loader, Sized):
        raise UsageError(
            f"{name} is a {type(loader).__name__}, which has no length: pass a loader or a list of batches"
        )
    if not len(loader):
        raise UsageError(f"{name} has no batch: use a smaller batch_size, or drop_last=False")


def length_of(loader: Iterable[Any]) -> int:
    """The number of batches of a loader that `require_batches` accepts."""
    assert isinstance(loader, Sized)
    return len(loader)
