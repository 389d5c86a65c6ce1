"""Plain loops: what differs by rounding is alike, and each fault is found, with its place and its cause."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pipeflow.checking import CAUSES, check, plant, record
from pipeflow.checking.findings import paragraph
from pipeflow.core.errors import UsageError
from tests.checking.jobs import GPT, Block, train


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_microbatches_are_alike(plain: Path, tmp_path: Path, microbatches: int) -> None:
    result = check(plain, train(tmp_path, microbatches=microbatches))
    assert result.alike, result
    assert {"batches", "weights", "outputs", "losses", "gradients", "updates"} <= set(result.compared)
    assert result.to_json()["alike"] is True


def test_bfloat16_and_ties_are_alike(tmp_path: Path) -> None:
    one = train(tmp_path / "one", dtype=torch.bfloat16, tied=True)
    assert check(one, train(tmp_path / "four", dtype=torch.bfloat16, tied=True, microbatches=4)).alike


FAULTS: list[tuple[str, dict[str, Any], str, str, str]] = [
    # what is planted, what is found first, in which module, and why
    ("scale", {"factor": 4.0}, "gradient", "head", "scale"),
    ("scale", {"name": "blocks.1.up", "factor": 0.5}, "gradient", "blocks.1.up", "scale"),
    ("missing_microbatch", {"microbatch": 2}, "gradient", "head", "missing_microbatch"),
    ("masked_tokens", {"factor": 1.5}, "gradient", "head", "masked_tokens"),
    ("norm", {"name": "", "factor": 1.3}, "gradient", "head", "scale"),
    ("dropout", {"name": "blocks.0.down"}, "output", "blocks.0.down", "dropout"),
    ("precision", {"name": "blocks.1.up"}, "output", "blocks.1.up", "precision"),
    ("sharding", {"name": "blocks.1.up.weight"}, "weight", "blocks.1.up", "sharding"),
]


@pytest.mark.parametrize(("fault", "options", "what", "module", "cause"), FAULTS)
def test_faults_are_found(
    plain: Path, tmp_path: Path, fault: str, options: dict[str, Any], what: str, module: str, cause: str
) -> None:
    result = check(plain, train(tmp_path, microbatches=4, fault=(fault, options)))
    assert result.first is not None
    assert result.cause is not None
    assert (result.first.step, result.first.what, result.first.module) == (0, what, module), result
    assert result.cause.name == cause, result.cause
    assert result.cause.name in CAUSES


def test_a_factor_is_a_number(plain: Path, tmp_path: Path) -> None:
    told = check(plain, train(tmp_path, fault=("scale", {"factor": 4.0}))).to_json()
    assert told["factor"] == pytest.approx(4.0)
    assert set(told) >= {"alike", "first", "cause", "factor", "evidence"}
    assert set(told["first"]) == {"step", "what", "module", "parameter", "stage", "rank"}


def test_gradients_of_the_step_before(plain: Path, tmp_path: Path) -> None:
    result = check(plain, train(tmp_path, fault=("stale", {})))
    assert result.first is not None
    assert result.cause is not None
    assert (result.first.step, result.cause.name) == (1, "stale")
    assert "step 0" in result.cause.evidence


def test_a_norm_that_is_too_large(tmp_path: Path) -> None:
    """Clipped gradients that are too small, all by one factor."""
    one = train(tmp_path / "one", clip=0.01)
    assert check(one, train(tmp_path / "four", clip=0.01, microbatches=4)).alike
    other = train(tmp_path / "other", clip=0.01, fault=("norm", {"factor": 1.4}))
    result = check(one, other)
    assert result.cause is not None
    assert result.cause.name == "norm"


def test_another_order_of_samples_is_another_batch(plain: Path, tmp_path: Path) -> None:
    """The rows are the same, so outputs are alike; the labels belong to others."""
    result = check(plain, train(tmp_path, fault=("order", {})))
    assert result.first is not None
    assert result.first.what == "loss"


def test_forwards_that_are_left_early(tmp_path: Path) -> None:
    """As stages of a cut module leave it after their last call."""

    class Left(BaseException):
        pass

    def leave(*_: object) -> None:
        raise Left

    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with record(tmp_path, model) as recording:
        for step in range(3):
            handle = model.head.register_forward_pre_hook(leave)
            with pytest.raises(Left):
                model(torch.zeros(2, 4, dtype=torch.long))
            handle.remove()
            model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
            optimizer.step()
            assert recording.done == step + 1
            assert recording.step == step


class Silent:
    """An optimizer that does not say its rates."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self) -> None:
        self.inner.step()


def updates_of(folder: Path, rate: float, decay: float = 0.0, silent: bool = True) -> Path:
    """A layer whose weight is zero as it begins, and one step of it."""
    torch.manual_seed(0)
    second = torch.nn.Linear(8, 4)
    torch.nn.init.zeros_(second.weight)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), second)
    optimizer: Any = torch.optim.AdamW(model.parameters(), rate, weight_decay=decay)
    optimizer = Silent(optimizer) if silent else optimizer
    with record(folder, model, optimizer):
        (model(torch.arange(12.0).view(2, 6)) - 1.0).square().sum().backward()
        optimizer.step()
    return folder


def test_steps_that_follow_another_rule(tmp_path: Path) -> None:
    still = updates_of(tmp_path / "still", 0.0)
    assert check(still, updates_of(tmp_path / "still-too", 0.0)).alike
    one = updates_of(tmp_path / "one", 1e-3)
    for folder, rate, decay, evidence in (
        ("fast", 1.2e-3, 0.0, "by 1.2 times as much"),
        ("decayed", 1e-3, 0.2, "0.0002 times the weight itself"),
        ("stopped", 0.0, 0.0, "the step does not change"),
    ):
        result = check(one, updates_of(tmp_path / folder, rate, decay))
        assert result.first is not None
        assert result.cause is not None
        assert (result.first.what, result.cause.name) == ("update", "stale" if folder == "stopped" else "optimizer")
        assert evidence in result.cause.evidence


