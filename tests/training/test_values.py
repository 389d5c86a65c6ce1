"""Throughput, times, memory and the bubble, against values worked out by hand; the lines that show them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipeflow import GPT, UsageError, execute_pipeline, make_schedule, simulate
from pipeflow.core.cost import CostModel
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.step import Output
from pipeflow.planning.physical import layer_forward
from pipeflow.planning.setup import Setup
from pipeflow.testing import run_threads
from pipeflow.testing.models import PlainModel
from pipeflow.training import (
    BubbleHook,
    DistributedLogger,
    Engine,
    Hook,
    LogHook,
    MemoryHook,
    RateHook,
    Step,
    ThroughputHook,
    TimingHook,
    Trainer,
    timer,
)
from pipeflow.training.hooks import measuring
from pipeflow.training.hooks.measuring import peak_of, planned
from tests.runtime.work import build

MODEL = PlainModel()


def make_engine(**options: Any) -> Engine:
    pipeline = build(MODEL, make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=2))
    return Engine(pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.1), **options)


def part(samples: int = 8) -> list[Any]:
    """Three batches of so many samples, of each this replica's part."""
    context = current_context()
    batches = [MODEL.batch(samples, seed=seed) for seed in range(3)]
    return [
        (
            inputs.tensor_split(context.data_size)[context.data_rank],
            labels.tensor_split(context.data_size)[context.data_rank],
        )
        for inputs, labels in batches
    ]


class Seen(Hook):
    """Keeps the metrics of every step and epoch."""

    priority = 99

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.epochs: list[dict[str, float]] = []

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.steps.append(dict(trainer.step_metrics))

    def after_epoch(self, trainer: Trainer) -> None:
        self.epochs.append({**trainer.metrics["train"], **trainer.metrics["test"]})


def ticking(*seconds: float) -> Iterator[float]:
    """A clock under which each step takes so many seconds, with 100 between them."""
    now = 0.0
    for each in seconds:
        yield now
        yield now + each
        now += each + 100


def throughput() -> Seen:
    seen, clock = Seen(), ticking(9, 2, 4, 1, 1, 2)
    hook = ThroughputHook(tokens_per_sample=3, flops_per_sample=1e12, peak=2e12, window=2, clock=lambda: next(clock))
    Trainer(make_engine(), [hook, seen]).fit(part(), 2)
    return seen


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {}), (4, {"data": 2}), (4, {"tensor": 2})])
def test_throughput_is_that_of_the_whole_job(world: int, layout: dict[str, Any]) -> None:
    for seen in run_threads(throughput, world, **layout):
        assert "samples/s" not in seen.steps[0]  # it is ignored
        speeds = [8 / 2, 16 / 6, 16 / 5, 16 / 2, 16 / 3]  # of 8 samples a step, the last two steps each
        assert [step["samples/s"] for step in seen.steps[1:]] == pytest.approx(speeds)
        assert [step["tokens/s"] for step in seen.steps[1:]] == pytest.approx([3 * speed for speed in speeds])
        assert [step["TFLOP/s"] for step in seen.steps[1:]] == pytest.approx(speeds)
        assert [step["MFU"] for step in seen.steps[1:]] == pytest.approx([speed / 2 / world for speed in speeds])
        assert [epoch["samples/s"] for epoch in seen.epochs] == pytest.approx([16 / 6, 24 / 4])


def accumulated() -> list[dict[str, float]]:
    seen, clock = Seen(), ticking(2)
    hook = ThroughputHook(ignored_steps=0, clock=lambda: next(clock))
    Trainer(make_engine(gradient_accumulation=3), [hook, seen]).fit(part(), 1)
    return seen.steps


def test_throughput_counts_what_is_accumulated() -> None:
    for [step] in run_threads(accumulated, 2):
        assert step["samples/s"] == 12
        assert set(step) == {"loss", "samples/s"}  # no tokens, no operations: nobody said them


