"""Programs that each adapter runs, with the same model and the same batches: what they train, and a loop of plain torch
that says what must come of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.losses.forms import CLASSES, IGNORED, LENGTH, Loss, mean_ce, plain_sum, sum_over_samples

SAMPLES, MICROBATCHES, STEPS, SAVED = 7, 3, 3, 2
LOSSES: dict[str, Loss] = {"mean over samples": sum_over_samples, "mean over labels": mean_ce, "sum": plain_sum}
Batch = dict[str, Tensor]


class Program(NamedTuple):
    """What is trained.

    Attributes:
        loss: a name in LOSSES.
        numbers: whether the model returns plain numbers beside its tensors.
        fails: whether a batch comes first with which every step fails.
        evaluates: whether a batch is evaluated at the end.
        accumulates: how many batches a step of the optimizer takes.
        max_norm: to which the gradient is clipped; 0 for no clipping.
        resumes: whether the state is saved amid the training, which goes on under another layout.
        streams: whether the data have no length.
        labels: what the labels are called.
    """

    loss: str = "mean over labels"
    numbers: bool = False
    fails: bool = False
    evaluates: bool = False
    accumulates: int = 1
    max_norm: float = 0.0
    resumes: bool = False
    streams: bool = False
    labels: str = "labels"


CONCERNS: dict[str, dict[str, Any]] = {
    "losses": {},
    "numbers": {"numbers": True, "evaluates": True},
    "errors": {"fails": True},
    "evaluation": {"evaluates": True},
    "accumulation": {"accumulates": 2},
    "clipping": {"max_norm": 0.05},
    "resuming": {"resumes": True},
    "streams": {"streams": True},
    "names": {"labels": "targets", "evaluates": True},
}
TOGETHER = {
    "one training": Program(numbers=True, evaluates=True, accumulates=2, max_norm=0.05, streams=True, labels="targets"),
    "one that is interrupted": Program("sum", fails=True, resumes=True),
}
"""All concerns in two programs, since most of a program's time goes into its plan."""


class Told(NamedTuple):
    """What came of a program on a rank.

    Attributes:
        losses: of each step of the optimizer; None on ranks that do not know them.
        weights: of this rank, by their names in the model.
        evaluated: the loss and the scores of the batch that was evaluated; None on ranks that do not know them.
        numbers: the plain numbers beside them, if this adapter passes them on.
        error: what was raised; empty if there was none.
    """

    losses: list[float | None] = []  # noqa: RUF012  # a value, which nobody changes
    weights: dict[str, Any] = {}  # noqa: RUF012  # as above
    evaluated: tuple[float, list[float]] | None = None
    numbers: tuple[Any, ...] | None = None
    error: str = ""


class Speaker(nn.Module):
    """Predicts words, in float64; if it gets labels, it computes a loss."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 8, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(4))
        self.head = nn.Linear(8, CLASSES, dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)  # ranks may be threads, which share torch's own
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
        self.loss, self.numbers = LOSSES[program.loss], program.numbers

    def forward(self, idx: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        return self.told(idx, labels)

    def told(self, idx: Tensor, labels: Tensor | None) -> dict[str, Any]:
        hidden = self.embedding(idx)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        scores = self.head(hidden)
        loss = {} if labels is None else {"loss": self.loss(scores, labels)}
        numbers = {"samples": len(scores), "rate": 0.5} if self.numbers else {}
        return {**loss, "logits": scores, **numbers}


class Other(Speaker):
    """One that calls its labels otherwise."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> dict[str, Any]:
        return self.told(idx, targets)


def make_speaker(program: Program) -> Speaker:
    return (Speaker if program.labels == "labels" else Other)(program)


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """One with states, which a resumed run needs."""
    return torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)


def weights_of(module: nn.Module) -> dict[str, Any]:
    """By their names in the model; those of other ranks are on no device."""
    named = [(name, each.detach()) for name, each in module.named_parameters() if not each.is_meta]
    return {re.sub(r"^.*?(?=embedding|layers|head)", "", name): each.tolist() for name, each in named}


def make_batch(program: Program, number: int) -> Batch:
    """Batch `number`: sentences of which fewer and fewer words count, in each batch as many."""
    words = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(number))
    lengths = torch.tensor([LENGTH - sample % LENGTH for sample in range(SAMPLES)])
    return {
        "idx": words,
        program.labels: torch.where(torch.arange(LENGTH) < lengths[:, None], words.roll(1, 1), IGNORED),
    }


