"""One rank of a run that is killed and continued: it trains with a Trainer and a CheckpointHook, and writes down which
samples each step read. Started by `test_killed`, as a function of a process or as a script under torchrun.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeflow.training import Trainer

STAGES, REPLICAS, WIDTH = 2, 2, 16
SAMPLES, BATCH, EPOCHS = 96, 8, 3
STEPS = SAMPLES // BATCH  # of an epoch


@dataclass(frozen=True)
class Run:
    """What a life of a run is asked to do.

    Attributes:
        folder: of checkpoints and notes.
        life: its number.
        dropout: its probability.
        accumulation: batches of a replica in a step.
        asynchronous: whether checkpoints are written beside training.
        victim: the rank that is killed once, so many seconds `after` it begins that `step`; -1 for none.
    """

    folder: str
    life: int
    dropout: float = 0.1
    accumulation: int = 1
    asynchronous: bool = False
    victim: int = -1
    after: float = 0.0
    step: int = -1


def trainer_of(run: Run) -> Trainer:
    import torch
    from torch import nn

    import pipeflow
    from pipeflow.engine.parallel.context import current_context
    from pipeflow.tensor import Dropout, manual_seed
    from pipeflow.training import CheckpointHook, Engine, RateHook, Trainer

    class Stage(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            torch.manual_seed(index)
            layers = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.LayerNorm(WIDTH, dtype=torch.float64)
            self.layers = nn.ModuleDict({str(index): nn.Sequential(*layers)})
            self.drop = nn.Sequential(Dropout(run.dropout), nn.Dropout(run.dropout))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            time.sleep(0.001)
            for layer in self.layers.values():
                hidden = hidden + self.drop(layer(hidden)).tanh()
            return hidden

    context = current_context()
    model = pipeflow.Pipeline(
        Stage(context.pipeline_rank),
        pipeflow.make_schedule("1f1b", ranks=STAGES, microbatches=2),
        criterion=nn.functional.mse_loss,
    )
    manual_seed(1)
    torch.manual_seed(100 + context.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    engine = Engine(model, optimizer, scheduler=scheduler, gradient_accumulation=run.accumulation, clip_grad_norm=1.0)
    by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    checkpoints = CheckpointHook(Path(run.folder, "checkpoints"), 3, "step", best="loss", asynchronous=run.asynchronous)
    return Trainer(engine, [RateHook(by_epoch), checkpoints, *_notes(run)])


def _notes(run: Run) -> list[Any]:
    """Hooks that write down what was read, and kill."""
    from pipeflow.training import Hook, Step

    class Notes(Hook):
        priority = 55  # before a checkpoint says that the step is done

        def before_step(self, trainer: Trainer) -> None:
            is_moment = trainer.engine.steps == run.step and trainer.engine.model.context.rank == run.victim
            flag = Path(run.folder, "killed")
            if is_moment and not flag.exists():
                flag.touch()
                killing = threading.Timer(run.after, os.kill, (os.getpid(), signal.SIGKILL))
                killing.daemon = True
                killing.start()

        def after_step(self, trainer: Trainer, step: Step) -> None:
            context, data = trainer.engine.model.context, trainer.loader.dataset  # type: ignore[attr-defined]  # Numbered
            if context.pipeline_rank == 0:
                with Path(run.folder, f"read-{run.life}-{context.data_rank}").open("a", encoding="utf-8") as file:
                    file.write(json.dumps([trainer.engine.steps, data.read]) + "\n")
            data.read.clear()

    return [Notes()]


def data(count: int, seed: int) -> Any:
    """A data set that notes which of its samples were read."""
    import torch
    from torch.utils.data import Dataset

    class Numbered(Dataset[Any]):
        def __init__(self) -> None:
            generator = torch.Generator().manual_seed(seed)
            self.values = torch.randn(2, count, WIDTH, generator=generator, dtype=torch.float64)
            self.read: list[int] = []

        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> Any:
            self.read.append(index)
            return self.values[0, index], self.values[1, index]

    return Numbered()


def train(run: Run) -> dict[str, Any] | None:
    """On every rank: what it has at the end; None where another rank was killed."""
    import pipeflow
    from pipeflow.engine.parallel.context import current_context

    logging.getLogger("pipeflow").addHandler(logging.NullHandler())  # nothing on the terminal
    trainer, each = trainer_of(run), BATCH // current_context().data_size // run.accumulation
    loader = pipeflow.get_dataloader(data(SAMPLES, 0), each, shuffle=True)
    test_loader = pipeflow.get_dataloader(data(16, 1), 4)
    start = time.monotonic()
    try:
        trainer.fit(loader, EPOCHS, test_loader=test_loader)
    except pipeflow.PipelineError as error:
        if error.died is None:
            raise
        return None
    weights = {name.split(".", 2)[2]: each.detach().numpy() for name, each in trainer.engine.model.named_parameters()}
    [found] = (hook.resumed_from for hook in trainer.hooks if hasattr(hook, "resumed_from"))
    return {
        "weights": weights,
        "metrics": trainer.metrics,
        "steps": trainer.engine.steps,
        "seconds": time.monotonic() - start,
        "resumed": 0 if found is None else int(found.name.removeprefix("step-")),
    }


def digest(result: dict[str, Any]) -> str:
    """Of the weights and metrics."""
    sums = hashlib.sha256(repr(result["metrics"]).encode())
    for name, weight in sorted(result["weights"].items()):
        sums.update(name.encode() + weight.tobytes())
    return sums.hexdigest()


def main(run: Run) -> None:
    """Under torchrun."""
    import torch

    import pipeflow

    torch.set_num_threads(1)
    context = pipeflow.launch(pipeline=STAGES, timeout=10.0, device="cpu")
    result = train(run)
    if result is not None:
        Path(run.folder, f"digest-{context.rank}").write_text(digest(result), encoding="utf-8")
        context.close()


def arguments(run: Run) -> list[str]:
    """Of the script."""
    return ["-m", "tests.training.killed_rank", json.dumps(asdict(run))]


if __name__ == "__main__":
    main(Run(**json.loads(sys.argv[1])))
