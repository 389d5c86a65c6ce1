"""What is summed over ranks, and how: weights of two stages, weights without a gradient, sparse, complex and 16-bit
gradients, buffers, and torch's own tensor parallelism.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from pipeflow import (
    Action,
    Kind,
    Pipeline,
    PipelineSharedModuleWrapper,
    Placement,
    Schedule,
    UsageError,
    clip_grad_norm_,
    execute_pipeline,
    load_checkpoint,
    make_schedule,
    replicated,
    save_checkpoint,
    without_ranks,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import Split
from pipeflow.testing import run_processes, run_threads
from tests.runtime.work import plain, require_near

WIDE = torch.float64


def values(seed: int, *shape: int, dtype: torch.dtype = WIDE) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def line(seed: int) -> nn.Linear:
    layer = nn.Linear(3, 3, bias=False, dtype=WIDE)
    layer.weight = nn.Parameter(values(seed, 3, 3) / 2)
    return layer


def shared_lines(stages: int) -> list[nn.Linear]:
    """One weight for the first and the last, which lie on one rank under a schedule in two directions."""
    layers = [line(stage) for stage in range(stages)]
    layers[-1].weight = layers[0].weight
    return layers


def step_with_shared_lines(name: str, ranks: int, microbatches: int) -> list[Any]:
    """The gradient of the weight after one call, and after two without zero_grad between."""
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches)
    layers = shared_lines(schedule.placement.num_stages)
    held = schedule.placement.stages_of(current_context().pipeline_rank)
    pipeline = Pipeline(nn.ModuleList(layers[stage] for stage in held), schedule, criterion=functional.mse_loss)
    told = []
    for _ in range(2):
        execute_pipeline(iter([(values(1, 2 * microbatches, 3), values(2, 2 * microbatches, 3))]), pipeline)
        told.append(plain(layers[0].weight.grad) if 0 in held else None)
    return told


@pytest.mark.parametrize("microbatches", [4, 5])
@pytest.mark.parametrize(("name", "ranks"), [("dualpipe", 2), ("chimera", 2), ("chimera", 4)])
def test_a_weight_of_two_stages_that_two_ranks_hold(name: str, ranks: int, microbatches: int) -> None:
    stages = make_schedule(name, ranks=ranks, microbatches=microbatches).placement.num_stages
    layers = shared_lines(stages)
    samples = 2 * microbatches
    functional.mse_loss(nn.Sequential(*layers)(values(1, samples, 3)), values(2, samples, 3)).backward()
    grad = layers[0].weight.grad
    assert grad is not None
    told = run_threads(step_with_shared_lines, ranks, name, ranks, microbatches)
    results = [each for each in told if each[0] is not None]
    assert len(results) == 2
    for once, twice in results:
        require_near({"once": once, "twice": twice}, {"once": grad, "twice": 2 * grad})


def on_three_paths(microbatches: int) -> Schedule:
    """Three ranks hold all three stages: microbatch m takes path m modulo 3. Ranks sum the stages in other orders."""
    placement = Placement(((0, 1, 2), (1, 2, 0), (2, 0, 1)))
    held = [
        [(microbatch, placement.paths[microbatch % 3].index(rank)) for microbatch in range(microbatches)]
        for rank in range(3)
    ]
    forwards = [sorted(each, key=lambda it: (it[0] // 3, it[1])) for each in held]
    backwards = [sorted(each, key=lambda it: (it[0] // 3, -it[1])) for each in held]
    kinds = (Kind.F, forwards), (Kind.B, backwards)
    rows = [[Action(kind, stage, m) for kind, each in kinds for m, stage in each[rank]] for rank in range(3)]
    return Schedule("three paths", placement, microbatches, tuple(map(tuple, rows)))


def step_on_three_paths(layers: list[nn.Linear], microbatches: int) -> dict[str, Any]:
    """The loss, the gradients of all stages, and the outputs of the same batch."""
    schedule = on_three_paths(microbatches)
    own = nn.ModuleList(copy.deepcopy(layers))
    pipeline = Pipeline(own, schedule, criterion=functional.mse_loss)
    batch = values(1, 2 * microbatches, 3), values(2, 2 * microbatches, 3)
    trained = execute_pipeline(iter([batch]), pipeline, return_outputs=True)
    seen = execute_pipeline(iter([batch]), pipeline, forward_only=True, return_outputs=True)
    gradients = {f"stage {stage}": layer.weight.grad for stage, layer in enumerate(own)}
    told: dict[str, Any] = plain({**gradients, "loss": trained.loss, "outputs": trained.outputs, "seen": seen.outputs})
    return told


@pytest.mark.parametrize("microbatches", [6, 7])
def test_a_stage_that_three_ranks_hold(microbatches: int) -> None:
    layers = [line(stage) for stage in range(3)]
    samples = 2 * microbatches
    whole = copy.deepcopy(layers)
    outputs = nn.Sequential(*whole)(values(1, samples, 3))
    loss = functional.mse_loss(outputs, values(2, samples, 3))
    loss.backward()
    expected: dict[str, Any] = {f"stage {stage}": layer.weight.grad for stage, layer in enumerate(whole)}
    expected |= {"loss": loss.detach(), "outputs": outputs.detach(), "seen": outputs.detach()}
    for told in run_threads(step_on_three_paths, 3, layers, microbatches):
        require_near(told, expected)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.1)


def train_on_three_paths(module: nn.Module, folder: Path, data: int) -> list[tuple[float, float]]:
    """The losses and norms of a whole module's steps on the part of the batch of this replica; the last two repeat the
    two before them from a checkpoint.
    """
    here = current_context().data_rank
    model = Pipeline.from_module(
        copy.deepcopy(module), on_three_paths(6), (values(1, 12, 3), values(2, 12, 3)), criterion=functional.mse_loss
    )
    optimizer, told = adam(model), list[tuple[float, float]]()
    for step in (0, 1, 2, 3, 2, 3):
        if step == 2 and len(told) == 2:
            save_checkpoint(folder, model, optimizer)
        elif step == 2:
            load_checkpoint(folder, model, optimizer)
        optimizer.zero_grad()
        batch = [values(seed, 12, 3).chunk(data)[here] for seed in (2 * step, 2 * step + 1)]
        output = execute_pipeline(iter([tuple(batch)]), model, broadcast_loss=True)
        assert output.loss is not None
        told.append((output.loss.item(), float(clip_grad_norm_(model, 0.01))))
        optimizer.step()
    return told


@pytest.mark.parametrize("data", [1, 2])
def test_a_module_is_trained_and_saved_if_three_ranks_hold_each_stage(data: int, tmp_path: Path) -> None:
    module = nn.Sequential(*(nn.Sequential(line(stage), nn.Tanh()) for stage in range(3)))
    told = run_threads(train_on_three_paths, 3 * data, module, tmp_path / "saved", data, data=data)
    optimizer, expected = adam(module), []
    for step in range(4):
        optimizer.zero_grad()
        loss = functional.mse_loss(module(values(2 * step, 12, 3)), values(2 * step + 1, 12, 3))
        loss.backward()
        expected.append((loss.item(), nn.utils.clip_grad_norm_(module.parameters(), 0.01).item()))
        optimizer.step()
    for each in told:
        assert torch.tensor(each).allclose(torch.tensor([*expected, *expected[2:]]), rtol=1e-9)


def step_of_survivors(module: nn.Module, schedule: Schedule, samples: int) -> dict[str, Any]:
    batch = values(1, samples, 3), values(2, samples, 3)
    model = Pipeline.from_module(copy.deepcopy(module), schedule, batch, criterion=functional.mse_loss)
    output = execute_pipeline(iter([batch]), model, broadcast_loss=True)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    told: dict[str, Any] = plain({"loss": output.loss, **gradients})
    return told


def test_ranks_that_are_left_of_three_replicas_compute_the_whole_batch() -> None:
    module = nn.Sequential(*(nn.Sequential(line(stage), nn.Tanh()) for stage in range(2)))
    whole = replicated(make_schedule("zb-h1", ranks=2, microbatches=4), 3)
    schedule = without_ranks(whole, [2], candidates=20).schedule
    expected = copy.deepcopy(module)
    loss = functional.mse_loss(expected(values(1, 24, 3)), values(2, 24, 3))
    loss.backward()
    gradients: dict[str, Any] = {name: weight.grad for name, weight in expected.named_parameters()}
    for told in run_threads(step_of_survivors, 5, module, schedule, 24):
        require_near(told, {"loss": loss.detach(), **{name: gradients[name] for name in told if name != "loss"}})
        assert len(told) == 2


class Unused(nn.Module):
    """A layer, and a weight that no rank uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer, self.unused = line(seed), nn.Parameter(torch.ones(2, dtype=WIDE))

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.layer(hidden)
        return output


