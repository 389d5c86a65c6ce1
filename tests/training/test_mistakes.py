"""What a beginner writes into a loop or gives to a Trainer by mistake: each error says what to write instead.
`tests/cli/test_mistakes.py` has mistakes in tables and commands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeflow
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from pipeflow.training import Engine, LogHook, Trainer

BATCH = torch.randn(16, 8), torch.randn(16, 1)


class Named(nn.Module):
    """Returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = module()

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"logits": self.body(inputs)}


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def schedule(**sizes: int) -> pipeflow.Schedule:
    return pipeflow.make_schedule("1f1b", **{"ranks": current_context().pipeline_size, "microbatches": 4, **sizes})


def made(whole: Any = None, criterion: Any = None, example: Any = BATCH, order: Any = None) -> pipeflow.Pipeline:
    criterion = nn.MSELoss() if criterion is None else criterion
    whole = module() if whole is None else whole
    return pipeflow.Pipeline.from_module(whole, order or schedule(), example=example, criterion=criterion)


def step(batch: Any = BATCH, **options: Any) -> pipeflow.Output:
    return pipeflow.execute_pipeline(iter([batch]), made(**options), broadcast_loss=True)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def engine() -> Engine:
    model = made()
    return Engine(model, optimizer(model))


def twice() -> None:
    batches, model = iter([BATCH]), made()
    for _ in range(2):
        pipeflow.execute_pipeline(batches, model)


def without_gradients() -> None:
    model = made()
    with torch.no_grad():
        pipeflow.execute_pipeline(iter([BATCH]), model)


def of_the_whole_module() -> None:
    whole = module()
    Engine(made(whole), optimizer(whole))


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "the batch itself": (lambda: pipeflow.execute_pipeline(BATCH, made()), "pass iter([batch])"),  # type: ignore[arg-type]
    "a loader": (lambda: pipeflow.execute_pipeline([BATCH], made()), "pass iter(loader)"),  # type: ignore[arg-type]
    "an iterator that has ended": (twice, "make a new one, iter(loader), for every epoch"),
    "three in a batch": (lambda: step((*BATCH, BATCH[0])), "as in ((input1, input2), labels)"),
    "no labels": (lambda: step((BATCH[0], None)), "pass (inputs, labels)"),
    "labels of another batch": (lambda: step((BATCH[0], BATCH[1][:3])), "each needs one entry per sample"),
    "arrays": (lambda: step((BATCH[0].numpy(), BATCH[1].numpy())), "convert with torch.as_tensor"),
    "the module": (lambda: pipeflow.execute_pipeline(iter([BATCH]), module()), "as in Pipeline.from_module(module,"),  # type: ignore[arg-type]
    "a call": (lambda: made()(BATCH[0]), "run it with pipeflow.execute_pipeline"),
    "loss.backward()": (lambda: step().loss.backward(), "remove the call of loss.backward()"),  # type: ignore[union-attr]
    "output.backward()": (lambda: step().backward(), "remove the call of loss.backward()"),
    "no_grad": (without_gradients, "pass forward_only=True to evaluate"),
    "the name of a model": (lambda: made("gpt2"), "make the module that 'gpt2' names first"),
    "layers": (lambda: made([nn.Linear(8, 8), nn.Linear(8, 1)]), "pass nn.Sequential(*layers)"),
    "the name of a loss": (lambda: made(criterion="mse"), "as nn.MSELoss() is, got 'mse'"),
    "the name of a schedule": (lambda: made(order="1f1b"), "make_schedule('1f1b', ...)"),
    "a schedule for other ranks": (lambda: made(order=schedule(ranks=3)), "make it with ranks=2"),
    "no microbatch": (lambda: schedule(microbatches=0), "at least 1, got 0"),
    "an example without labels": (lambda: made(example=BATCH[0]), "without labels pass (inputs, None)"),
    "a model that returns a dict": (
        lambda: step(whole=Named()),
        "lambda output, labels: loss(output['logits']",
    ),
    "a class of losses": (lambda: step(criterion=nn.MSELoss), "make one, as in MSELoss()"),
    "a loss per sample": (lambda: step(criterion=nn.MSELoss(reduction="none")), "take the mean over its samples"),
    "the optimizer of the module": (of_the_whole_module, "make it from model.parameters()"),
    "the optimizer first": (lambda: Engine(optimizer(module()), made()), "write Engine(model, optimizer)"),  # type: ignore[arg-type]
    "a batch for an engine": (lambda: engine().train_step(BATCH), "pass iter([batch])"),  # type: ignore[arg-type]
    "no batch for an engine": (lambda: engine().step(), "run a batch first"),
    "a model for a Trainer": (lambda: Trainer(made()), "as in Engine(model, optimizer)"),  # type: ignore[arg-type]
    "a class of hooks": (lambda: Trainer(engine(), [LogHook]), "make one, as in LogHook()"),  # type: ignore[list-item]
    "an iterator for a Trainer": (lambda: Trainer(engine()).fit(iter([BATCH]), 2), "pass a loader"),
    "epochs first": (lambda: Trainer(engine()).fit(2, [BATCH]), "pass a loader"),  # type: ignore[arg-type]
}
"""Per mistake, what makes it, and what the error says."""


def said(mistake: Callable[[], Any]) -> str:
    try:
        mistake()
    except pipeflow.UsageError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_says_what_to_write(name: str) -> None:
    mistake, wanted = MISTAKES[name]
    for told in run_threads(said, 2, mistake):
        assert wanted in told


def test_an_optimizer_for_a_rank_without_weights_says_to_cut_elsewhere() -> None:
    def made_for() -> str:
        return said(lambda: optimizer(made(nn.Sequential(nn.Linear(8, 1), nn.Tanh()))))

    first, last = run_threads(made_for, 2)
    assert first == "no error"
    assert last.startswith("rank 1 has no weights")
    assert "cuts=[...]" in last
