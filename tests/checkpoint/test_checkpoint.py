"""Checkpoints do not know the layout that wrote them, and a resumed run is the run that never stopped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import pipeflow
from pipeflow import Saving, UsageError, latest_checkpoint, load_checkpoint, save_checkpoint
from pipeflow.engine.parallel.context import current_context, is_launched
from pipeflow.engine.parallel.sharding import Split
from pipeflow.engine.tensor.random import manual_seed
from pipeflow.testing import run_processes
from pipeflow.training.checkpoint.pieces import Piece
from pipeflow.training.checkpoint.state import generator_states
from pipeflow.training.optim.zero import Zero
from tests.checkpoint.checkpoints import Layout, Run, under, wholes

STEPS = 2


def train_and_save(path: Path, chunks: int = 1) -> tuple[dict[str, Any], float, list[float]]:
    run = Run(chunks)
    run.train(STEPS)
    run.save(path)
    return run.pieces(), run.evaluate(), run.train(3)


def load_and_go_on(path: Path, chunks: int = 1) -> tuple[dict[str, Any], float, list[float], Any]:
    run = Run(chunks)
    loaded = run.load(path)
    return run.pieces(), run.evaluate(), run.train(3), (loaded.step, loaded.data, loaded.extra)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    path = tmp_path_factory.mktemp("run") / "step-2"
    return path, under((2, 2, 2), train_and_save, path)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("layout", "chunks"), [((1, 1, 1), 1), ((4, 1, 2), 1), ((2, 1, 4), 2), ((1, 2, 4), 4), ((1, 4, 1), 1)]
)
def test_what_one_layout_saved_loads_under_another(saved: tuple[Path, list[Any]], layout: Layout, chunks: int) -> None:
    path, before = saved
    after = under(layout, load_and_go_on, path, chunks)
    weights, expected = wholes([each[0] for each in after]), wholes([each[0] for each in before])
    assert set(weights) == set(expected)
    for name, weight in weights.items():
        numpy.testing.assert_array_equal(weight, expected[name])
    for _, loss, going_on, run in after:
        assert loss == pytest.approx(before[0][1], abs=1e-6)
        assert going_on == pytest.approx(before[0][2], abs=1e-6)
        assert run == (STEPS, STEPS, None)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_format_is_torchs_and_each_tensor_is_stored_once(saved: tuple[Path, list[Any]]) -> None:
    path, before = saved
    expected = wholes([each[0] for each in before])
    read = {f"model.{name}": torch.empty(weight.shape, dtype=torch.float64) for name, weight in expected.items()}
    dcp.load(read, checkpoint_id=path)
    for name, weight in expected.items():
        numpy.testing.assert_array_equal(read[f"model.{name}"].numpy(), weight)
    description = dcp.FileSystemReader(path).read_metadata()
    for name, tensor in description.state_dict_metadata.items():
        if isinstance(tensor, dcp.metadata.TensorStorageMetadata):
            assert sum(chunk.sizes.numel() for chunk in tensor.chunks) == tensor.size.numel(), name


def train_past_a_save(path: Path) -> list[float]:
    run = Run(dropout=True)
    run.train(3)
    run.save(path)
    return run.train(3)


def resume(folder: Path) -> list[float]:
    torch.manual_seed(1)
    run = Run(dropout=True)
    latest = latest_checkpoint(folder)
    assert latest is not None
    run.load(latest)
    return run.train(3)


@pytest.mark.slow
def test_a_resumed_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    """In new processes, with dropout, AdamW, a scheduler and the position in the data."""
    expected = run_processes(train_past_a_save, 2, tmp_path / "step-3")
    assert run_processes(resume, 2, tmp_path) == expected


def save_beside_training(path: Path) -> dict[str, Any]:
    run = Run()
    run.train(1)
    before = run.pieces()
    saving = run.save(path, asynchronous=True)
    run.train(3)
    assert saving.wait() == path
    assert saving.wait() == path
    return before


def load_weights(path: Path) -> dict[str, Any]:
    run = Run()
    run.load(path)
    return run.pieces()


def test_an_asynchronous_save_has_the_weights_of_its_moment(tmp_path: Path) -> None:
    before = wholes(under((2, 2, 1), save_beside_training, tmp_path / "step"))
    after = wholes(under((1, 1, 1), load_weights, tmp_path / "step"))
    for name, weight in before.items():
        numpy.testing.assert_array_equal(after[name], weight)


class Tied(torch.nn.Module):
    """A weight with two names, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(5, 4)
        self.head = torch.nn.Linear(4, 5)
        self.head.weight = self.words.weight
        self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)


