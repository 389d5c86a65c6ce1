"""The engine and its adapters compute on a second type of device what they compute on the CPU: each tensor is there,
and the host waits for the device only where this is said.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import (
    Pipeline,
    UsageError,
    clip_grad_norm_,
    execute_pipeline,
    load_checkpoint,
    make_schedule,
    save_checkpoint,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.protocol import Tag
from pipeflow.testing import run_processes
from tests.runtime.skips import counted
from tests.second.device import NAME, WAITS, register
from tests.second.ranks import on_second_device

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

Numbers = list[float]


def both(function: Any, ranks: int, folder: Path, tensor: int = 1) -> tuple[list[Any], list[Any]]:
    """What every rank returns on the CPU, and on the second device."""
    return (
        run_processes(function, ranks, folder / "cpu", deadline=200.0, tensor=tensor),
        run_processes(on_second_device, ranks, function, folder / NAME, deadline=200.0, tensor=tensor),
    )


def same(one: Any, other: Any, within: float = 1e-5) -> bool:
    return bool(one == pytest.approx(other, abs=within))


def operators(_: Path) -> dict[str, Any]:
    """What the device is trusted with: each as on the CPU, and what it refuses."""
    device = register()
    found: dict[str, Any] = {}
    for where in (torch.device("cpu"), device):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4)).to(where)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        words = torch.arange(12, device=where).view(3, 4) % 9
        words[0, 1:] += 1 & words[0, :3]
        nn.functional.cross_entropy(module(words).flatten(0, 1), words.flatten() % 4).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses = [nn.functional.mse_loss(module(words), torch.ones(3, 4, 4, device=where)).detach() for _ in range(9)]
        others = [torch.full((4,), 7.0, device=where) for _ in range(3000)]  # what is freed would lie there
        found[where.type] = [each.detach().cpu() for each in (*module.parameters(), *losses, others[0])]
    weight = module[3].weight
    assert weight.device == device
    assert isinstance(weight, nn.Parameter)
    with pytest.raises(RuntimeError, match="xpected all tensors to be on the same device"):
        weight + torch.ones(4, 8)
    WAITS.clear()
    weight.sum().item()
    weight.t()[1:].cpu()
    assert sum(WAITS.values()) == 2, WAITS
    return {name: torch.cat([each.flatten() for each in values]).tolist() for name, values in found.items()}


def test_the_device_computes_as_the_cpu_does(tmp_path: Path) -> None:
    [found] = run_processes(operators, 1, tmp_path)
    assert same(found[NAME], found["cpu"])


def of_llama(folder: Path) -> tuple[Numbers, set[str], Counter[str]]:
    """Some steps of a model with tied weights and a buffer, made without weights, then saved and loaded."""
    from pipeflow.adapters.libraries import transformers_library
    from pipeflow.huggingface import from_config

    ranks = current_context().pipeline_size
    words = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": words, "labels": words}
    transformers = transformers_library()
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=4, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = from_config(
        config,
        make_schedule("zb-h1", ranks=ranks, microbatches=4),
        example=batch,
        kind=transformers.AutoModelForCausalLM,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: Numbers = []
    for step in range(4):
        optimizer.zero_grad()
        told = execute_pipeline(iter([(batch, words)]), model, broadcast_loss=True)
        assert told.loss is not None
        seen += [told.loss.item(), float(clip_grad_norm_(model, 1.0))]
        optimizer.step()
        if step == 1:
            save_checkpoint(folder, model, optimizer)
    load_checkpoint(folder, model, optimizer)
    told = execute_pipeline(iter([(batch, words)]), model, broadcast_loss=True, forward_only=True)
    assert told.loss is not None
    assert same(told.loss.item(), seen[4])
    return seen, {each.device.type for each in model.parameters()}, WAITS


@pytest.mark.exhaustive
def test_a_model_of_transformers_trains_and_resumes(tmp_path: Path) -> None:
    """Tensor ranks compare the buffers of a model whose weights are made later."""
    pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
    plain, there = both(of_llama, 4, tmp_path, tensor=2)
    for one, other in zip(plain, there, strict=True):
        assert same(one[0], other[0])
        assert other[1] == {NAME}


def of_pipelining(_: Path) -> tuple[Numbers, Counter[str]]:
    """Some steps of a schedule of torch's API, of which the last one is watched."""
    from pipeflow.adapters.pipelining.schedules import ScheduleDualPipeV
    from pipeflow.pipelining import PipelineStage

    context = current_context()
    device, rank = context.device, context.pipeline_rank
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device) for _ in range(4)]
    stages = [PipelineStage(blocks[stage], stage, 4, device) for stage in (rank, 3 - rank)]
    schedule = ScheduleDualPipeV(stages, 4, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD([each for stage in stages for each in stage.submod.parameters()], lr=0.1)
    inputs, target = (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)).to(device) for seed in (1, 2))
    seen: Numbers = []
    for _step in range(3):
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        WAITS.clear()
        if rank:
            schedule.step()
        else:
            schedule.step(inputs, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        waits = Counter(WAITS)
        seen += [each.item() for each in losses]
    return seen, waits


def test_a_schedule_of_torchs_api_never_waits(tmp_path: Path) -> None:
    plain, there = both(of_pipelining, 2, tmp_path)
    assert same(plain[0][0], there[0][0])
    assert len(plain[0][0]) == 12
    assert [each[1] for each in there] == [Counter(), Counter()]


class Cutting(nn.Module):
    """A layer, of whose output all rows but some are handed on, as many as its attribute says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.less = 0

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.layer(hidden))[:, self.less :]


def of_shapes(_folder: Path) -> tuple[list[int], str, list[float]]:
    """The headers of steps that repeat, or do not; the error of one whose shapes change by themselves; the losses."""
    rank = current_context().pipeline_rank
    torch.manual_seed(0)
    whole, headers, losses = nn.Sequential(Cutting(), Cutting()), list[int](), list[float]()
    options: dict[str, Any] = {"criterion": lambda output, _: output.square().mean(), "weigh": lambda _: 1.0}
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)

    def batch(length: int) -> tuple[Tensor, Tensor]:
        values = torch.linspace(0, 1, 8 * length * 4).view(8, length, 4)
        return values, values

    def step(length: int, *, training: bool = True) -> None:
        sent.tensors.clear()
        told = execute_pipeline(iter([batch(length)]), model, forward_only=not training, broadcast_loss=True)
        headers.append(sent.tensors[Tag.HEADER, 1])
        assert told.loss is not None
        losses.append(told.loss.item())

    with counted() as sent:
        model = Pipeline.from_module(whole, schedule, batch(5), **options)
        stage = next(each for each in model.modules() if isinstance(each, Cutting))
        for length in (5, 6, 5, 6, 5, 6, 6):
            step(length)
        for _ in range(4):
            step(6, training=False)
        step(6)
        stage.requires_grad_(rank > 0)
        for _ in range(4):
            step(6)
        stage.less = int(rank == 0)
        error = ""
        try:
            step(6)
        except UsageError as caught:
            error = str(caught)
        for _ in range(4):
            step(6)
        torch.manual_seed(rank)
        model = Pipeline(Cutting(), schedule, **options)
        for _ in range(4):
            step(6)
    return headers, error, losses


def test_activations_of_a_step_that_repeats_have_no_header(tmp_path: Path) -> None:
    """All ranks know it together, also if only one of them has changed; a shape that changes by itself is an error."""
    plain, there = both(of_shapes, 2, tmp_path)
    for (_, none, losses), (_, _, others) in zip(plain, there, strict=True):
        assert same(losses[:16] + losses[17:], others)
        assert not none  # between CPUs the message says it
    headers, error, _ = there[0]
    assert headers[:7] == [4, 4, 4, 4, 0, 0, 0]  # each length came twice
    assert headers[7:11] == [4, 4, 0, 0]  # evaluations
    assert headers[11:16] == [0, 4, 4, 0, 0]  # a stage is frozen
    assert headers[16:20] == [4, 4, 4, 4]
    assert headers[20:] == [4, 4, 4, 4]  # of stages that no plan has seen
    assert "stage 0 returned a torch.float32 of shape (2, 5, 4)" in error
    assert "but its receiver expects a torch.float32 of shape (2, 6, 4), as in earlier steps" in error


def of_accelerate(folder: Path) -> tuple[Numbers, Counter[str]]:
    """A loop with accumulation, clipping, autocast, evaluation and a saved state."""
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader

    from pipeflow.accelerate import Accelerator
    from tests.accelerate.loops import Images, make_images

    accelerator = Accelerator(microbatches=4, gradient_accumulation_steps=2, mixed_precision="bf16")
    set_seed(0)
    model: Any = Images()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(make_images(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen: Numbers = []
    for images, labels in loader:
        WAITS.clear()
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        waits = Counter(WAITS)
        seen.append(loss.item())
    accelerator.save_state(str(folder))
    model.eval()
    for images, labels in loader:
        with torch.no_grad():
            guesses, told = accelerator.gather_for_metrics((model(images).argmax(1), labels))
        assert len(guesses) == len(told)
        seen += [*map(float, told)]
    accelerator.load_state(str(folder))
    return seen, waits


@pytest.mark.exhaustive
def test_a_loop_of_accelerate_waits_once_in_a_step(tmp_path: Path) -> None:
    """Rank 1 counts the labels of all microbatches together."""
    pytest.importorskip("accelerate", reason="not installed", exc_type=ImportError)
    plain, there = both(of_accelerate, 2, tmp_path)
    for one, other in zip(plain, there, strict=True):
        assert same(one[0], other[0], within=1e-2)
    assert not there[0][1]
    assert [*there[1][1].values()] == [1], there[1][1]


def of_lightning(folder: Path) -> Numbers:
    """A run of a Trainer with its checkpoint, and a validation after it."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from pipeflow.lightning import PipelineStrategy
    from tests.lightning.modules import Classifier, Seen, make_images

    device = current_context().device

    class Own(CPUAccelerator):  # type: ignore[misc]  # Lightning's types are not read
        """The accelerator of this rank's device."""

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            return [device] * int(devices)

        def setup_device(self, _: torch.device) -> None:
            """Does nothing."""

    seen, kept = Seen(), ModelCheckpoint(folder, monitor="val_loss")
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    strategy = PipelineStrategy(microbatches=4)
    trainer = Trainer(
        accelerator=Own(), devices=2, strategy=strategy, max_epochs=2, callbacks=[seen, kept], default_root_dir=folder,
        gradient_clip_val=0.5, **quiet,
    )  # fmt: skip
    module, images = Classifier(), DataLoader(make_images(), batch_size=8)
    trainer.fit(module, images, images)
    [told] = trainer.validate(module, images, verbose=False)
    [saved] = strategy.load_checkpoint(kept.best_model_path)["callbacks"].values()
    assert saved["best_model_score"].device.type == "cpu"  # wherever it was written
    return [*seen.losses, *seen.others, *told.values()]


@pytest.mark.exhaustive
def test_a_run_of_lightning_has_its_metrics_there_too(tmp_path: Path) -> None:
    """Also in a second run, for which Lightning leaves them on the CPU."""
    pytest.importorskip("lightning", reason="not installed", exc_type=ImportError)
    plain, there = both(of_lightning, 2, tmp_path)
    for one, other in zip(plain, there, strict=True):
        assert same(one, other)


def recorded(folder: Path) -> Counter[str]:
    """Records a step, and says where the host waited in the second one."""
    from pipeflow.checking import record

    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    inputs = torch.randn(8, 8)
    schedule = make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=4)
    model = Pipeline.from_module(module, schedule, example=(inputs, inputs), criterion=nn.MSELoss())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with record(folder, model, optimizer=optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            execute_pipeline(iter([(inputs, inputs)]), model)
            WAITS.clear()
            optimizer.step()
    return WAITS


@pytest.mark.exhaustive
def test_recordings_compare_and_wait_once(tmp_path: Path) -> None:
    from pipeflow.checking import check

    _, there = both(recorded, 2, tmp_path)
    assert all(sum(each.values()) <= 1 for each in there), there
    assert check(tmp_path / "cpu", tmp_path / NAME).alike
