"""Data loading: each data rank gets its own part, the same on all ranks of a replica; batches of samples of different
lengths; and mixup (arXiv 1710.09412), training on weighted pairs of images. Must not contain: how a batch is split into
microbatches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from itertools import chain, cycle, islice
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.liveness import MemoryCap
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import context_if_launched, current_context
from pipeflow.engine.runtime.microbatch import Divided
from pipeflow.engine.torch_private.tensors import default_states, set_default_states
from pipeflow.schedules.families import schedules_on
from pipeflow.schedules.order_search import order_for
from pipeflow.training.launch import current_config


def get_dataloader(
    dataset: Dataset[Any],
    batch_size: int | None = None,
    *,
    shuffle: bool = False,
    seed: int = 1024,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    add_sampler: bool = True,
    **kwargs: Any,
) -> DataParallelLoader:
    """Makes a loader of this data rank's part of `dataset`. All tensor and pipeline ranks of a replica receive the same
    batches, and all data ranks the same number of batches.

    Order and random numbers depend only on `seed`, the epoch and the data rank. torch's default generator, whose state
    differs between stages, is neither used nor changed.

    Args:
        dataset: a dataset with a length.
        batch_size: number of samples per batch on this data rank; by default BATCH_SIZE of the configuration, else 1.
        shuffle: use another random order in each epoch.
        seed: seed of the order and of random numbers that the dataset draws.
        drop_last: leave out the last samples if they don't fill a batch on every data rank. If False and the dataset
            does not divide evenly among the data ranks, some samples are used twice.
        pin_memory: as in torch.utils.data.DataLoader, but ignored on CPUs.
        num_workers, kwargs: as in torch.utils.data.DataLoader.
        add_sampler: give each data rank its own part of the dataset; if False, each gets all of it.

    Raises UsageError if the dataset has no length, or if this process was not launched.
    """
    context = current_context()
    if not isinstance(dataset, Sized):
        raise UsageError(f"{type(dataset).__name__} has no length: make a DataLoader of this data rank's part yourself")
    if batch_size is None:
        config = current_config()
        batch_size = getattr(config, "batch_size", None) or 1
    ranks, rank = (context.data_size, context.data_rank) if add_sampler else (1, 0)
    sampler = _Part(dataset, ranks, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
    return DataParallelLoader(
        dataset,
        batch_size,
        sampler=sampler,
        drop_last=drop_last,
        pin_memory=pin_memory and context.device.type != "cpu",
        num_workers=num_workers,
        generator=torch.Generator(),
        **kwargs,
    )


class _Part(DistributedSampler[Any]):
    """torch's sampler, extended to skip the first samples of an epoch's order. The remaining samples are distributed
    over the ranks again, so any number of ranks can resume there.
    """

    start = 0  # number of skipped samples, over all ranks

    def __iter__(self) -> Iterator[Any]:
        order, ranks = self._order(), self.num_replicas
        each = self.left(self.start)
        padded = islice(chain(order[self.start :], cycle(order)), each * ranks)
        return islice(padded, self.rank, None, ranks)

    def left(self, start: int) -> int:
        """Number of samples of each rank from `start` on."""
        left = max(0, self._length - start)
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    @property
    def _length(self) -> int:
        assert isinstance(self.dataset, Sized)
        return len(self.dataset)

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self._length))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(self._length, generator=generator).tolist()
        return order


class DataParallelLoader(DataLoader[Any]):
    """A DataLoader that can resume after any batch, also on another number of data ranks; `get_dataloader` makes it.
    After a complete pass over the data the next pass uses the order of the next epoch.

    Attributes:
        epoch: index of the current epoch, from 0.
    """

    epoch = 0
    _position = 0  # samples of this epoch used so far, over all data ranks
    _start = 0  # first sample of the next pass

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch, and so the order, of the next pass. If it is the current epoch of a loaded state, the pass
        continues from that state's position.
        """
        if epoch != self.epoch:
            self.epoch, self._start = epoch, 0
        self._position = self._start  # an interrupted pass does not count

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's is more narrow
        part = self._part
        assert self.generator is not None
        if self._position > self._start:  # the last pass was interrupted, perhaps after its last batch
            self.epoch = self._normal(self.epoch, self._position)["epoch"]
        start, self._start = self._start, 0
        part.set_epoch(self.epoch)
        part.start = self._position = start
        self.generator.manual_seed(_mixed(part.seed, self.epoch, part.rank))  # for the workers
        batches = super().__iter__()
        while True:
            with self._own_random_numbers(part):
                batch = next(batches, _END)
            if batch is _END:
                break
            self._position += self._size * part.num_replicas
            yield batch
        self.epoch, self._position = self.epoch + 1, 0

    def batches_left(self) -> int:
        """Number of batches left in the current pass, or in the next one if none is running."""
        left = self._part.left(self._position)
        return left // self._size if self.drop_last else -(-left // self._size)

    @property
    def _part(self) -> _Part:
        assert isinstance(self.sampler, _Part)
        return self.sampler

    @property
    def _size(self) -> int:
        assert self.batch_size is not None
        return self.batch_size

    @contextmanager
    def _own_random_numbers(self, part: _Part) -> Iterator[None]:
        """Seeds the random numbers that the dataset draws, if this process reads the samples itself."""
        if self.num_workers > 0:
            yield
            return
        number = _mixed(part.seed, self.epoch, part.rank, self._position)
        before, others = default_states(), random.getstate()
        torch.default_generator.manual_seed(number)
        random.seed(number)
        try:
            yield
        finally:
            set_default_states(before)
            random.setstate(others)

    def state_dict(self) -> dict[str, int]:
        """Returns the position in the data: "epoch", and "sample", the number of its samples used so far by all data
        ranks. After the last batch it is the start of the next epoch.
        """
        return self._normal(self.epoch, self._position)

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Makes the next pass continue from a saved position, without reading earlier samples. The number of data ranks
        and the batch size may differ from those at the save: no sample is lost or repeated.
        """
        state = self._normal(state_dict["epoch"], state_dict["sample"])
        self.epoch = state["epoch"]
        self._position = self._start = state["sample"]

    def _normal(self, epoch: int, sample: int) -> dict[str, int]:
        left = self._part.left(sample)
        has_batch = left >= (self._size if self.drop_last else 1)
        return {"epoch": epoch, "sample": sample} if has_batch else {"epoch": epoch + 1, "sample": 0}


_END = object()


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yields batches forever, one epoch after another. Raises UsageError if the loader has no batch."""
    if len(loader) == 0:
        raise UsageError("the loader has no batch: use a smaller batch_size, or drop_last=False")
    while True:
        yield from loader


