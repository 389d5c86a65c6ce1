"""Every data rank reads its own part, every rank of a replica the same, whatever else drew random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from pipeflow import UsageError
from pipeflow.engine.parallel.context import Context, current_context, set_context
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.testing import Hub, LocalTransport, run_threads
from pipeflow.training import endless, get_dataloader


class Numbers(Dataset[Any]):
    """Sample i is i, with what the dataset draws for it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Tensor, float]:
        return index, torch.rand(2), random.random()


def at(rank: int, layout: WorldLayout) -> None:
    """Makes this thread that rank, with torch's and Python's random numbers anywhere."""
    place = torch.device("cpu")
    set_context(Context(rank, layout, place, LocalTransport(Hub(layout.world_size), rank, device=place, timeout=1.0)))
    torch.manual_seed(rank)
    random.seed(rank)


def epoch(length: int, **options: Any) -> list[list[int]]:
    """The batches of one epoch on this rank, by their samples."""
    return [numbers.tolist() for numbers, _, _ in get_dataloader(Numbers(length), 3, **options)]


@pytest.fixture(autouse=True)
def _no_context() -> Iterator[None]:
    yield
    current_context().close()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_parts_are_disjoint_and_cover(shuffle: bool, workers: int) -> None:
    read = []
    for rank in range(3):
        at(rank, WorldLayout(data=3))
        read += [number for batch in epoch(21, shuffle=shuffle, num_workers=workers) for number in batch]
    assert sorted(read) == list(range(21))


def test_what_does_not_divide_is_repeated_or_left_out() -> None:
    for drop_last, batches in ((False, 3), (True, 2)):
        read = []
        for rank in range(3):
            at(rank, WorldLayout(data=3))
            mine = epoch(20, shuffle=True, drop_last=drop_last)
            assert len(mine) == batches  # the same on every rank
            read += [number for batch in mine for number in batch]
        assert (set(read) == set(range(20))) is not drop_last
        assert (len(set(read)) == len(read)) is drop_last