def step_with_unused(name: str) -> list[Any]:
    schedule = make_schedule(name, ranks=2, microbatches=4)
    held = schedule.placement.stages_of(current_context().pipeline_rank)
    stages = nn.ModuleList(Unused(stage) for stage in held)
    if name == "1f1b":
        PipelineSharedModuleWrapper([0, 1]).register_module(stages[0])
    pipeline = Pipeline(stages, schedule, criterion=functional.mse_loss)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1, weight_decay=0.5)
    execute_pipeline(iter([(values(1, 4, 3), values(2, 4, 3))]), pipeline)
    optimizer.step()
    return [parameter.detach().tolist() for name, parameter in pipeline.named_parameters() if "unused" in name]


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_a_weight_without_a_gradient_on_any_rank_is_not_decayed(name: str) -> None:
    for unused in run_threads(step_with_unused, 2, name):
        assert unused
        assert all(value == [1.0, 1.0] for value in unused)


def tie_once(ranks: list[int]) -> str:
    layers = nn.ModuleList([line(0), line(1)])
    PipelineSharedModuleWrapper(ranks).register_module(layers[0])
    with pytest.raises(UsageError) as caught:
        Pipeline(layers, make_schedule("interleaved-1f1b", ranks=1, chunks=2, microbatches=2))
    return str(caught.value)


