"""One entry for each adapter: how a script of its library runs a program on the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pipeflow import Pipeline, make_schedule
from pipeflow.adapters.libraries import transformers_library
from pipeflow.engine.parallel.context import current_context
from pipeflow.training.checkpoint.load import load_checkpoint
from pipeflow.training.checkpoint.save import save_checkpoint
from pipeflow.training.optim.clip import clip_grad_norm_
from tests.adapters.programs import (
    MICROBATCHES,
    SAMPLES,
    SAVED,
    STEPS,
    Batch,
    Plain,
    PlainByMicrobatch,
    Program,
    Speaker,
    Told,
    bad_batch,
    make_batch,
    make_optimizer,
    make_speaker,
    run_loop,
    samples_for,
    samples_in,
    spoken,
    weights_of,
)

LAYOUTS: list[dict[str, Any]] = [
    {"schedule": "interleaved-1f1b", "microbatches": MICROBATCHES + 1, "schedule_options": {"chunks": 2}},
    {"schedule": "1f1b", "microbatches": MICROBATCHES},
]
"""That of the second part of a training, and that of the first."""


class HandedOver:
    """A loop whose model is called as it was before."""

    module: Any

    def evaluate(self, batch: Batch) -> dict[str, Any]:
        self.module.eval()
        with torch.no_grad():
            told: dict[str, Any] = self.module(**batch)
        return told


class AccelerateLoop(HandedOver):
    def __init__(self, program: Program, *, is_first: bool) -> None:
        from pipeflow.accelerate import Accelerator

        self.program = program
        self.accelerator: Any = Accelerator(
            cpu=True, gradient_accumulation_steps=program.accumulates, **LAYOUTS[is_first]
        )
        self.accelerator.free_memory()
        module = make_speaker(program)
        self.module, self.optimizer = self.accelerator.prepare(module, make_optimizer(module))

    def reading(self, loader: Any) -> Any:
        return self.accelerator.prepare(loader)

    def step(self, batches: Iterable[Batch]) -> float:
        losses = []
        for batch in batches:
            with self.accelerator.accumulate(self.module):
                loss = self.module(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and self.program.max_norm:
                    self.accelerator.clip_grad_norm_(self.module.parameters(), self.program.max_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(float(loss.item()))
        return sum(losses) / len(losses)

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder / "state"))

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder / "state"))


class FabricLoop(HandedOver):
    def __init__(self, program: Program, *, is_first: bool) -> None:
        from lightning.fabric import Fabric

        from pipeflow.adapters.lightning.fabric import PipelineStrategy

        self.program = program
        strategy = PipelineStrategy(**LAYOUTS[is_first])
        self.fabric = Fabric(accelerator="cpu", devices=current_context().world_size, strategy=strategy)
        self.fabric.launch()
        module = make_speaker(program)
        self.module, self.optimizer = self.fabric.setup(module, make_optimizer(module))

    def reading(self, loader: Any) -> Any:
        return self.fabric.setup_dataloaders(loader)

    def step(self, batches: Iterable[Batch]) -> float:
        losses = []
        for batch in batches:
            loss = self.module(**batch).loss
            self.fabric.backward(loss / self.program.accumulates)
            losses.append(float(loss.item()))
        if self.program.max_norm:
            self.fabric.clip_gradients(self.module, self.optimizer, max_norm=self.program.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(losses) / len(losses)

    def save(self, folder: Path) -> None:
        self.fabric.save(folder / "state", {"model": self.module, "optimizer": self.optimizer})

    def load(self, folder: Path) -> None:
        self.fabric.load(folder / "state", {"model": self.module, "optimizer": self.optimizer})


class BoosterLoop:
    def __init__(self, program: Program, *, is_first: bool) -> None:
        from pipeflow.colossalai.booster import Booster
        from pipeflow.colossalai.booster.plugin import HybridParallelPlugin

        self.program = program
        style: dict[str, Any] = {} if is_first else {"pp_style": "interleaved", "num_model_chunks": 2}
        plugin = HybridParallelPlugin(
            tp_size=1,
            pp_size=current_context().pipeline_size,
            precision="fp32",
            num_microbatches=MICROBATCHES + (not is_first),
            max_norm=program.max_norm,
            **style,
        )
        self.booster = Booster(plugin=plugin)
        module = make_speaker(program)
        self.module, self.optimizer, *_ = self.booster.boost(module, make_optimizer(module))

    def reading(self, loader: Any) -> Any:
        return loader

    def step(self, batches: Iterable[Batch]) -> float | None:
        self.optimizer.zero_grad()
        losses = []
        for batch in batches:
            told = self._run(batch, lambda output, _: output["loss"] / self.program.accumulates)
            losses.append(told["loss"])
        self.optimizer.step()
        return None if losses[0] is None else float(sum(losses))

    def _run(self, batch: Batch, criterion: Callable[..., Tensor], **options: Any) -> dict[str, Any]:
        return self.booster.execute_pipeline(iter([batch]), self.module, criterion, self.optimizer, **options)

    def evaluate(self, batch: Batch) -> dict[str, Any] | None:
        self.module.eval()
        with torch.no_grad():
            told = self._run(batch, lambda output, _: output["loss"], return_outputs=True)
        return None if told["loss"] is None else {**told["outputs"], "loss": told["loss"]}

    def save(self, folder: Path) -> None:
        self.booster.save_optimizer(self.optimizer, folder / "state")

    def load(self, folder: Path) -> None:
        self.booster.load_optimizer(self.optimizer, folder / "state")


class PipeliningLoop:
    """A script of torch's API cuts its model itself."""

    def __init__(self, program: Program, *, is_first: bool) -> None:
        from torch import distributed as dist

        from pipeflow.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

        self.program, rank, ranks = program, dist.get_rank(), dist.get_world_size()
        count = ranks * (1 if is_first else 2)
        module, device = make_speaker(program), torch.device("cpu")
        own = range(rank, count, ranks)
        self.is_first, self.is_last = 0 in own, count - 1 in own
        stages = [PipelineStage(Part(module, stage, count), stage, count, device) for stage in own]
        if is_first:
            self.schedule: Any = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=self._loss)
        else:
            self.schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=self._loss)
        self.module = torch.nn.ModuleList(stage.submod for stage in stages)
        self.optimizer = make_optimizer(self.module)
        self._speaker = module

    def _loss(self, output: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self._speaker.loss(output, labels)
        return loss

    def reading(self, loader: Any) -> Any:
        return loader

    def _arguments(self, batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return (batch["idx"],) if self.is_first else (), {"target": batch[self.program.labels]} if self.is_last else {}

    def step(self, batches: Iterable[Batch]) -> float | None:
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        for batch in batches:
            arguments, labels = self._arguments(batch)
            found: list[Tensor] = []
            self.schedule.step(*arguments, **labels, losses=found)
            losses += found
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.program.accumulates
        if self.program.max_norm:
            clip_grad_norm_(self.schedule.pipeline, self.program.max_norm)
        self.optimizer.step()
        return float(torch.stack(losses).mean()) if losses else None

    def evaluate(self, batch: Batch) -> dict[str, Any] | None:
        arguments, labels = self._arguments(batch)
        losses: list[Tensor] = []
        output = self.schedule.eval(*arguments, **labels, losses=losses)
        return {"loss": torch.stack(losses).mean(), "logits": output} if self.is_last else None

    def save(self, folder: Path) -> None:
        save_checkpoint(folder / "state", self.schedule.pipeline, self.optimizer, names=_name_in_model)

    def load(self, folder: Path) -> None:
        load_checkpoint(folder / "state", self.schedule.pipeline, self.optimizer, names=_name_in_model)


class Part(torch.nn.Module):
    """A stage of a Speaker."""

    def __init__(self, whole: Speaker, stage: int, count: int) -> None:
        super().__init__()
        each = len(whole.layers) // count
        names = range(stage * each, (stage + 1) * each)
        self.embedding = whole.embedding if stage == 0 else None
        self.layers = torch.nn.ModuleDict({str(name): whole.layers[name] for name in names})
        self.head = whole.head if stage == count - 1 else None

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.embedding is None else self.embedding(hidden)
        for layer in self.layers.values():
            hidden = hidden + layer(hidden).tanh()
        return hidden if self.head is None else self.head(hidden)


def _name_in_model(stage: int, name: str) -> str:
    return name.partition(".")[2] if name.startswith("module.") else name


def with_lightning(program: Program, folder: Path) -> Told:
    """Lightning's Trainer has the loop."""
    from lightning.pytorch import LightningModule, Trainer

    from pipeflow.lightning import PipelineStrategy

    class Steps(LightningModule):  # type: ignore[misc]  # Lightning's types are not read
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_speaker(program)
            self.losses: list[float] = []
            self.told: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            told = self.inner(**batch)
            return told if program.numbers else told["loss"]

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.inner(**batch)

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.told = outputs

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(outputs["loss"]) * program.accumulates)

        def configure_optimizers(self) -> Any:
            return make_optimizer(self)

    def trainer_of(steps: int, is_first: bool) -> Any:
        options: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        options |= {"enable_checkpointing": False, "accelerator": "cpu", "devices": current_context().world_size}
        options |= {"max_steps": steps, "max_epochs": -1, "accumulate_grad_batches": program.accumulates}
        options |= {"gradient_clip_val": program.max_norm or None, "default_root_dir": folder}
        return Trainer(strategy=PipelineStrategy(**LAYOUTS[is_first]), **options)

    def loader_of(first: int = 0, last: int = STEPS) -> Any:
        return DataLoader(samples_for(program, first, last), batch_size=SAMPLES)

    module, trainer = Steps(), trainer_of(SAVED if program.resumes else STEPS, True)
    if program.fails:
        _require_error(lambda: trainer.fit(module, DataLoader(samples_in([bad_batch(program)]), batch_size=SAMPLES)))  # type: ignore[arg-type]  # a list
    trainer.fit(module, loader_of(last=SAVED if program.resumes else STEPS))
    if program.resumes:
        trainer.save_checkpoint(folder / "state.ckpt")
        losses, module, trainer = module.losses, Steps(), trainer_of(STEPS, False)
        trainer.fit(module, loader_of(SAVED), ckpt_path=str(folder / "state.ckpt"))
        module.losses = losses + module.losses
    if program.evaluates:
        trainer.validate(module, DataLoader(samples_in([make_batch(program, 99)]), batch_size=SAMPLES), verbose=False)  # type: ignore[arg-type]  # a list
    count, losses = program.accumulates, module.losses
    means = [sum(losses[first : first + count]) / count for first in range(0, len(losses), count)]
    return Told([*means], weights_of(module), *spoken(module.told))


def with_trainer(program: Program, folder: Path) -> Told:
    """transformers' Trainer has the loop."""
    from pipeflow.huggingface import Trainer

    class Kept(Trainer):
        def training_step(self, *arguments: Any, **options: Any) -> Any:
            self.seen.append(float(super().training_step(*arguments, **options)))
            return torch.tensor(self.seen[-1])

    def trainer_of(steps: int, is_first: bool) -> Any:
        layout = dict(LAYOUTS[is_first])
        options = layout.pop("schedule_options", {})
        schedule = make_schedule(layout.pop("schedule"), ranks=current_context().pipeline_size, **layout, **options)
        model = Pipeline.from_module(model_of_transformers(program), schedule, make_batch(program, 0))
        arguments: dict[str, Any] = {"max_steps": steps, "optim": "sgd", "optim_args": "momentum=0.9"}
        arguments |= {"learning_rate": 0.02, "lr_scheduler_type": "constant", "max_grad_norm": program.max_norm}
        arguments |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "log_level": "error"}
        arguments |= {"per_device_train_batch_size": SAMPLES, "per_device_eval_batch_size": SAMPLES}
        arguments |= {"gradient_accumulation_steps": program.accumulates, "save_strategy": "no"}
        arguments |= {"ignore_data_skip": True, "remove_unused_columns": False, "label_names": [program.labels]}
        if program.resumes:
            arguments |= {"save_strategy": "steps", "save_steps": SAVED}
        made = transformers_library().TrainingArguments(str(folder), **arguments)
        trainer: Any = Kept(model, made, train_dataset=samples_for(program))
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
        trainer.seen = []
        return trainer

    trainer = trainer_of(SAVED if program.resumes else STEPS, True)
    if program.fails:
        good, trainer.train_dataset = trainer.train_dataset, samples_in([bad_batch(program)])
        _require_error(trainer.train)
        trainer.train_dataset = good
    trainer.train()
    if program.resumes:
        losses, trainer = trainer.seen, trainer_of(STEPS, False)
        trainer.train_dataset = samples_for(program, SAVED)
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}"))
        trainer.seen = losses + trainer.seen
    count, losses = program.accumulates, trainer.seen
    sums = [sum(losses[first : first + count]) for first in range(0, len(losses), count)]
    told = None
    if program.evaluates:
        ignored = ["samples", "rate"]  # transformers' own loop takes tensors alone
        predicted = trainer.predict(samples_in([make_batch(program, 99)]), ignore_keys=ignored)
        told = {"loss": predicted.metrics["test_loss"], "logits": torch.from_numpy(predicted.predictions)}
    return Told([*sums], weights_of(trainer.model), *spoken(told))


