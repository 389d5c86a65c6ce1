"""Several replicas, each a pipeline: the same numbers as one process, each sample once, and one process for logs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import RankError, run_processes
from tests.accelerate.loops import accelerator_of, make_bert, make_texts, predictions, train_batch
from tests.accelerate.test_loops import require_same

pytest.importorskip("accelerate", reason="not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
STEPS, SAVED, KILLED = 20, 6, 13  # of two epochs of ten batches
Seen = tuple[list[float], dict[str, torch.Tensor], list[int]]


def train(which: str, folder: Path | None = None, first: int = 0, stop: int = STEPS) -> Seen:
    """Trains with a batch of eight texts of all replicas together, from step `first`: from a saved state if it is not
    0, and at step `stop` the last rank dies. Returns losses, norms and predictions by step, this rank's weights, and
    the samples that were trained on.
    """
    from accelerate import DataLoaderConfiguration, skip_first_batches

    accelerator = accelerator_of(
        which,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
    )
    model: Any = make_bert()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    texts = [{**each, "index": torch.tensor(index)} for index, each in enumerate(make_texts(80))]
    loader: Any = DataLoader(texts, batch_size=8, shuffle=True)  # type: ignore[arg-type]  # a list will do
    check: Any = DataLoader(make_texts(21), batch_size=8)  # type: ignore[arg-type]
    rate: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, STEPS // 2)
    model, optimizer, loader, check, rate = accelerator.prepare(model, optimizer, loader, check, rate)
    if first:
        accelerator.load_state(str(folder))
    seen: list[float] = []
    read: list[int] = []
    step = first
    while step < STEPS:
        loader.set_epoch(step // 10)
        model.train()
        for batch in skip_first_batches(loader, step % 10):
            if step == stop and current_context().rank == current_context().world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            read += accelerator.gather_for_metrics(batch.pop("index")).tolist()
            seen += train_batch(accelerator, model, optimizer, rate, batch)
            step += 1
            if folder is not None and not first and step == SAVED:
                accelerator.save_state(str(folder))
    seen += predictions(accelerator, model, check)
    return seen, {name: each.detach().clone() for name, each in model.named_parameters()}, read


@pytest.fixture(scope="module")
def expected() -> Seen:
    seen = train("accelerate")
    assert [sorted(seen[2][epoch : epoch + 80]) for epoch in (0, 80)] == [[*range(80)]] * 2
    return seen


def require_trained(results: list[Seen], expected: Seen, first: int = 0) -> None:
    """The numbers, weights and samples from step `first` on. Each step has two numbers, and each second one a norm."""
    seen, weights, read = expected
    require_same([result[0] for result in results], seen[first * 2 + first // 2 :])
    assert {name for result in results for name in result[1]} == set(weights)
    for result in results:
        assert result[2] == read[first * 8 :]
        for name, each in result[1].items():
            torch.testing.assert_close(each, weights[name], rtol=0, atol=1e-5)


def test_replicas_train_as_one_process(expected: Seen) -> None:
    require_trained(run_processes(train, 4, "pipeflow", deadline=200.0, data=2), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [{}, pytest.param({"data": 2}, marks=pytest.mark.exhaustive)])
def test_a_killed_job_goes_on_under_another_layout(layout: dict[str, Any], expected: Seen, tmp_path: Path) -> None:
    """Replicas of pipelines die; a pipeline, or replicas alone, go on from the state that was saved amid an epoch."""
    with pytest.raises(RankError, match="rank 3 died"):
        run_processes(train, 4, "pipeflow", tmp_path / "state", 0, KILLED, deadline=200.0, data=2, may_die=[3])
    resumed = run_processes(train, 2, "pipeflow", tmp_path / "state", SAVED, deadline=200.0, **layout)
    require_trained(resumed, expected, SAVED)


def places() -> list[Any]:
    """What a script sees of its place, and of operations among replicas."""
    from pipeflow.accelerate import Accelerator, utils

    accelerator, context = Accelerator(cpu=True, parallelism_config=None), current_context()
    with accelerator.split_between_processes(["a", "b", "c"], apply_padding=True) as part:
        said = [part]
    ran: list[str] = []
    accelerator.on_main_process(ran.append)("main")
    accelerator.on_last_process(ran.append)("last")
    accelerator.on_process(ran.append, process_index=1)("replica")
    said += [accelerator.num_processes, accelerator.process_index, accelerator.is_main_process, ran]
    told = utils.gather_object([context.data_rank, torch.tensor([1.5])])
    return [*said, [each if isinstance(each, int) else each.item() for each in told]]


@pytest.mark.exhaustive
def test_a_process_is_a_replica_and_rank_0_logs() -> None:
    told = [0, 1.5, 1, 1.5]
    assert run_processes(places, 4, deadline=100.0, data=2) == [
        [["a", "b"], 2, 0, True, ["main"], told],
        [["a", "b"], 2, 0, False, [], told],
        [["c", "c"], 2, 1, False, ["replica"], told],
        [["c", "c"], 2, 1, False, ["last"], told],
    ]