@pytest.mark.parametrize("ranks", [[0], [0, 0]])
def test_a_tie_of_one_rank_with_one_copy_is_refused(ranks: list[int]) -> None:
    [message] = run_threads(tie_once, 1, ranks)
    assert message.startswith(f"PipelineSharedModuleWrapper({ranks}) ties nothing, since one copy was registered")


class Normed(nn.Sequential):
    """A layer with running statistics."""

    def __init__(self, seed: int) -> None:
        super().__init__(line(seed), nn.BatchNorm1d(3, dtype=WIDE))
        self.register_buffer("offset", values(seed + current_context().rank, 3))


def step_with_norms(trains: bool) -> tuple[str, list[Any]]:
    schedule = make_schedule("chimera", ranks=2, microbatches=4)
    held = schedule.placement.stages_of(current_context().pipeline_rank)
    stages = nn.ModuleList(Normed(stage) for stage in held)
    pipeline = Pipeline(stages, schedule, criterion=functional.mse_loss)
    if not trains:
        pipeline.eval()
    message = ""
    try:
        execute_pipeline(iter([(values(1, 8, 3), values(2, 8, 3))]), pipeline)
    except UsageError as error:
        message = str(error)
    return message, [plain(stage.get_buffer("offset")).tolist() for stage in stages]


def test_buffers_of_two_copies_start_equal_and_running_statistics_are_refused() -> None:
    (message, first), (other, second) = run_threads(step_with_norms, 2, True)
    assert first == second
    for each in (message, other):
        assert "changed its buffer '1.num_batches_tracked', of a BatchNorm1d" in each
    assert [told for told, _ in run_threads(step_with_norms, 2, False)] == ["", ""]


