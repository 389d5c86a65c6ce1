"""Programs as people write them for torch's API: its tutorial, and a trainer that builds stages as torchtitan does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pipeflow import clip_grad_norm_, load_checkpoint, save_checkpoint
from pipeflow.adapters.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from pipeflow.core.action import Kind
from pipeflow.engine.parallel.context import current_context
from pipeflow.pipelining import PipelineStage, ScheduleGPipe, SplitPoint, pipeline
from pipeflow.testing import run_processes
from tests.pipelining.work import CPU, TOLERANCE, difference

pytestmark = pytest.mark.slow
WORDS, WIDTH, LAYERS, SAMPLES, LENGTH = 13, 8, 4, 8, 5


class Model(nn.Module):
    """A language model whose forward runs without the layers that another stage has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tok_embeddings: nn.Module | None = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(index): nn.Linear(WIDTH, WIDTH) for index in range(LAYERS)})
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.output: nn.Module | None = nn.Linear(WIDTH, WORDS)

    def forward(self, value: Tensor, scale: Tensor | None = None) -> Tensor:
        value = value if self.tok_embeddings is None else self.tok_embeddings(value)
        for layer in self.layers.values():
            value = torch.tanh(layer(value)) * (1.0 if scale is None else scale)
        value = value if self.norm is None else self.norm(value)
        return value if self.output is None else self.output(value)


def loss_of(output: Tensor, labels: Tensor, divisor: float = 1.0) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum") / divisor


def data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words, labels = torch.randint(0, WORDS, (2, SAMPLES, LENGTH), generator=generator)
    return words, labels


def reference(batches: list[tuple[Tensor, Tensor]], scale: Tensor | None = None) -> dict[str, Any]:
    """The gradients of the mean over all tokens, by name."""
    whole = Model().double()
    for words, labels in batches:
        loss_of(whole(words, scale), labels, SAMPLES * LENGTH * len(batches)).backward()
    return {name: each.grad for name, each in whole.named_parameters()}


def tutorial(traced: bool) -> float:
    """torch's tutorial: the model split by hand or by the tracer; the error of gradients after two steps."""
    rank, model, (words, labels) = dist.get_rank(), Model().double(), data(2)
    stage: Any
    if traced:
        pipe = pipeline(model, (words.chunk(4)[0],), split_spec={"layers.2": SplitPoint.BEGINNING})
        stage = pipe.build_stage(rank, CPU)
    else:
        gone = ("2", "3") if rank == 0 else ("0", "1")
        for name in gone:
            del model.layers[name]
        if rank == 0:
            model.norm = model.output = None
        else:
            model.tok_embeddings = None
        stage = PipelineStage(model, rank, 2, CPU)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda output, y: loss_of(output, y, len(y) * LENGTH))
    for _ in range(2):
        stage.submod.zero_grad()
        if rank == 0:
            schedule.step(words)
        else:
            losses: list[Tensor] = []
            output = schedule.step(target=labels, losses=losses)
            assert output.shape == (SAMPLES, LENGTH, WORDS)
            assert len(losses) == 4
    expected = reference([(words, labels)])
    return max(difference(each.grad, expected[name]) for name, each in stage.submod.named_parameters())


@pytest.mark.exhaustive
@pytest.mark.parametrize("traced", [False, True])
def test_the_tutorial(traced: bool) -> None:
    assert max(run_processes(tutorial, 2, traced)) < TOLERANCE


def part_of(whole: Model, stage: int, stages: int) -> Model:
    """The layers of one stage, in a copy of the whole model."""
    part, per_stage = copy.deepcopy(whole), LAYERS // stages
    for index in range(LAYERS):
        if index // per_stage != stage:
            del part.layers[str(index)]
    if stage:
        part.tok_embeddings = None
    if stage < stages - 1:
        part.norm = part.output = None
    return part