@pytest.mark.parametrize("ratio", [2, 4])
def test_operations_of_a_gpt_are_those_of_its_plan(ratio: int) -> None:
    model = GPT(layers=6, hidden=32, heads=4, positions=64, vocabulary=100, mlp_ratio=ratio)
    for sequence in (None, 16):
        setup, tokens = Setup(sequence=sequence), sequence or 64
        forward = 6 * layer_forward(model, setup) + model.head_flops
        assert model.flops_per_sample(sequence) == 3 * tokens * forward


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, False, 312e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5e12),
        ("NVIDIA A100-SXM4-80GB", torch.float64, False, None),
        ("NVIDIA H100 80GB HBM3", torch.float16, False, 989e12),
        ("NVIDIA H100 PCIe", torch.float16, False, 756e12),
        ("Tesla V100-PCIE-16GB", torch.float16, False, 112e12),
        ("Tesla V100-SXM2-16GB", torch.bfloat16, False, None),
        ("NVIDIA A10G", torch.bfloat16, False, None),
        ("Tesla V100-SXM2-32GB", torch.float32, True, 15.7e12),
        ("Tesla T4", torch.float16, False, 65e12),
        ("NVIDIA A100-PCIE-40GB", torch.bfloat16, False, 312e12),
        ("NVIDIA H100 NVL", torch.bfloat16, False, 835e12),
        ("NVIDIA H200", torch.float32, True, 494e12),
        ("NVIDIA L40S", torch.float32, False, 91.6e12),
        ("AMD Instinct MI250X", torch.bfloat16, False, 191.5e12),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, False, 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, False, None),
        ("Somebody's GPU", torch.bfloat16, False, None),
    ],
)
def test_peaks_go_by_the_name_of_the_device(name: str, dtype: torch.dtype, tf32: bool, peak: float | None) -> None:
    assert peak_of(name, dtype, tf32=tf32) == peak


def timed() -> list[dict[str, float]]:
    seen, clock = Seen(), iter([0.0, 12.0, 20.0, 25.0, 100.0, 103.0, 200.0, 201.0])
    vars(timer)["perf_counter"] = lambda: next(clock)
    Trainer(make_engine(), [TimingHook(), seen]).fit(part(), 2, test_loader=part())
    return seen.epochs


def test_times_by_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeflow.training.timer.perf_counter", None)  # set by the only rank, and put back
    [[first, second]] = run_threads(timed, 1)
    names = ("epoch seconds", "step seconds", "evaluation seconds")
    assert [first[name] for name in names] == [12, 4, 5]
    assert [second[name] for name in names] == [3, 1, 1]


def remembered() -> tuple[Seen, list[float]]:
    seen, hook = Seen(), MemoryHook(every=2)
    Trainer(make_engine(), [hook, seen]).fit(part(), 1)
    return seen, hook.by_rank


def test_memory_is_the_most_of_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "memory_of", lambda _: (1 + current_context().rank) % 4 * 2**29)
    for seen, by_rank in run_threads(remembered, 4, data=2):
        assert by_rank == [0.5, 1.0, 1.5, 0.0]
        assert [step.get("memory GiB") for step in seen.steps] == [None, 1.5, 1.5]
        assert seen.epochs[0]["memory GiB"] == 1.5


def test_the_memory_of_this_process() -> None:
    before = measuring.memory_of(torch.device("cpu"))
    held = torch.ones(2**26, dtype=torch.uint8)
    assert 2**25 < measuring.memory_of(torch.device("cpu")) - before < 2**28
    assert len(held) == 2**26