def model_of_transformers(program: Program) -> Any:
    """A Speaker as a model of transformers, which its Trainer can save."""

    class Config(transformers_library().PretrainedConfig):  # type: ignore[misc]  # transformers has its own types
        model_type = "speaker"
        program: Any = None

    class Model(transformers_library().PreTrainedModel):  # type: ignore[misc]  # as above
        config_class = Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.inner = make_speaker(Program(*config.program))
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            """Keeps the weights of the Speaker."""

        def forward(self, idx: Tensor, labels: Tensor | None = None) -> Any:
            return self.inner(idx, labels)

    class OtherModel(Model):
        def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
            return self.inner(idx, targets)

    return (Model if program.labels == "labels" else OtherModel)(Config(program=[*program]))


def _require_error(call: Callable[[], object]) -> None:
    with pytest.raises(Exception, match="index out of range"):
        call()


class Entry(NamedTuple):
    """An adapter.

    Attributes:
        run: runs a program on a rank, with a folder that all ranks share.
        needs: the library.
        by_threads: whether ranks may be threads.
        plain: the loop in one process whose numbers are expected.
        refuses: for some programs, by the beginnings of their names, what the error says.
        passes_numbers: whether plain numbers of a batch are seen in an evaluation.
    """

    run: Callable[[Program, Path], Told]
    needs: str = "torch"
    by_threads: bool = False
    plain: type[Plain] = Plain
    refuses: dict[str, str] = {}  # noqa: RUF012  # a value, which nobody changes
    passes_numbers: bool = True


def _looping(kind: Any) -> Callable[[Program, Path], Told]:
    return lambda program, folder: run_loop(kind, program, folder)


ENTRIES: dict[str, Entry] = {
    "Trainer": Entry(with_trainer, "transformers", by_threads=True, passes_numbers=False),
    "Lightning": Entry(with_lightning, "lightning"),
    "Fabric": Entry(_looping(FabricLoop), "lightning"),
    "accelerate": Entry(_looping(AccelerateLoop), "accelerate"),
    "pipelining": Entry(_looping(PipeliningLoop), plain=PlainByMicrobatch, passes_numbers=False),
    "Booster": Entry(_looping(BoosterLoop), by_threads=True),
}