def pipelining_fn(
    whole: Model, mesh: DeviceMesh, name: str, parallelize: Callable[[nn.Module], Any]
) -> tuple[Any, list[nn.Module], bool, bool]:
    """What torchtitan calls for a model: the schedule, this rank's parts, and whether it has the first and the last."""
    kind = get_schedule_class(name)
    several = issubclass(kind, PipelineScheduleMulti)
    pipe, rank = mesh["pp"], mesh["pp"].get_local_rank()
    count = pipe.size() * (1 + several)
    own = [rank, count - 1 - rank] if name == "ZBVZeroBubble" else list(range(rank, count, pipe.size()))
    stages = [PipelineStage(part_of(whole, s, count), s, count, CPU, group=pipe.get_group("pp")) for s in own]
    parts = [parallelize(stage.submod) for stage in stages]
    for stage, part in zip(stages, parts, strict=True):
        stage.submod = part
    options = {"n_microbatches": 4, "loss_fn": loss_of, "scale_grads": False}
    schedule = kind(stages, backward_requires_autograd=True, **options) if several else kind(stages[0], **options)
    return schedule, parts, any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)


def titan(name: str) -> tuple[float, float]:
    """Two pipelines of two ranks whose parts fully_shard divides; the error of gradients and the sum of losses."""
    current_context().close()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    schedule, parts, first, last = pipelining_fn(
        Model().double(), mesh, name, lambda part: fully_shard(part, mesh=mesh["dp"])
    )
    words, labels = data(5 + mesh["dp"].get_local_rank())
    scale = torch.tensor(0.7, dtype=torch.float64)
    for zeroed, last_of_batch in ((True, True), (True, False), (False, True)):  # the last two accumulate
        for part in parts if zeroed else ():
            part.zero_grad()
        losses: list[Tensor] = []
        schedule.step(
            arg_mbs=[(each,) for each in words.chunk(4)] if first else None,
            kwarg_mbs=[{"scale": scale}] * 4,
            target_mbs=list(labels.chunk(4)) if last else None,
            losses=losses if last else None,
            loss_kwargs={"divisor": SAMPLES * LENGTH},
            return_outputs=False,
            finalize_gradients=last_of_batch,
        )
    several = isinstance(schedule, PipelineScheduleMulti)
    assert any(action.kind is Kind.U for action in schedule.pipeline.schedule.actions(0)) == several
    expected = reference([data(5), data(6)], scale)
    found = [pair for part in parts for pair in part.named_parameters()]
    errors = [difference(whole_of(each.grad), 2 * expected[name]) for name, each in found]
    evaluated: list[Tensor] = []
    schedule.eval(
        arg_mbs=[(each,) for each in words.chunk(4)] if first else None,
        kwarg_mbs=[{"scale": scale}] * 4,
        target_mbs=list(labels.chunk(4)) if last else None,
        losses=evaluated if last else None,
        loss_kwargs={"divisor": SAMPLES * LENGTH},
    )
    return max(errors), sum(map(float, losses)) - sum(map(float, evaluated))


def whole_of(gradient: Any) -> Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.full_tensor()


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_a_trainer_with_sharded_parts(name: str) -> None:
    for error, change in run_processes(titan, 4, name):
        assert error < TOLERANCE
        assert change == pytest.approx(0, abs=TOLERANCE)


def moved(folder: str) -> tuple[float, float, float]:
    """The norm of all gradients here and in one process; and the largest difference of a weight that was saved by two
    stages and loaded by four.
    """
    words, labels = data(2)
    weights: list[dict[str, Tensor]] = []
    norm = 0.0
    for name in ("1F1B", "Interleaved1F1B"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        schedule, parts, first, last = pipelining_fn(Model().double(), mesh, name, lambda part: part)
        if name == "1F1B":
            options = {"divisor": SAMPLES * LENGTH}
            schedule.step(*((words,) if first else ()), target=labels if last else None, loss_kwargs=options)
            norm = float(clip_grad_norm_(schedule.pipeline, 100.0))
            for part in parts:
                for each in part.parameters():
                    each.data += 0.5
            save_checkpoint(folder, schedule.pipeline)
        else:
            load_checkpoint(folder, schedule.pipeline)
        weights.append({name: each for part in parts for name, each in part.named_parameters()})
    expected = reference([(words, labels)]).values()
    fresh = dict(Model().double().named_parameters())
    change = max(float((each - fresh[name] - 0.5).abs().max()) for name, each in weights[1].items())
    return norm, float(torch.cat([each.flatten() for each in expected]).norm()), change


@pytest.mark.exhaustive
def test_norms_and_checkpoints_are_those_of_all_ranks(tmp_path: Path) -> None:
    """Parts that keep the names of the whole model load under another number of stages."""
    for mine, its, change in run_processes(moved, 2, str(tmp_path / "saved")):
        assert mine == pytest.approx(its, rel=TOLERANCE)
        assert change == 0