@pytest.mark.parametrize(
    ("rate", "decay", "evidence"),
    [
        (1.2e-3, 0.0, r"the learning rate of \S+ is 0.0012 on rank 0, and 0.001 in the reference"),
        (1e-3, 0.2, r"the weight decay of \S+ is 0.2 on rank 0, and 0 in the reference"),
    ],
)
def test_optimizers_say_their_rules(tmp_path: Path, rate: float, decay: float, evidence: str) -> None:
    one = updates_of(tmp_path / "one", 1e-3, silent=False)
    result = check(one, updates_of(tmp_path / "other", rate, decay, silent=False))
    assert result.cause is not None
    assert result.cause.name == "optimizer"
    assert re.search(evidence, result.cause.evidence), result.cause


def test_which_elements_are_wrong(tmp_path: Path) -> None:
    whole = "blocks.1.*.weight"
    one = train(tmp_path / "one", whole=whole)
    moved = check(one, train(tmp_path / "two", whole=whole, fault=("sharding", {"name": "blocks.1.up.weight"})))
    assert moved.cause is not None
    assert moved.cause.evidence.endswith("rows 0 to 63 have the values of rows 32, 33, 34, 35, 36, 37, 38, 39 ...")
    with register_optimizer_step_pre_hook(lambda optimizer, *_: spoil(optimizer)):
        wrong = check(one, train(tmp_path / "three", whole=whole))
    assert wrong.first is not None
    assert wrong.first.parameter == "blocks.1.down.weight"
    assert wrong.cause is not None
    assert wrong.cause.evidence.endswith("12 of 1024 elements are wrong: rows 3 to 5 of 16 and columns 8 to 11 of 64")
    other = check(one, train(tmp_path / "four", fault=("sharding", {"name": "blocks.1.up.weight"})))
    assert "record both runs with whole='blocks.1.up.weight' to see which elements of it are wrong" in other.notes


def test_where_an_output_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, forward = train(tmp_path / "one", steps=1, whole="blocks.*"), Block.forward

    def spoiled(self: Block, values: Tensor) -> Tensor:
        output = forward(self, values).clone()
        output[2:4, 1:3, 8:12] += 1.0
        return output

    monkeypatch.setattr(Block, "forward", spoiled)
    wrong = check(one, train(tmp_path / "two", steps=1, microbatches=2, whole="blocks.*"))
    assert wrong.first is not None
    assert wrong.first.module == "blocks.0"
    assert wrong.cause is not None
    told = "4 of 8 rows of the output are wrong, in positions 1, 2 of 10 and columns 8 to 11 of 16"
    assert wrong.cause.evidence.endswith(told), wrong.cause
    plain = train(tmp_path / "three", steps=1)
    assert "record both runs with whole='blocks.0' to see where its output is wrong" in check(one, plain).notes
    assert all('"values"' not in file.read_text(encoding="utf-8") for file in plain.iterdir())


def spoil(optimizer: torch.optim.Optimizer) -> None:
    """Changes twelve elements of the gradient of blocks.1.down.weight."""
    gradient = next(each.grad for each in optimizer.param_groups[0]["params"][6:] if each.shape == (16, 64))
    gradient[3:6, 8:12] += gradient.abs().max() * torch.arange(1.0, 13.0).view(3, 4)


def test_two_uses_of_one_weight(tmp_path: Path) -> None:
    one = train(tmp_path / "one", tied=True)
    result = check(one, train(tmp_path / "two", tied=True, fault=("scale", {"name": "embed", "factor": 3.0})))
    assert result.first is not None
    assert result.first.parameter == "embed.weight"


def test_what_cannot_be_planted() -> None:
    with pytest.raises(UsageError, match="did you mean 'scale'"), plant("scales", GPT()):
        pass
    with pytest.raises(UsageError, match="the model has no 'heads'"), plant("scale", GPT(), "heads"):
        pass


def test_losses_keep_their_identity(tmp_path: Path) -> None:
    """Libraries that override torch's functions look them up in tables."""
    before = torch.nn.functional.cross_entropy
    with record(tmp_path, GPT()):
        assert torch.nn.functional.cross_entropy is before


@pytest.mark.parametrize("moved", [0.0, 0.5])
def test_weights_that_were_not_compared(tmp_path: Path, moved: float) -> None:
    """Nothing is said of a weight of which a part is missing, also if a wrong update moved it."""
    plain = train(tmp_path / "plain")

    def parts(name: str, tensor: Tensor) -> object:
        return (tuple(tensor.shape), [((slice(0, 8),), (0, 0))]) if name == "embed.weight" else None

    def move(optimizer: torch.optim.Optimizer, *_: object) -> None:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].add_(moved)  # that of embed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.checking.jobs.record", partial(record, parts=parts))
        hook = register_optimizer_step_post_hook(move)
        train(tmp_path / "lacking")
        hook.remove()
    result = check(plain, tmp_path / "lacking")
    said = paragraph(result)
    assert result.to_json()["left_out"] == 1
    if moved:
        assert "from step 1 on, and the cause is unknown. The output of embed" in said
        assert "the right weights" not in said
    else:
        assert said.startswith("The runs are alike in what was compared: 2 batches, 15 of 16 weights, ")
