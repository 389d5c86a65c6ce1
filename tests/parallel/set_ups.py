"""Set-ups of a drill: each trains for ever on four ranks, in another way, and calls a function after each step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pipeflow
from pipeflow import Context, Pipeline, Schedule, execute_pipeline, make_schedule

WIDTH, MICROBATCHES, TIMEOUT = 16, 4, 5.0
Stepped = Callable[[], None]


def launched(*, pipeline: int, tensor: int = 1) -> Context:
    return pipeflow.launch(pipeline, tensor, timeout=TIMEOUT, device="cpu")


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))


def batch() -> tuple[Tensor, Tensor]:
    return torch.ones(2 * MICROBATCHES, WIDTH), torch.zeros(2 * MICROBATCHES, WIDTH)


def cut(schedule: Schedule) -> Pipeline:
    return Pipeline.from_module(blocks(), schedule, batch(), criterion=nn.functional.mse_loss)


def train(stepped: Stepped, model: Pipeline, optimizer: Any = None, **options: Any) -> None:
    while True:
        execute_pipeline(iter([batch()]), model, **options)
        if optimizer is not None:
            optimizer.step()
        stepped()


def by_schedule(name: str, **options: int) -> Callable[[Path, Stepped], None]:
    def run(_: Path, stepped: Stepped) -> None:
        launched(pipeline=4)
        train(stepped, cut(make_schedule(name, ranks=4, microbatches=MICROBATCHES, **options)))

    return run


def tensor_ranks(_: Path, stepped: Stepped) -> None:
    from pipeflow.tensor import ColumnParallelLinear, RowParallelLinear

    launched(pipeline=2, tensor=2)
    stage = nn.Sequential(ColumnParallelLinear(WIDTH, 2 * WIDTH), RowParallelLinear(2 * WIDTH, WIDTH))
    schedule = make_schedule("1f1b", ranks=2, microbatches=MICROBATCHES)
    train(stepped, Pipeline(stage, schedule, criterion=nn.functional.mse_loss))


def replicas(_: Path, stepped: Stepped) -> None:
    launched(pipeline=2)
    train(stepped, cut(make_schedule("1f1b", ranks=2, microbatches=MICROBATCHES)))


def zero(_: Path, stepped: Stepped) -> None:
    launched(pipeline=2)
    model = cut(make_schedule("zb-h1", ranks=2, microbatches=MICROBATCHES))
    train(stepped, model, pipeflow.Zero(model, torch.optim.AdamW(model.parameters())))


def sharded(_: Path, stepped: Stepped) -> None:
    from torch.distributed.fsdp import fully_shard

    context = launched(pipeline=2)
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    fully_shard(stage, mesh=context.mesh["data"])
    schedule = make_schedule("1f1b", ranks=2, microbatches=MICROBATCHES, unshard=True)
    train(stepped, Pipeline(stage, schedule, criterion=nn.functional.mse_loss))


def optimizer_step(_: Path, stepped: Stepped) -> None:
    launched(pipeline=4)
    schedule = pipeflow.with_optimizer_step(make_schedule("zb-h2", ranks=4, microbatches=MICROBATCHES))
    model = cut(schedule)
    pipeflow.PipelinedOptimizer(model, torch.optim.AdamW(model.parameters()))
    train(stepped, model)


class Reducing(nn.Linear):
    """A stage with a collective of torch over all ranks of its stage."""

    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(hidden)
        dist.all_reduce(output.detach().clone(), group=self.group)
        return output

    group: Any = None


def own_collective(_: Path, stepped: Stepped) -> None:
    context = launched(pipeline=2)
    stage = Reducing(WIDTH, WIDTH)
    stage.group = context.mesh["data"].get_group()
    schedule = make_schedule("1f1b", ranks=2, microbatches=MICROBATCHES)
    train(stepped, Pipeline(stage, schedule, criterion=nn.functional.mse_loss))


def checkpoints(folder: Path, stepped: Stepped) -> None:
    launched(pipeline=4)
    model = cut(make_schedule("1f1b", ranks=4, microbatches=MICROBATCHES))
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    while True:
        execute_pipeline(iter([batch()]), model)
        step += 1
        pipeflow.save_checkpoint(str(folder / f"saved/step-{step % 2}"), model, optimizer)
        stepped()


def evaluation(_: Path, stepped: Stepped) -> None:
    launched(pipeline=4)
    model = cut(make_schedule("1f1b", ranks=4, microbatches=MICROBATCHES))
    train(stepped, model, forward_only=True, broadcast_loss=True)


def accelerated(_: Path, stepped: Stepped) -> None:
    from pipeflow.accelerate import Accelerator

    launched(pipeline=4)
    accelerator = Accelerator(cpu=True, microbatches=MICROBATCHES)
    pairs: Any = TensorDataset(*batch())
    module: Any = Own()
    optimizer: Any = torch.optim.AdamW(module.parameters())
    loader: Any = DataLoader(pairs, batch_size=2 * MICROBATCHES)
    model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    while True:
        for inputs, labels in loader:
            accelerator.backward(model(inputs, labels))
            optimizer.step()
            optimizer.zero_grad()
            stepped()


class Own(nn.Module):
    """Computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.blocks(inputs), labels)


def trainer(folder: Path, stepped: Stepped) -> None:
    import transformers

    from pipeflow.huggingface import Trainer

    class Steps(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stepped()

    context = launched(pipeline=4)
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    words = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 64
    example = {name: torch.stack([each[name] for each in words[:8]]) for name in words[0]}
    schedule = make_schedule("1f1b", ranks=context.pipeline_size, microbatches=MICROBATCHES)
    options: Any = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=1_000_000, per_device_train_batch_size=8, **options
    )
    model = Pipeline.from_module(module, schedule, example)
    Trainer(model, arguments, train_dataset=words, callbacks=[Steps()]).train()


SET_UPS: dict[str, Callable[[Path, Stepped], None]] = {
    "1f1b": by_schedule("1f1b"),
    "interleaved": by_schedule("interleaved-1f1b", chunks=2),
    "zb-v": by_schedule("zb-v"),
    "dualpipe": by_schedule("dualpipe"),
    "tensor ranks": tensor_ranks,
    "replicas": replicas,
    "zero": zero,
    "fully_shard": sharded,
    "optimizer step": optimizer_step,
    "own collective": own_collective,
    "checkpoints": checkpoints,
    "evaluation": evaluation,
    "accelerate": accelerated,
    "trainer": trainer,
}