def bad_batch(program: Program) -> Batch:
    """One with a word that no model has."""
    batch = make_batch(program, 0)
    batch["idx"][-1, -1] = CLASSES
    return batch


def samples_for(program: Program, first: int = 0, last: int = STEPS) -> Any:
    """The samples of these steps, with or without a length."""
    numbers = range(first * program.accumulates, last * program.accumulates)
    batches = [make_batch(program, number) for number in numbers]
    return Stream(samples_in(batches)) if program.streams else samples_in(batches)


def samples_in(batches: Iterable[Batch]) -> list[Batch]:
    return [dict(zip(batch, each, strict=True)) for batch in batches for each in zip(*batch.values(), strict=True)]


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, samples: list[Batch]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.samples)


class Loop(Protocol):
    """A training loop that a script writes itself. All ranks make the same calls."""

    module: Any

    def __init__(self, program: Program, *, is_first: bool) -> None:
        """Begins a training, under the layout of the first part or of the second."""

    def reading(self, loader: Any) -> Iterable[Batch]:
        """The loader, as the library prepares it."""

    def step(self, batches: Iterable[Batch]) -> float | None:
        """A step of the optimizer, which reads one batch after the other. Returns the mean of their losses."""

    def evaluate(self, batch: Batch) -> dict[str, Any] | None:
        """What the model returns for a batch."""

    def save(self, folder: Path) -> None:
        """Saves the state."""

    def load(self, folder: Path) -> None:
        """Loads it."""


def run_loop(kind: type[Loop], program: Program, folder: Path) -> Told:
    """Runs a program."""
    loop, losses = kind(program, is_first=True), list[float | None]()
    if program.fails:
        with pytest.raises(Exception, match="index out of range"):
            loop.step([bad_batch(program)])
    loader = loop.reading(DataLoader(samples_for(program), batch_size=SAMPLES))
    batches = iter(loader)
    for number in range(STEPS):
        if program.resumes and number == SAVED:
            loop.save(folder)
            loop = kind(program, is_first=False)
            loop.load(folder)
        losses.append(loop.step(islice(batches, program.accumulates)))
    told = loop.evaluate(make_batch(program, 99)) if program.evaluates else None
    return Told(losses, weights_of(loop.module), *spoken(told))


def spoken(output: Any) -> tuple[Any, Any]:
    """The loss and the scores of an output, and the plain numbers beside them."""
    if output is None:
        return None, None
    numbers = (output["samples"], output["rate"]) if "samples" in output else None
    return (float(output["loss"]), output["logits"].flatten().tolist()), numbers


class Plain:
    """A loop of plain torch, in one process. With `by_microbatch`, the loss of a batch is the mean of those of its
    microbatches, as torch's API of pipelines says.
    """

    by_microbatch = False

    def __init__(self, program: Program, *, is_first: bool) -> None:
        self.program, self.module = program, make_speaker(program)
        self.optimizer = make_optimizer(self.module)

    def reading(self, loader: Any) -> Any:
        return loader

    def loss_of(self, batch: Batch) -> Tensor:
        if not self.by_microbatch:
            loss: Tensor = self.module(**batch)["loss"]
            return loss
        parts = zip(*(each.tensor_split(MICROBATCHES) for each in batch.values()), strict=True)
        return torch.stack([self.module(*part)["loss"] for part in parts]).mean()

    def step(self, batches: Iterable[Batch]) -> float:
        self.optimizer.zero_grad()
        loss = torch.stack([self.loss_of(batch) for batch in batches]).mean()
        loss.backward()
        if self.program.max_norm:
            norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.program.max_norm)
            assert norm > self.program.max_norm
        self.optimizer.step()
        return float(loss)

    def evaluate(self, batch: Batch) -> dict[str, Any]:
        with torch.no_grad():
            told: dict[str, Any] = self.module(**batch)
            return {**told, "loss": self.loss_of(batch)}

    def save(self, folder: Path) -> None:
        torch.save([self.module.state_dict(), self.optimizer.state_dict()], folder / "plain.pt")

    def load(self, folder: Path) -> None:
        model, optimizer = torch.load(folder / "plain.pt")
        self.module.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


class PlainByMicrobatch(Plain):
    by_microbatch = True