def trained(model: torch.nn.Module, *, slow: str) -> torch.optim.Optimizer:
    """SGD with momentum, and a rate of its own for parameters that have `slow` in their name."""
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in model.named_parameters() if (slow in name) == is_slow], "lr": rate}
        for is_slow, rate in ((True, 0.1), (False, 0.5))
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return optimizer


def test_a_plain_module_in_a_world_of_one(tmp_path: Path) -> None:
    """Nothing is launched. Both names of a tied weight are stored, so a model that unties them loads too."""
    path = tmp_path / "run" / "step-7"
    model = Tied()
    optimizer = trained(model, slow="bias")
    saving = save_checkpoint(path, model, optimizer, step=7, data={"sample": 70}, extra={"note": [1, "a"]})
    assert isinstance(saving, Saving)
    assert saving.path == path
    loaded = load_checkpoint(path, untied := Untied())
    assert (loaded.step, loaded.data, loaded.extra) == (7, {"sample": 70}, {"note": [1, "a"]})
    assert untied.head.weight is not untied.words.weight
    for name, parameter in untied.named_parameters():
        torch.testing.assert_close(parameter, model.get_parameter(name), rtol=0, atol=0)
    again = torch.optim.SGD(untied.parameters(), lr=9.0, momentum=0.9)
    with pytest.raises(UsageError, match="one group of the optimizer has"):
        load_checkpoint(path, untied, again)
    other = trained(untied, slow="bias")
    load_checkpoint(path, untied, other)
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.5]
    for copy in (untied.words.weight, untied.head.weight):
        expected = optimizer.state[model.words.weight]["momentum_buffer"]
        torch.testing.assert_close(other.state[copy]["momentum_buffer"], expected, rtol=0, atol=0)


class Untied(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = torch.nn.Parameter(torch.randn(5, 4))


def states_of_replicas(path: Path, step: int) -> dict[str, Any]:
    run = Run()
    run.train(step)
    divided = Zero(run.pipeline, torch.optim.Adam(run.pipeline.parameters()))
    if step:
        for parameter in run.pipeline.parameters():
            parameter.grad = torch.full_like(parameter, parameter.numel())
        divided.step()
        save_checkpoint(path, run.pipeline, divided)
    else:
        load_checkpoint(path, run.pipeline, divided)
    return {name.split(".", 2)[2]: state["exp_avg_sq"].numpy() for name, state in divided.state_dict()["state"].items()}


def test_replicas_that_divide_the_states_save_their_own(tmp_path: Path) -> None:
    saved = under((1, 1, 3), states_of_replicas, tmp_path / "step", 1)
    assert all(one.keys().isdisjoint(other) for one in saved for other in saved if one is not other)
    expected = {name: state for each in saved for name, state in each.items()}
    loaded = under((2, 1, 2), states_of_replicas, tmp_path / "step", 0)
    assert {name for each in loaded for name in each} == set(expected)
    for name, state in ((name, state) for each in loaded for name, state in each.items()):
        numpy.testing.assert_array_equal(state, expected[name])


def spread(path: Path) -> list[numpy.ndarray]:
    """Saves a module that torch has in parts, after two steps; then fills another one, in other parts, from it."""
    told = []
    for step in (2, 0):
        torch.manual_seed(step)
        module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3))
        fully_shard(module[step // 2], mesh=current_context().mesh["data"])
        optimizer = torch.optim.Adam(module.parameters())
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if step:
            save_checkpoint(path, module, optimizer, step=step)
        else:
            load_checkpoint(path, module, optimizer)
        states = [optimizer.state[parameter]["exp_avg"] for parameter in module.parameters()]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in (*module.parameters(), *states)]
        told.append(torch.cat([each.detach().flatten() for each in whole]).numpy())
    return told


def test_what_torch_holds_in_parts_is_saved_and_loaded(tmp_path: Path) -> None:
    for saved_values, loaded in run_processes(spread, 2, tmp_path / "step", data=2):
        numpy.testing.assert_array_equal(saved_values, loaded)
    load_checkpoint(tmp_path / "step", torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3)))


def draw() -> list[float]:
    """One number of each of Python's and numpy's generators from a pair, so that a state has the other of the pair."""
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn()]


def draw_past_a_save(path: Path) -> list[float]:
    seed = 10 + current_context().rank if is_launched() else 1
    random.seed(seed)
    numpy.random.seed(seed)
    draw()
    save_checkpoint(path, torch.nn.Linear(1, 1))
    return draw() + draw()


