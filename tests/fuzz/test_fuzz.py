"""Random configurations train as plain torch does; `make fuzz ARGS=0:1000` tries as many as one likes."""

from __future__ import annotations

import pytest

from tests.covering import some
from tests.fuzz.configuration import drawn
from tests.fuzz.train import compare

SEEDS = some(range(260), range(24))


@pytest.mark.some(6)
@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_train_as_one_process_does(seed: int) -> None:
    try:
        compare(drawn(seed))
    except Exception as error:
        error.add_note(f"python -m tests.fuzz {seed}\n{drawn(seed)}")
        raise


def test_a_seed_says_all() -> None:
    assert drawn(7) == drawn(7)
    assert len({str(drawn(seed)) for seed in range(20)}) == 20
