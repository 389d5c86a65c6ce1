"""Where the host waits for its device in a step of training. Each time, the device runs dry: it has nothing to do while
the host computes what comes next.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import Pipeline, execute_pipeline, make_schedule
from pipeflow.adapters.libraries import transformers_library
from pipeflow.engine.parallel.context import current_context
from pipeflow.huggingface import Trainer as HuggingFaceTrainer
from pipeflow.optim import LossScaler, MasterWeights, Zero, clip_grad_norm_
from pipeflow.testing.models import WIDTH, WORDS, Layer, Words
from pipeflow.training import Engine, Trainer
from tests.covering import some
from tests.huggingface.trainers import make_arguments, make_data, make_pipeline
from tests.nccl.recorder import Recorder, recorded
from tests.nccl.replay import Synchronize
from tests.runtime import kinds


class Language(nn.Module):
    """A language model that computes its own loss, with one table of words at both ends."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = Words(dtype)
        self.layers = nn.ModuleList(Layer(index, dtype) for index in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.words(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        scores = self.words.score(hidden)
        return {"loss": functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "logits": scores}


def batch() -> dict[str, Tensor]:
    words = torch.randint(WORDS, (8, WIDTH + 1), generator=torch.Generator().manual_seed(0))
    return {"input_ids": words[:, :-1], "labels": words[:, 1:]}


def steps(schedule: str, kind: str, non_finite: Any) -> None:
    """Some steps, of which the log has the last one."""
    dtype = {"masters": torch.bfloat16, "scaled": torch.float16}.get(kind, torch.float32)
    model = Pipeline.from_module(Language(dtype), make_schedule(schedule, ranks=2, microbatches=4), batch())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    if kind == "masters":
        optimizer = MasterWeights(model, Zero(model, optimizer))
    if kind == "scaled":
        optimizer = MasterWeights(model, torch.optim.AdamW(model.parameters(), fused=True), scaler=LossScaler())
    engine = Engine(model, optimizer, clip_grad_norm=1.0, non_finite=non_finite)
    recorder = current_context().world
    assert isinstance(recorder, Recorder)
    for _ in range(3):
        engine.train_step(iter([batch()]))
    recorder.log.clear()
    if kind == "trainer":
        Trainer(engine).fit([batch()], epochs=1)
    else:
        engine.train_step(iter([batch()]))


def waits(schedule: str, kind: str, non_finite: str) -> Counter[str]:
    """How often a host waits in a step with two replicas, by the line, on the rank where that is most."""
    found: Counter[str] = Counter()
    for log in recorded(steps, 4, schedule, kind, non_finite, data=2):
        found |= Counter(each.why for each in log if isinstance(each, Synchronize))
    return found


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["engine", "masters", "scaled", "trainer"])
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_the_host_waits_for_its_device_only_to_see_whether_the_numbers_are_finite(schedule: str, kind: str) -> None:
    """Once, for the losses of all batches and the gradient's norm together. A Trainer knows the loss from there."""
    found, by_file = waits(schedule, kind, "stop"), Counter[str]()
    for why, times in found.items():
        by_file[re.sub(r":\d+", "", why)] += times
    assert by_file == {"training/engine.py tolist": 1}, found


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["engine", "masters"])
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_the_host_never_waits_for_its_device_where_nobody_asks_for_a_number(schedule: str, kind: str) -> None:
    assert not waits(schedule, kind, "ignore")


def scaled_steps() -> None:
    """Steps of a loop of one's own with a loss scale. The log has those after the first two."""
    model = Pipeline.from_module(Language(torch.float16), make_schedule("1f1b", ranks=2, microbatches=4), batch())
    plain = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    optimizer = MasterWeights(model, plain, scaler=LossScaler(initial_scale=256.0, growth_interval=1))
    recorder: Any = current_context().world
    for step in range(4):
        if step == 2:
            recorder.log.clear()
        optimizer.zero_grad()
        execute_pipeline(iter([batch()]), model)
        clip_grad_norm_(model, 1.0)
        optimizer.step()
    log = list(recorder.log)
    assert optimizer.scaler is not None
    assert optimizer.scaler.scale == 256.0 * 2**4
    recorder.log[:] = log


@pytest.mark.slow
def test_a_loss_scale_waits_for_nothing_where_the_optimizer_is_fused() -> None:
    for log in recorded(scaled_steps, 2):
        assert [each.why for each in log if isinstance(each, Synchronize)] == []


def steps_with_kinds(use: str) -> None:
    """Three steps, of which the log has the last one: the first two try how the loss is divided."""
    plain = make_schedule("1f1b", ranks=2, microbatches=4)
    model = Pipeline.from_module(Language(torch.float32), plain, batch())
    recorder: Any = current_context().world
    for _ in range(3):
        recorder.log.clear()
        execute_pipeline(iter([batch()]), model, schedule=kinds.with_kinds(plain, use))


@pytest.mark.parametrize("use", some(kinds.ALL, [kinds.MIXED]))
def test_recomputations_and_copies_wait_for_nothing(use: str) -> None:
    for log in recorded(steps_with_kinds, 2, use):
        assert [each.why for each in log if isinstance(each, Synchronize)] == []


def steps_of_transformers(folder: Path) -> None:
    """Some steps of transformers' Trainer, of which the log has the last one."""
    recorder: Any = current_context().world
    last: list[Any] = []

    class Steps(transformers_library().TrainerCallback):  # type: ignore[misc]  # made from a module
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            recorder.log.clear()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            last[:] = recorder.log

    options = {"max_steps": 2, "gradient_accumulation_steps": 2, "logging_steps": 100, "optim": "adamw_torch"}
    arguments = make_arguments(folder / str(recorder.rank), logging_nan_inf_filter=False, **options)
    HuggingFaceTrainer(make_pipeline("llama"), arguments, train_dataset=make_data("llama"), callbacks=[Steps()]).train()
    recorder.log[:] = last


@pytest.mark.exhaustive
def test_a_step_of_transformers_waits_only_in_its_model(tmp_path: Path) -> None:
    """The model looks whether its mask is full."""
    logs = recorded(steps_of_transformers, 4, tmp_path, data=2)
    assert {each.why for log in logs for each in log if isinstance(each, Synchronize)} == {"masking_utils.py item"}