def _mixed(*numbers: int) -> int:
    """A seed made from all of the numbers."""
    return random.Random(repr(numbers)).getrandbits(63)


def length_of(sample: Any) -> int:
    """The number of tokens of a sample: the length of its `input_ids`, or of the first entry of a pair. Raises
    UsageError for another sample.
    """
    try:
        return len(sample["input_ids"] if isinstance(sample, dict) else sample[0])
    except (KeyError, TypeError, IndexError):
        raise UsageError(f"the length of a {type(sample).__name__} is not known: pass ByLength(length=)") from None


class ByLength:
    """A collate function for batches whose samples have different lengths. It is passed to a loader, or as
    `data_collator` to transformers' Trainer. It forms microbatches of like cost, which `collate` makes one by one, and
    chooses the schedule of each batch (`pipeflow.order_for`). All ranks of a replica read the same samples, so all find
    the same order.

    A schedule is chosen that keeps no more activations than `schedule`: this one, or a named one of its placement. Each
    is compiled when it is first used. With replicas it is always `schedule`, since all of them run the same one. A
    loader with workers plans in them, beside the training.

    Args:
        collate: makes a batch of a list of samples.
        schedule: the schedule of the Pipeline, which has the placement and the number of microbatches. A batch with
            fewer samples has as many microbatches as samples.
        cost: times and bytes of a mean microbatch. None: all stages take the same time.
        length: returns the length of a sample; by default `length_of`.
        padded: whether `collate` pads samples to the longest one. False if it packs them.
        quadratic, bytes_cap, budget: as in `order_for`.

    Attributes:
        undivided: `collate`, which evaluations use.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        schedule: Schedule,
        cost: CostModel | None = None,
        *,
        length: Callable[[Any], float] = length_of,
        padded: bool = True,
        quadratic: float = 0.0,
        bytes_cap: MemoryCap | None = None,
        budget: float = 0.05,
    ) -> None:
        self.undivided = collate
        self._schedule = schedule
        self._cost = CostModel.even(schedule.placement) if cost is None else cost
        self._length = length
        context = context_if_launched()
        self._has_replicas = context is not None and context.data_size > 1
        self._options: dict[str, Any] = {
            "padded": padded,
            "quadratic": quadratic,
            "bytes_cap": bytes_cap,
            "budget": budget,
        }

    def __call__(self, samples: Sequence[Any]) -> Divided:
        many = min(self._schedule.num_microbatches, len(samples))
        usual = self._schedule.first(many)
        order = order_for(
            [self._length(sample) for sample in samples],
            self._schedule.placement,
            self._cost,
            many,
            among=(usual,) if self._has_replicas else _frugal(usual),
            **self._options,
        )
        parts = [self.undivided([samples[index] for index in group]) for group in order.groups]
        return Divided(parts, order.schedule, order.cost)


@lru_cache(maxsize=8)
def _frugal(schedule: Schedule) -> tuple[Schedule, ...]:
    """The schedule, and the named ones of its placement that keep no more on any rank, of as many slices or whole."""
    most = simulate(schedule).peak_activations
    named = [
        each
        for slices in sorted({1, schedule.slices})
        for each in schedules_on(schedule.placement, schedule.num_microbatches, slices)
    ]
    peaks = ((each, simulate(each).peak_activations) for each in named)
    return schedule, *(each for each, kept in peaks if max(kept) <= max(most) and each.rows != schedule.rows)


class MixedLabels(TypedDict):
    """Labels of mixed images: image i is `lam` parts of class `targets_a[i]`, 1 - `lam` of class `targets_b[i]`."""

    targets_a: Tensor
    targets_b: Tensor
    lam: Tensor


class Mixup:
    """Mixes each image of a batch with another image of the batch, with one weight for the whole batch.

    Use it as `collate_fn` of a `get_dataloader` loader: random numbers come from torch's default generator, which that
    loader seeds equally on all ranks of a replica.

    Args:
        alpha: the weight is drawn from Beta(alpha, alpha), near 0 or 1 for a small alpha. 0 disables mixing.
        collate: function that makes a batch from pairs (image, label), before mixing.

    Raises UsageError for a negative alpha.
    """

    def __init__(self, alpha: float = 0.2, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        if not alpha >= 0:
            raise UsageError(f"Mixup's alpha must be at least 0, got {alpha}")
        self.alpha = alpha
        self.collate = collate

    def __call__(self, samples: Sequence[tuple[Any, Any]]) -> tuple[Tensor, MixedLabels]:
        """Makes a mixed batch from pairs (image, label): images [batch, ...] and MixedLabels of shape [batch]."""
        images, labels = self.collate(list(samples))
        return self.mix(images, labels)

    def mix(self, images: Tensor, labels: Tensor) -> tuple[Tensor, MixedLabels]:
        """Mixes a batch: images [batch, ...] and labels [batch]."""
        lam = torch.ones(())
        if self.alpha:
            lam = torch.distributions.Beta(self.alpha, self.alpha).sample()
        others = torch.randperm(len(images))
        mixed = images.lerp(images[others], (1 - lam).to(images.dtype))
        return mixed, {"targets_a": labels, "targets_b": labels[others], "lam": lam}


class MixupLoss(nn.Module):
    """Loss for mixed labels, lam * loss(targets_a) + (1 - lam) * loss(targets_b); for plain labels, the loss itself.

    Args:
        loss_fn_cls: class or function that makes the loss, such as nn.CrossEntropyLoss.
    """

    def __init__(self, loss_fn_cls: Callable[[], Callable[[Tensor, Tensor], Tensor]]) -> None:
        super().__init__()
        self.loss_fn = loss_fn_cls()

    def forward(self, outputs: Tensor, targets: Tensor | MixedLabels) -> Tensor:
        if not isinstance(targets, dict):
            return self.loss_fn(outputs, targets)
        lam = targets["lam"]
        return lam * self.loss_fn(outputs, targets["targets_a"]) + (1 - lam) * self.loss_fn(
            outputs, targets["targets_b"]
        )


class MixupAccuracy(nn.Module):
    """Number of samples in a batch whose label has the largest score, an integer scalar. For mixed labels `targets_a`
    is compared.
    """

    def forward(self, outputs: Tensor, targets: Tensor | MixedLabels) -> Tensor:
        labels = targets if isinstance(targets, Tensor) else targets["targets_a"]
        return (outputs.argmax(-1) == labels).sum()


def mixed(loader: DataParallelLoader, alpha: float) -> DataParallelLoader:
    """Returns a copy of `loader` whose batches are mixed by Mixup(alpha). Raises UsageError as Mixup does."""
    other = copy(loader)
    other.collate_fn = Mixup(alpha, loader.collate_fn)
    return other