class Slopes(nn.Module):
    """A part of one slope per head, like ALiBi's, and where this rank's heads begin; and a value of `whole`."""

    def __init__(self, whole: float) -> None:
        super().__init__()
        rank = current_context().tensor_rank
        self.scale = nn.Parameter(torch.ones(3, dtype=WIDE))
        self.register_buffer("slopes", torch.full((2,), float(rank)))
        self.register_buffer("first", torch.tensor(2 * rank), persistent=False)
        self.register_buffer("whole", torch.tensor(whole))

    def splits(self) -> dict[str, Split]:
        return {"slopes": Split(0, 4)}

    def partial_gradients(self) -> tuple[str, ...]:
        return ()

    def own_buffers(self) -> tuple[str, ...]:
        return ("first",)


def start_with_slopes(same: bool) -> list[Any]:
    module = Slopes(3.0 if same else current_context().tensor_rank)
    schedule = make_schedule("1f1b", ranks=1, microbatches=1)
    if same:
        Pipeline(module, schedule)
    else:
        with pytest.raises(UsageError) as raised:
            Pipeline(module, schedule)
        assert "buffer 'chunks.0.whole' of tensor rank 1 differs from that of tensor rank 0" in str(raised.value)
        assert "name it in the layer's own_buffers()" in str(raised.value)
    return [plain(buffer).tolist() for buffer in module.buffers()]


def test_a_tensor_ranks_own_buffers_stay() -> None:
    assert run_threads(start_with_slopes, 4, True, tensor=2, data=2) == [[[0.0, 0.0], 0, 3.0], [[1.0, 1.0], 2, 3.0]] * 2


def test_other_buffers_must_be_equal_and_stay_as_they_are() -> None:
    results = run_threads(start_with_slopes, 4, False, tensor=2, data=2)
    assert results == [[[0.0, 0.0], 0, 0.0], [[1.0, 1.0], 2, 1.0]] * 2


class Sparse(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 3, sparse=sparse, dtype=WIDE)
        self.words.weight = nn.Parameter(values(3, 7, 3))

    def forward(self, words: Tensor) -> Tensor:
        output: Tensor = self.words(words)
        return output


def step_with_sparse(name: str, microbatches: int, sparse: bool) -> list[Any]:
    """Of one microbatch, one of two copies of a stage has no gradient of its own."""
    context, schedule = current_context(), make_schedule(name, ranks=2, microbatches=microbatches)
    held = schedule.placement.stages_of(context.pipeline_rank)
    stages = nn.ModuleList(Sparse(sparse) if stage == 0 else line(stage) for stage in held)
    pipeline = Pipeline(stages, schedule, criterion=functional.mse_loss)
    words = torch.tensor([0, 1, 1, 2, 5, 0, 1, 2]) + context.data_rank
    told = []
    for _ in range(2):
        execute_pipeline(iter([(words, values(4, 8, 3))]), pipeline)
        told += [p.grad for name, p in pipeline.named_parameters() if "words" in name and p.grad is not None]
    assert all(gradient.is_sparse == sparse for gradient in told)
    norm = float(clip_grad_norm_(pipeline, 1e9))
    return [norm, *(gradient.to_dense().tolist() for gradient in told)]


@pytest.mark.parametrize(
    ("name", "microbatches", "replicas"), [("1f1b", 4, 2), ("chimera", 4, 1), ("chimera", 4, 2), ("chimera", 1, 2)]
)
def test_sparse_gradients_are_summed_and_stay_sparse(name: str, microbatches: int, replicas: int) -> None:
    dense, sparse = (
        run_threads(step_with_sparse, 2 * replicas, name, microbatches, is_sparse, data=replicas)
        for is_sparse in (False, True)
    )
    for mine, its in zip(dense, sparse, strict=True):
        assert len(mine) == len(its)
        for one, other in zip(mine, its, strict=True):
            assert torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-12)


