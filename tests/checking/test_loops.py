"""Faults of loops: scaled losses, clipping that hides a factor, samples left out, optimizers that begin anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import Tensor, nn

from pipeflow.checking import check, record
from pipeflow.testing import run_processes
from tests.checking.jobs import GPT, WIDTH, WORDS, batches

STEPS = 2


def loop(folder: Path, *, clip: float = 0.0, scaled: bool = False, fault: str = "") -> Path:
    """A recorded job of four microbatches, with torch's GradScaler if `scaled`."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", 1024.0, enabled=scaled)
    words, labels = batches(STEPS)
    with record(folder, model):
        for step in range(STEPS):
            if fault == "anew" and step:
                optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            optimizer.zero_grad()
            count = (labels[step] != -100).sum() * (0.25 if fault == "factor" else 1)
            pairs = [*zip(words[step].chunk(4), labels[step].chunk(4), strict=True)]
            pairs += [(words[step][:2].flip(1), labels[step][:2])] if fault == "more" else []
            for given, wanted in pairs[:-1] if fault == "left out" else pairs:
                loss = F.cross_entropy(model(given).flatten(0, 1), wanted.flatten(), reduction="sum") / count
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
    return folder


def test_a_scaled_loss_is_the_loss(tmp_path: Path) -> None:
    result = check(loop(tmp_path / "plain"), loop(tmp_path / "scaled", scaled=True))
    assert result.alike, result
    assert result.compared["losses"] == STEPS
    assert not result.notes


@pytest.mark.parametrize(
    ("fault", "step", "what", "cause", "said"),
    [
        ("left out", 0, "batch", "missing_microbatch", "some of these are not read"),
        (
            "anew",
            1,
            "optimizer",
            "optimizer",
            "the number of steps before of embed.weight is 0 on rank 0, and 1 in the reference",
        ),
    ],
)
def test_faults_of_loops(tmp_path: Path, fault: str, step: int, what: str, cause: str, said: str) -> None:
    result = check(loop(tmp_path / "plain"), loop(tmp_path / "wrong", fault=fault))
    assert result.first is not None
    assert result.cause is not None
    assert (result.first.step, result.first.what, result.cause.name) == (step, what, cause), result
    assert said in result.cause.evidence


def by_hand(folder: Path, *, smoothing: float = 0.0, clip: float = 0.0, kind: str = "") -> Path:
    """A recorded job with a cross entropy and a clipping of its own. It clips the gradient of each of two microbatches
    before they are added up if `kind` is "early", and leaves out the embedding if it is "part".
    """
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    words, labels = batches(STEPS)

    def clipped(gradients: list[Tensor]) -> None:
        size = torch.stack([each.norm() for each in gradients]).norm()
        for each in gradients if clip and size > clip else []:
            each.mul_(clip / size)

    with record(folder, model):
        for step in range(STEPS):
            optimizer.zero_grad()
            for given, wanted in zip(words[step].chunk(2), labels[step].clamp(min=0).chunk(2), strict=True):
                chances = torch.log_softmax(model(given), -1)
                right = chances.gather(-1, wanted[..., None]).mean()
                before = [each.grad for each in model.parameters()]
                for each in model.parameters() if kind == "early" else ():
                    each.grad = None
                (-((1 - smoothing) * right + smoothing * chances.mean()) / 2).backward()
                if kind == "early":
                    clipped([each.grad for each in model.parameters() if each.grad is not None])
                    for each, old in zip(model.parameters(), before, strict=True):
                        if old is not None and each.grad is not None:
                            each.grad += old
            if kind != "early":
                clipped([each.grad for each in [*model.parameters()][kind == "part" :] if each.grad is not None])
            optimizer.step()
    return folder


