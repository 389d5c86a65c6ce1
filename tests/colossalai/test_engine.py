"""`initialize` and its engine: pipeflow's, called as in the tutorials."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pipeflow import PipelineError, UsageError, execute_pipeline, get_dataloader, make_schedule
from pipeflow.colossalai import initialize
from pipeflow.colossalai.engine import Engine
from pipeflow.colossalai.engine.schedule import InterleavedPipelineSchedule, NonPipelineSchedule, PipelineSchedule
from pipeflow.colossalai.engines import Called
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from tests.colossalai.work import MODEL, initialized, samples


def nothing_given() -> None:
    engine, *others = initialized({})
    assert isinstance(engine, Engine)
    assert others == [None, None, None]


def test_none_stays_none() -> None:
    run_threads(nothing_given, 1)


def given_back() -> None:
    train, test = get_dataloader(samples(10), 4), get_dataloader(samples(6), 4)
    _, there, here, rates = initialized({}, train, test_dataloader=test, rates=schedule)
    assert here is test
    assert [len(there), there.dataset, there.batch_size] == [3, train.dataset, 4]
    assert type(rates) is torch.optim.lr_scheduler.StepLR


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def test_the_rest_comes_back() -> None:
    run_threads(given_back, 1)


def described(result: tuple[Any, Any, Any]) -> tuple[bool, bool, bool]:
    output, label, loss = result
    return output is not None, label is not None, loss is not None


def executed() -> list[Any]:
    engine, *_ = initialized({})
    batch = MODEL.batch(4)
    found = []
    for forward_only, return_loss, keeps in [(False, True, True), (False, True, False), (True, True, True)]:
        result = engine.execute_schedule(iter([batch]), forward_only, return_loss, keeps)
        found.append(described(result))
        if not forward_only:
            engine.step()
    output, label, loss = engine.execute_schedule(iter([(batch[0], None)]), forward_only=True, return_loss=False)
    found.append(described((output, label, loss)))
    output, label, loss = engine.execute_schedule(iter([batch]), forward_only=True)
    if output is not None:
        assert label is batch[1]
        torch.testing.assert_close(loss, MODEL.criterion(output, label))
    with pytest.raises(UsageError, match="return_loss=False needs forward_only=True"):
        engine.execute_schedule(iter([batch]), return_loss=False)
    return found


def test_a_schedule_gives_three_on_the_last_stage_and_none_elsewhere() -> None:
    first, last = run_threads(executed, 2)
    assert first == [(False, False, False)] * 4
    assert last == [(True, True, True), (False, False, True), (True, True, True), (True, False, False)]


def trained(config: dict[str, Any], by_hand: bool) -> list[Tensor]:
    """The weights of the whole model in one rank after three epochs of a loop as in the tutorials."""
    loader = get_dataloader(samples(10), 2, shuffle=True)
    engine, loader, _, rates = initialized(config, loader, rates=schedule)
    engine.train()
    for _ in range(3):
        batches = iter(loader)
        for _ in range(len(loader)):
            engine.zero_grad()
            if by_hand:
                inputs, labels = next(batches)
                engine.backward(engine.criterion(engine(inputs), labels))
            else:
                engine.execute_schedule(batches, return_output_label=False)
            engine.step()
            rates.step()
    return [parameter.detach() for parameter in engine.model.parameters()]


def trained_in_one_piece(accumulation: int, clip: float) -> list[Tensor]:
    module = MODEL.stage(0, MODEL.layers)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rates = schedule(optimizer)
    loader = get_dataloader(samples(10), 2, shuffle=True)
    for _ in range(3):
        batches = list(loader)
        for first in range(0, len(batches) - accumulation + 1, accumulation):
            inputs, labels = zip(*batches[first : first + accumulation], strict=True)
            optimizer.zero_grad()
            MODEL.criterion(module(torch.cat(inputs)), torch.cat(labels)).backward()
            if clip:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            rates.step()
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("by_hand", [False, True], ids=["execute_schedule", "backward"])
@pytest.mark.parametrize(("accumulation", "clip"), [(1, 0.0), (2, 0.01)])
def test_a_loop_trains_as_torch_does(accumulation: int, clip: float, by_hand: bool) -> None:
    config = {"gradient_accumulation": accumulation, "clip_grad_norm": clip}
    [weights] = run_threads(trained, 1, config, by_hand)
    [expected] = run_threads(trained_in_one_piece, 1, accumulation, clip)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


def one_iterator() -> tuple[int, list[list[float]]]:
    """Its batches, through an engine that takes three epochs from one iterator."""
    seen: list[float] = []

    def criterion(output: Tensor, labels: Tensor) -> Tensor:
        seen.extend(labels[:, 0, 0].tolist())
        return MODEL.criterion(output, labels)

    loader = get_dataloader(samples(6), 2, shuffle=True)
    engine, loader, *_ = initialized({}, loader, criterion=criterion)
    batches = iter(loader)
    for _ in range(3 * len(loader)):
        engine.zero_grad()
        engine.execute_schedule(batches)
        engine.step()
    assert len(list(loader)) == 3
    return loader.epoch, [seen[first : first + 6] for first in (0, 6, 12)]


def test_an_iterator_goes_on_with_the_next_epoch() -> None:
    [(epoch, epochs)] = run_threads(one_iterator, 1)
    assert epoch == 4
    assert epochs[0] != epochs[1] != epochs[2]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])


def test_criteria_are_called_as_there() -> None:
    def pair(first: str, second: str, *labels: str, lam: float = 0.0, b: str = "") -> Any:
        return first, second, labels, lam, b

    assert Called(pair)(["x", "y"], "a") == ("x", "y", ("a",), 0.0, "")
    assert Called(pair)(("x", "y"), ["a", "b"]) == ("x", "y", ("a", "b"), 0.0, "")
    assert Called(pair)(("x", "y"), {"lam": 0.5, "b": "c"}) == ("x", "y", (), 0.5, "c")
    assert Called(pair)(("x", "y"), {"lam": 0.5, "other": "c"}) == ("x", "y", ({"lam": 0.5, "other": "c"},), 0.0, "")
    weight = nn.BCEWithLogitsLoss(weight=torch.ones(1))
    assert list(Called(weight).buffers()) == [weight.weight]


def schedules() -> list[Any]:
    with pytest.raises(
        UsageError, match="does not support tensor_shape here: write TENSOR_SHAPE into the configuration"
    ):
        PipelineSchedule(4, tensor_shape=(1, 2))
    with pytest.raises(UsageError, match="no option 'shape'"):
        InterleavedPipelineSchedule(4, 2, shape=1)
    one = PipelineSchedule(4, tensor_shape=None, scatter_gather_tensors=False)
    return [one, InterleavedPipelineSchedule(4, 2), NonPipelineSchedule()]


def test_schedules_are_ours() -> None:
    for one, two, three in run_threads(schedules, 2):
        assert one == make_schedule("1f1b", ranks=2, microbatches=4)
        assert two == make_schedule("interleaved-1f1b", ranks=2, microbatches=4, chunks=2)
        assert three == make_schedule("1f1b", ranks=1, microbatches=1)


def a_schedule_of_ones_own() -> str:
    own = make_schedule("gpipe", ranks=2, microbatches=4)
    engine, *_ = initialized({}, schedule=own)
    assert engine.schedule is own
    assert execute_pipeline(iter([MODEL.batch(4)]), engine.model) is not None
    with pytest.raises(UsageError) as raised:
        engine(MODEL.batch(4)[0])
    return str(raised.value)


def test_an_engine_of_a_part_of_the_model() -> None:
    assert all("engine.execute_schedule" in message for message in run_threads(a_schedule_of_ones_own, 2))


def refused() -> None:
    loader = get_dataloader(samples(4), 2)
    with pytest.raises(UsageError, match="has 2 batches, but a step takes 3"):
        initialized({"gradient_accumulation": 3}, loader)
    with pytest.raises(UsageError, match="train_dataloader is a DataLoader: use get_dataloader"):
        initialized({"dali": {"mixup_alpha": 0.2}}, DataLoader(samples(4), 2))
    engine, *_ = initialized({})
    with pytest.raises((UsageError, PipelineError), match="no batch left"):
        engine.execute_schedule(iter([]))
    with pytest.raises((UsageError, PipelineError), match="data_iter must be an iterator"):
        engine.execute_schedule(loader)
    module = MODEL.stage(0, 4)
    engine, *_ = initialize(module, torch.optim.SGD(module.parameters(), lr=0.1), verbose=False)
    with pytest.raises(UsageError, match="no criterion"):
        _ = engine.criterion
    assert current_context().world_size == 1


def test_what_cannot_work_is_refused() -> None:
    run_threads(refused, 1)