class Turned(nn.Module):
    """A complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(values(1, 3, dtype=torch.complex128))

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden * self.weight).abs()


def step_with_complex() -> Any:
    stage = Turned()
    pipeline = Pipeline(stage, make_schedule("1f1b", ranks=1, microbatches=1), criterion=functional.mse_loss)
    seed = current_context().data_rank
    execute_pipeline(iter([(values(seed, 4, 3), values(seed + 9, 4, 3))]), pipeline)
    norm = float(clip_grad_norm_(pipeline, 1e9))
    assert stage.weight.grad is not None
    return norm, plain(torch.view_as_real(stage.weight.grad))


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_complex_gradients_are_averaged_and_clipped(run: Any) -> None:
    stage = Turned()
    for seed in (0, 1):
        (functional.mse_loss(stage(values(seed, 4, 3)), values(seed + 9, 4, 3)) / 2).backward()
    assert stage.weight.grad is not None
    whole = torch.view_as_real(stage.weight.grad)
    for norm, gradient in run(step_with_complex, 2, data=2):
        require_near({"weight": gradient}, {"weight": whole})
        assert norm == pytest.approx(float(whole.norm()), rel=1e-12)


class Counted(nn.Module):
    def __init__(self, start: int) -> None:
        super().__init__()
        self.register_buffer("small", torch.tensor([start, 7], dtype=torch.int16))
        self.register_buffer("tiny", torch.tensor([float(start), 2.0]).to(torch.float8_e4m3fn))
        self.register_buffer("flag", torch.tensor(start == 0))
        self.scale = nn.Parameter(torch.ones(2))


def start_counted() -> list[Any]:
    module = Counted(current_context().rank)
    Pipeline(module, make_schedule("1f1b", ranks=1, microbatches=1))
    return [buffer.float().tolist() for buffer in module.buffers()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_buffers_of_any_dtype_start_alike(run: Any) -> None:
    assert run(start_counted, 2, data=2) == [[[0.0, 7.0], [0.0, 2.0], 1.0]] * 2


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3, dtype=WIDE)
        self.up, self.down = nn.Linear(3, 4, dtype=WIDE), nn.Linear(4, 3, dtype=WIDE)
        for seed, parameter in enumerate(self.parameters()):
            parameter.data.copy_(values(seed, *parameter.shape))

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down(functional.gelu(self.up(self.norm(hidden))))
        return output


def step_with_torchs_tensor_parallelism() -> tuple[float, dict[str, Any]]:
    context, stage = current_context(), Perceptron()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }
    parallelize_module(stage, context.mesh["tensor"], plan)
    split = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    parallelize_module(stage, context.mesh["tensor"], split)
    pipeline = Pipeline(stage, make_schedule("1f1b", ranks=1, microbatches=2), criterion=functional.mse_loss)
    execute_pipeline(iter([(values(context.data_rank, 4, 2, 3), values(9, 4, 2, 3))]), pipeline)
    norm = float(clip_grad_norm_(pipeline, 1e9))
    gradients = {}
    for name, parameter in stage.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        gradients[name] = plain(parameter.grad.full_tensor())
    return norm, gradients


@pytest.mark.parametrize("replicas", [1, 2])
def test_torchs_tensor_parallelism_is_averaged_over_replicas(replicas: int) -> None:
    stage = Perceptron()
    for replica in range(replicas):
        loss = functional.mse_loss(stage(values(replica, 4, 2, 3)), values(9, 4, 2, 3))
        (loss / replicas).backward()
    whole = {name: parameter.grad for name, parameter in stage.named_parameters() if parameter.grad is not None}
    total = sum(float(gradient.square().sum()) for gradient in whole.values()) ** 0.5
    for norm, gradients in run_processes(step_with_torchs_tensor_parallelism, 2 * replicas, tensor=2, data=replicas):
        require_near(gradients, whole)
        assert norm == pytest.approx(total, rel=1e-12)
