"""Which samples of a batch a replica reads, and random numbers for reading them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import IterableDataset, SequentialSampler

from pipeflow import Divided
from pipeflow.adapters.batches import ReplicaBatchSampler, ReplicaDataset, samples_of
from pipeflow.adapters.random_states import random_of_data


def test_samples_are_counted_in_any_batch() -> None:
    assert samples_of({"scale": torch.tensor(2.0), "words": [torch.ones(3, 4)]}) == 3
    assert samples_of((torch.ones(5), None)) == 5
    assert samples_of(Divided([{"words": torch.ones(2)}, {"words": torch.ones(1)}])) == 3
    assert samples_of({"name": "none"}) == 0


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5, 8, 9, 16, 21])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_parts_of_all_replicas_are_the_batches_of_one(replicas: int, length: int, drop_last: bool) -> None:
    parts = [
        ReplicaBatchSampler(SequentialSampler(range(length)), 8, drop_last, replicas, index)
        for index in range(replicas)
    ]
    read = [list(part) for part in parts]
    assert {len(each) for each in read} == {len(parts[0])}
    together = [[sample for part in batch for sample in part] for batch in zip(*read, strict=True)]
    whole = [list(range(first, min(first + 8, length))) for first in range(0, length, 8)]
    expected = [batch for batch in whole if len(batch) == 8 or not drop_last]
    filled_up = [batch + (batch * replicas)[: max(0, replicas - len(batch))] for batch in expected]
    assert together == filled_up
    assert all(abs(len(one) - len(other)) <= 1 for batch in zip(*read, strict=True) for one in batch for other in batch)


class Sized(IterableDataset[int]):
    """A stream that has a length."""

    def __init__(self, samples: list[int]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5, 8, 9, 16, 21])
@pytest.mark.parametrize(("replicas", "size"), [(2, 8), (3, 8), (3, 5)])
def test_replicas_divide_a_stream_as_a_list(replicas: int, size: int, length: int, drop_last: bool) -> None:
    for index in range(replicas):
        part = ReplicaDataset(Sized([*range(length)]), size, drop_last, replicas, index)
        batches = [*ReplicaBatchSampler(range(length), size, drop_last, replicas, index)]
        assert [*part] == [sample for batch in batches for sample in batch]
        assert len([*part]) == len(part)


def test_data_draws_the_same_whatever_else_draws() -> None:
    def drawn(others: int) -> list[float]:
        drawing, numbers = random_of_data(5), []
        for _ in range(3):
            torch.rand(others), [random.random() for _ in range(others)]
            with drawing():
                numbers += [torch.rand(()).item(), random.random()]
        return numbers

    before = torch.get_rng_state()
    random_of_data(7)
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn(0) == drawn(3)
    torch.manual_seed(5)
    assert torch.rand(()).item() == drawn(1)[0]