@pytest.mark.parametrize(
    ("reference", "candidate", "cause", "said"),
    [
        ({}, {"smoothing": 0.1}, "formula", "the loss has another formula"),
        ({"smoothing": 0.2}, {"smoothing": 0.1}, "formula", "the loss has another formula"),
        ({}, {"clip": 0.05}, "norm", "; their norm is 0.05 in each step of the candidate"),
        (
            {"clip": 0.05},
            {"clip": 0.1},
            "norm",
            "0.05 in each step of the reference and 0.1 in each step of the candidate",
        ),
        ({"clip": 0.05}, {"clip": 0.05, "kind": "early"}, "norm", "samples count differently in the gradients"),
        ({"clip": 0.05}, {"clip": 0.05, "kind": "part"}, "norm", "; their norm is 0.05 in each step of the reference"),
    ],
)
def test_losses_and_clipping_by_hand(
    reference: dict[str, Any], candidate: dict[str, Any], cause: str, said: str, tmp_path: Path
) -> None:
    result = check(by_hand(tmp_path / "plain", **reference), by_hand(tmp_path / "wrong", **candidate))
    assert result.cause is not None
    assert result.cause.name == cause, result
    assert said in result.cause.evidence


def test_samples_that_the_reference_has_not_are_another_batch(tmp_path: Path) -> None:
    first = check(loop(tmp_path / "plain"), loop(tmp_path / "more", fault="more")).first
    assert first is not None
    assert (first.step, first.what) == (0, "batch")


def test_a_factor_that_clipping_hides(tmp_path: Path) -> None:
    """The reference has four times the gradients, and clips them; the norm of the other is too small for it."""
    wrong = loop(tmp_path / "wrong", clip=1e-6, fault="factor")
    norm = _norm_of(wrong)
    wrong = loop(tmp_path / "wrong", clip=norm * 0.75, fault="factor")
    result = check(wrong, loop(tmp_path / "right"))
    assert result.cause is not None
    assert result.cause.name == "scale", result
    assert result.cause.factor == pytest.approx(0.25, rel=1e-3)
    assert "before its clipping" in result.cause.evidence


def _norm_of(folder: Path) -> float:
    """The norm of all gradients in the first step, before clipping."""
    from pipeflow.checking.runs import load

    return next(float(event["value"]) for _, event in load(folder).events(0, "norm"))


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.embed(words)
        return found


class Second(nn.Module):
    """Takes positions beside what the first one returns."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        found: Tensor = self.head(hidden + self.places(positions))
        return found


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = First(), Second()

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(words), torch.arange(words.shape[1]).expand(words.shape))
        return found


def in_two_stages(folder: Path, factor: float) -> None:
    """A pipeline by hand. The loss of the last stage is multiplied by a factor."""
    whole, rank, words = Both(), dist.get_rank(), batches(1)[0][0]
    stage = nn.ModuleDict({"second": whole.second} if rank else {"first": whole.first})
    optimizer = torch.optim.SGD(stage.parameters(), 0.1)
    with record(folder, stage):
        if rank == 0:
            hidden = stage["first"](words)
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            hidden = torch.empty(*words.shape, WIDTH)
            dist.recv(hidden, 0)
            logits = stage["second"](hidden.requires_grad_(), torch.arange(words.shape[1]).expand(words.shape))
            (logits.square().mean() * factor).backward()
            assert hidden.grad is not None
            dist.send(hidden.grad, 0)
        optimizer.step()


@pytest.mark.slow
def test_positions_that_the_plain_model_makes_itself_are_no_batch(tmp_path: Path) -> None:
    model, words = Both(), batches(1)[0][0]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with record(tmp_path / "plain", model):
        model(words).square().mean().backward()
        optimizer.step()
    for factor in (1.0, 2.0):
        run_processes(in_two_stages, 2, tmp_path / f"stages-{factor}", factor)
        found = check(tmp_path / "plain", tmp_path / f"stages-{factor}")
        assert found.alike == (factor == 1.0)
        if found.first is not None:
            assert found.first.what in ("loss", "gradient")