def drawn(seed: int, epochs: int, workers: int = 0) -> list[Any]:
    loader = get_dataloader(Numbers(12), 2, shuffle=True, seed=seed, num_workers=workers)
    return [
        (numbers.tolist(), of_torch.tolist(), of_python.tolist())
        for _ in range(epochs)
        for numbers, of_torch, of_python in loader
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_of_a_replica_read_the_same_and_disturb_nothing(workers: int) -> None:
    layout, read = WorldLayout(pipeline=2, tensor=2, data=2), []
    for rank in range(8):
        at(rank, layout)
        before = torch.get_rng_state(), random.getstate()
        read.append(drawn(42, 2, workers))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
    first, second = read[0], read[4]
    assert read == [first] * 4 + [second] * 4
    assert all(mine[1] != its[1] for mine, its in zip(first, second, strict=True))  # replicas draw others
    assert len({str(batch) for batch in first}) == len(first)


def test_the_order_follows_from_seed_and_epoch() -> None:
    at(0, WorldLayout())
    assert drawn(1, 1) != drawn(2, 1)
    loader = get_dataloader(Numbers(12), 2, shuffle=True, seed=1)
    orders = [[numbers.tolist() for numbers, _, _ in loader] for _ in range(3)]
    assert orders[0] != orders[1] != orders[2]
    loader.set_epoch(1)
    assert [numbers.tolist() for numbers, _, _ in loader] == orders[1]


@pytest.mark.some(3)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("read", [0, 3, 4, 7])
def test_it_goes_on_where_it_was(workers: int, read: int) -> None:
    at(1, WorldLayout(data=2))
    loader, again = (get_dataloader(Numbers(24), 3, shuffle=True, num_workers=workers) for _ in range(2))
    stream = endless(loader)
    for _ in range(read):
        next(stream)
    state = loader.state_dict()
    assert state == {"epoch": read // 4, "sample": read % 4 * 6}  # of both ranks
    expected = [batch[0].tolist() for batch in islice(stream, 6)]
    again.load_state_dict(state)
    again.set_epoch(state["epoch"])  # as a loop over epochs does
    assert [batch[0].tolist() for batch in islice(endless(again), 6)] == expected


def read_batches(count: int, layout: WorldLayout, size: int, state: dict[str, int] | None, drop_last: bool) -> Any:
    """What all ranks of a layout read in so many batches, or to the end of the epoch, and where rank 0 is then."""
    read, where = [], None
    for rank in range(layout.world_size):
        at(rank, layout)
        loader = get_dataloader(Numbers(64), size, shuffle=True, drop_last=drop_last)
        if state is not None:
            loader.load_state_dict(state)
        for numbers, _, _ in islice(loader, count):
            read += numbers.tolist()
            where = where if rank else loader.state_dict()
    return read, where


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("before", "after"), [((2, 4), (4, 2)), ((4, 2), (1, 8)), ((1, 3), (2, 4)), ((2, 5), (3, 2))])
def test_another_number_of_data_ranks_goes_on_there(
    before: tuple[int, int], after: tuple[int, int], drop_last: bool
) -> None:
    """No sample is lost or seen twice, but for what the last batches need or leave out."""
    first, state = read_batches(3, WorldLayout(data=before[0]), before[1], None, drop_last)
    assert state == {"epoch": 0, "sample": len(first)}
    rest, _ = read_batches(99, WorldLayout(data=after[0]), after[1], state, drop_last)
    assert set(first).isdisjoint(rest) or len(first + rest) > 64
    spare = after[0] * after[1]
    if drop_last:
        assert len(set(first + rest)) == len(first + rest) > 64 - spare
    else:
        assert set(first + rest) == set(range(64))
        assert len(first + rest) < 64 + spare


@pytest.mark.parametrize("drop_last", [False, True])
def test_after_the_last_batch_comes_the_next_epoch(drop_last: bool) -> None:
    """Also where fewer samples are left than another layout needs for a batch."""
    _, state = read_batches(8, WorldLayout(data=2), 4, None, drop_last)
    assert state == {"epoch": 1, "sample": 0}
    _, state = read_batches(7, WorldLayout(data=2), 4, None, drop_last)
    assert state == {"epoch": 0, "sample": 56}
    rest, _ = read_batches(1, WorldLayout(data=4), 4, state, drop_last)
    assert len(rest) == (16 if drop_last else 8)


def test_a_pass_that_was_left_starts_over() -> None:
    at(0, WorldLayout())
    loader = get_dataloader(Numbers(12), 2)
    first = next(iter(loader))[0].tolist()
    assert next(iter(loader))[0].tolist() == first
    assert len(loader) == 6


def test_a_loop_that_takes_the_last_batch_and_no_more_has_read_the_epoch() -> None:
    at(0, WorldLayout())
    loader, whole = (get_dataloader(Numbers(12), 2, shuffle=True) for _ in range(2))
    for _ in range(3):
        batches = iter(loader)
        assert [next(batches)[0].tolist() for _ in range(6)] == [numbers.tolist() for numbers, _, _ in whole]


def test_without_a_sampler_every_rank_reads_all() -> None:
    at(1, WorldLayout(data=2))
    read = [number for batch in epoch(12, shuffle=True, add_sampler=False) for number in batch]
    assert sorted(read) == list(range(12))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_misuse() -> None:
    at(0, WorldLayout())
    with pytest.raises(UsageError, match="Stream has no length"):
        get_dataloader(Stream(), 2)
    with pytest.raises(UsageError, match="has no batch"):
        next(endless(get_dataloader(Numbers(2), 3, drop_last=True)))
    current_context().close()
    with pytest.raises(UsageError, match="there is no context"):
        get_dataloader(Numbers(2), 1)
    at(0, WorldLayout())


def read_in_threads() -> list[Any]:
    return [numbers.tolist() for numbers, _, _ in get_dataloader(Numbers(12), 2, shuffle=True)]


def test_threads() -> None:
    first, again, second, _ = run_threads(read_in_threads, 4, data=2)
    assert first == again != second
    at(0, WorldLayout())