def bubbles() -> tuple[list[bool], list[dict[str, float]], list[float]]:
    traced: list[bool] = []
    measured: list[float] = []

    class Traced(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            traced.append(step.timeline is not None)
            if step.timeline is not None:
                measured.append(step.timeline.makespan_bubble_ratio)

    seen = Seen()
    Trainer(make_engine(), [BubbleHook(every=2), Traced(), seen]).fit(part(), 2)
    return traced, seen.steps, measured


@pytest.mark.parametrize(("ranks", "data"), [(2, 1), (4, 2)])
def test_the_bubble_is_that_of_the_measured_step(ranks: int, data: int) -> None:
    told = run_threads(bubbles, ranks, data=data)
    for traced, steps, measured in told:
        assert traced == [False, True] * 3
        assert "bubble" not in steps[0]
        assert [step["bubble"] for step in steps[1::2]] == measured
        assert all(0 <= step["planned bubble"] < 1 for step in steps[1:])
    replicas = [told[: ranks // data], told[ranks // data :]][:data]
    assert all(steps == replica[0][1] for replica in replicas for _, steps, _ in replica)


def test_a_step_as_planned_has_the_planned_bubble() -> None:
    schedule = make_schedule("zb-h1", ranks=4, microbatches=8)
    timeline = simulate(schedule, CostModel.even(schedule.placement, forward=1))
    assert planned(timeline).makespan_bubble_ratio == pytest.approx(timeline.makespan_bubble_ratio)


class Said(DistributedLogger):
    """Keeps what rank 0 says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, message: str, *, ranks: Any = None) -> None:
        assert ranks == [0]
        self.lines.append(message)


class Fixed(Hook):
    """Sets the losses."""

    priority = 1

    def after_step(self, trainer: Trainer, step: Step) -> None:
        trainer.step_metrics["loss"] = trainer.engine.steps / 7

    def after_training(self, trainer: Trainer) -> None:
        trainer.metrics["train"]["loss"] = 1234.5

    def after_batch(self, trainer: Trainer, output: Output, labels: object) -> None:
        assert output.samples == 8

    def after_evaluation(self, trainer: Trainer) -> None:
        trainer.metrics["test"] |= {"loss": 0.25, "accuracy": 0.98765}


def logged() -> list[str]:
    said = Said()
    trainer = Trainer(make_engine(), [Fixed(), RateHook(), LogHook(2, logger=said)])
    trainer.fit(part(), 2, test_loader=part(), test_interval=2)
    trainer.evaluate(part())
    return said.lines


def test_logs_by_step_and_by_epoch() -> None:
    for lines in run_threads(logged, 2):
        assert lines == [
            "[Epoch 1 / Train, step 2 / 3]: loss = 0.2857, learning rate = 0.1",
            "[Epoch 1 / Train]: loss = 1,234, learning rate = 0.1",
            "[Epoch 2 / Train, step 2 / 3]: loss = 0.7143, learning rate = 0.1",
            "[Epoch 2 / Train]: loss = 1,234, learning rate = 0.1",
            "[Epoch 2 / Test]: loss = 0.25, accuracy = 0.9877",
            "[Epoch 2 / Test]: loss = 0.25, accuracy = 0.9877",
        ]


def test_logs_of_steps_alone() -> None:
    def alone() -> list[str]:
        said = Said()
        Trainer(make_engine(), [Fixed(), LogHook(3, by_epoch=False, logger=said)]).fit(part(), 1)
        return said.lines

    assert run_threads(alone, 1) == [["[Epoch 1 / Train, step 3 / 3]: loss = 0.4286"]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ThroughputHook(tokens_per_sample=-1), "tokens_per_sample must be positive"),
        (lambda: ThroughputHook(flops_per_sample=float("nan")), "flops_per_sample must be positive"),
        (lambda: ThroughputHook(peak=0.0), "peak must be positive"),
        (lambda: ThroughputHook(window=0), "window must be an integer of at least 1"),
        (lambda: MemoryHook(every=0), "every must be an integer of at least 1"),
        (lambda: BubbleHook(every=0), "every must be an integer of at least 1"),
        (lambda: LogHook(-1), "every must be positive"),
    ],
    ids=["tokens", "flops", "peak", "window", "memory", "bubble", "log"],
)
def test_numbers_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_autocast_says_the_precision() -> None:
    def dtype() -> torch.dtype | None:
        pipeline = build(MODEL, make_schedule("gpipe", ranks=1, microbatches=2), autocast=torch.bfloat16)
        execute_pipeline(iter([MODEL.batch(4)]), pipeline)
        return pipeline.autocast

    assert run_threads(dtype, 1) == [torch.bfloat16]
