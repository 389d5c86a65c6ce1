"""What Lightning's Trainer costs around a pipeline: its steps beside those of a bare loop on execute_pipeline; the same
module, batches and optimizer, on 2 ranks. Beside it, what it costs around DDP, with a bare loop on torch's. Blocks
sleep, which needs no cores.

Steps of both take turns: a bare one runs in a callback at the end of each of the Trainer's. The time of a Trainer's
step is all that lies between two bare ones, so loaders, callbacks and logging count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.measure import paired
from benchmarks.processes import run_ranks
from benchmarks.report import Report

RANKS, MICROBATCHES, WARM = 2, 4, 5
SECONDS = 0.0015  # of a block's forward; its backward takes twice that
ALONE = 3 * SECONDS  # the same where a rank runs all blocks with a whole batch
BARE, TRAINER = "bare loop", "Lightning's Trainer"
BARE_DDP, TRAINER_DDP = "bare loop, DDP", "Lightning's Trainer, DDP"


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 60
    results = run_ranks("lightning_loop:measure", RANKS, {"rounds": rounds}, deadline=120 + 2 * rounds)
    pairs = {name: [*zip(*(each[name] for each in results), strict=True)] for name in results[0]}
    seconds = {name: [max(wall for wall, _ in ranks) for ranks in each] for name, each in pairs.items()}
    cpu = {name: [sum(used for _, used in ranks) for ranks in each] for name, each in pairs.items()}
    title = f"lightning_loop: {RANKS} ranks, {MICROBATCHES} microbatches, 4 blocks that sleep, {rounds} steps"
    columns = ["", "median ms", "x bare loop", "CPU ms more, of both ranks"]
    report = Report("lightning_loop", title, columns, data={"seconds": seconds, "cpu": cpu})
    for name in seconds:
        bare = BARE if name in (BARE, TRAINER) else BARE_DDP
        median, ratio = statistics.median(seconds[name]), paired(seconds, name, bare)
        more = statistics.median(cpu[name]) - statistics.median(cpu[bare])
        report.rows.append([name, f"{1e3 * median:.2f}", f"{ratio:.4f}", f"{1e3 * more:.2f}"])
    report.notes.append("target: 1.02 x the bare loop; the ratio is a median over pairs of neighbouring steps")
    report.notes.append(
        "DDP: what Lightning itself costs a step of as long in 2 processes; each computes the whole module"
    )
    return report


def blocks_that_sleep(seconds: float = SECONDS) -> Any:
    """A LightningModule of four blocks, whose forwards take `seconds` and their backwards twice that."""
    import torch
    from lightning.pytorch import LightningModule
    from torch import Tensor, nn

    class Sleeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            time.sleep(seconds)
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            time.sleep(2 * seconds)
            return gradients[0]

    class Block(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            hidden: Tensor = Sleeping.apply(super().forward(value))  # type: ignore[no-untyped-call]  # torch's
            return hidden

    class Module(LightningModule):  # type: ignore[misc]  # Lightning's types are not read
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(16, 16) for _ in range(4))

        def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
            for block in self.blocks:
                inputs = block(inputs)
            return nn.functional.mse_loss(inputs, labels)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self(*batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    return Module()


def measure(rounds: int) -> dict[str, Any]:
    """On every rank: the times of steps."""
    import torch
    from torch import nn

    import pipeflow
    from pipeflow.lightning import PipelineStrategy

    torch.manual_seed(0)
    inputs = torch.randn(16, 16)
    batch = {"inputs": inputs, "labels": inputs}
    schedule = pipeflow.make_schedule("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    model = pipeflow.Pipeline.from_module(blocks_that_sleep(), schedule, batch)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        pipeflow.execute_pipeline(iter([batch]), model, broadcast_loss=True)
        optimizer.step()

    strategy = PipelineStrategy(microbatches=MICROBATCHES)
    found = _turns((TRAINER, BARE), blocks_that_sleep(), strategy, step, inputs, rounds)
    replica = nn.parallel.DistributedDataParallel(blocks_that_sleep(ALONE))
    its = torch.optim.AdamW(replica.parameters())

    def step_of_replica() -> None:
        its.zero_grad()
        replica(**batch).backward()
        its.step()

    names = TRAINER_DDP, BARE_DDP
    return found | _turns(names, blocks_that_sleep(ALONE), "ddp", step_of_replica, inputs, rounds)


def _turns(
    names: tuple[str, str], module: Any, strategy: Any, bare: Callable[[], None], inputs: Any, rounds: int
) -> dict[str, Any]:
    """The times of steps of a Trainer and of a bare loop, by these names."""
    from lightning.pytorch import Callback, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    class Turns(Callback):  # type: ignore[misc]  # as above
        def __init__(self) -> None:
            self.seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
            self.last = self.now()

        def now(self) -> tuple[float, float]:
            return time.perf_counter(), time.thread_time()

        def note(self, name: str) -> None:
            now = self.now()
            self.seconds[name].append((now[0] - self.last[0], now[1] - self.last[1]))
            self.last = now

        def on_train_batch_end(self, *_: Any) -> None:
            self.note(names[0])
            bare()
            self.note(names[1])

    turns = Turns()
    many = inputs.repeat(rounds + WARM, 1)
    data = DataLoader(TensorDataset(many, many), batch_size=len(inputs))
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    trainer = Trainer(accelerator="cpu", devices=RANKS, max_epochs=1, callbacks=[turns], strategy=strategy, **quiet)
    trainer.fit(module, data)
    return {name: each[WARM:] for name, each in turns.seconds.items()}