def draw_on(path: Path) -> list[float]:
    load_checkpoint(path, torch.nn.Linear(1, 1))
    return draw() + draw()


def test_the_random_numbers_of_python_and_numpy_go_on(tmp_path: Path) -> None:
    expected = draw_past_a_save(tmp_path / "step")
    assert draw_on(tmp_path / "step") == expected


@pytest.mark.slow
def test_the_random_numbers_of_each_rank_go_on(tmp_path: Path) -> None:
    expected = run_processes(draw_past_a_save, 2, tmp_path / "step", data=2)
    assert expected[0] != expected[1]
    assert run_processes(draw_on, 2, tmp_path / "step", data=2) == expected


def test_a_checkpoint_without_these_random_states_leaves_them_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier versions saved it."""
    with monkeypatch.context() as patch:
        patch.setattr("pipeflow.training.checkpoint.state.generator_states", lambda **_: {})
        draw_past_a_save(tmp_path / "step")
    random.seed(3)
    numpy.random.seed(3)
    expected = draw() + draw()
    random.seed(3)
    numpy.random.seed(3)
    assert draw_on(tmp_path / "step") == expected


@pytest.mark.parametrize("name", ["python", "numpy"])
def test_a_random_state_that_is_none_is_refused_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    usual = generator_states(load_numpy=True)
    with monkeypatch.context() as patch:
        patch.setattr(
            "pipeflow.training.checkpoint.state.generator_states", lambda **_: usual | {name: usual[name].fill_(-1)}
        )
        draw_past_a_save(tmp_path / "step")
    before = random.getstate()
    with pytest.raises(UsageError, match=rf"'random\.0\.{name}' is not the state of a random generator"):
        load_checkpoint(tmp_path / "step", torch.nn.Linear(1, 1))
    assert random.getstate() == before


def warm_up(folder: Path, steps: int) -> list[float]:
    """Takes `steps` from the newest checkpoint on, as the guide to checkpoints does. Returns the learning rates."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    guide = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    resume, save = guide.partition("```python\n")[2].partition("```")[0].replace('"run', f'"{folder}').split("...\n")
    place: dict[str, Any] = {"pipeflow": pipeflow, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    exec(resume, place)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    place["step"] = place["first"] + steps
    exec(save, place)
    return rates


def test_as_the_guide_resumes_learning_rates_go_on(tmp_path: Path) -> None:
    whole = warm_up(tmp_path / "whole", 6)
    assert warm_up(tmp_path / "parts", 2) + warm_up(tmp_path / "parts", 4) == whole
    assert whole[0] < whole[2] < whole[4]


def test_the_random_numbers_of_tensor_layers_go_on(tmp_path: Path) -> None:
    tracker = manual_seed(1)
    save_checkpoint(tmp_path / "step", model := torch.nn.Linear(1, 1))
    expected = [torch.rand(2, generator=each) for each in (tracker.shared, tracker.own)]
    tracker = manual_seed(2)
    load_checkpoint(tmp_path / "step", model)
    for numbers, generator in zip(expected, (tracker.shared, tracker.own), strict=True):
        assert torch.equal(torch.rand(2, generator=generator), numbers)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("size", "blocks"), [(12, ()), (10, ()), (7, ()), (12, (4, 8)), (24, (4, 12, 8))])
def test_shards_of_split_tensors_make_the_whole(dim: int, size: int, blocks: tuple[int, ...]) -> None:
    """Tensor ranks hold padded parts, which replicas shard along the first dimension."""
    ranks, split = 4, Split(dim, size, blocks)
    whole = torch.arange(float(3 * size)).view(size, 3) if dim == 0 else torch.arange(float(3 * size)).view(3, size)
    length = -(-size // ranks)
    padded = functional.pad(whole, (0, 0, 0, ranks * length - size) if dim == 0 else (0, ranks * length - size))
    made, count = torch.full_like(whole, -1), 0
    for rank in range(ranks):
        if blocks:
            part = torch.cat([block.chunk(ranks, dim)[rank] for block in whole.split(blocks, dim)], dim)
        else:
            part = padded.narrow(dim, rank * length, length)
        for start in range(0, len(part) + 1, 2):
            piece = Piece(part[start : start + 2], torch.Size([min(start, len(part)), 0]), part.shape)
            for each in piece.of(split, rank):
                assert each.shape == whole.shape
                if each.tensor.numel():
                    where = tuple(slice(at, at + many) for at, many in zip(each.offset, each.tensor.shape, strict=True))
                    made[where] = each.tensor
                    count += each.tensor.numel()
    assert torch.equal(made, whole)
    assert count == whole.numel()
