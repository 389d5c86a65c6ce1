"""Training on a grid of tensor ranks is training in one process: losses, norms, every gradient, every weight."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule, save_safetensors
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.engine.runtime.grid_samples import tile_shape
from pipeflow.models import GPTLMLoss, build_gpt_pipeline, build_stage
from pipeflow.testing import run_processes, run_threads
from tests.training.grids import GRIDS
from tests.training.hybrid import Trained, part_of, require_trained
from tests.training.over_context import LAYERS, Gpt, pipeline_of, train, train_in_one_process

TOLERANCE = 1e-11
SAMPLES = {1: (8,), 2: (8, 12)}  # of each replica; 4 parts in 3d
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"checkpoint": True},
    "zero": {"zero": True},
    "given positions": {"gives_positions": True},
}


@cache
def expected(samples: tuple[int, ...], gives_positions: bool = False) -> Trained:
    return train_in_one_process(Gpt(samples=samples, gives_positions=gives_positions))


def run(runner: Any, work: Gpt, mode: str) -> None:
    data, grid = len(work.samples), GRIDS[mode]
    results = runner(train, grid["tensor"] * work.pipeline * data, work, data=data, **grid)
    require_trained(results, expected(work.samples, work.gives_positions), TOLERANCE)


@pytest.mark.slow
@pytest.mark.some(3)
@pytest.mark.parametrize("mode", GRIDS)
def test_one_stage(mode: str) -> None:
    """Its token embedding is tied to its head, on the same rank."""
    run(run_threads, Gpt(samples=SAMPLES[1], microbatches=2), mode)


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("mode", GRIDS)
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize("kind", KINDS)
def test_pipelines(kind: str, name: str, mode: str) -> None:
    """The tied weights lie on two ranks, or on one; 2 of 3 microbatches are smaller in 3d."""
    run(run_threads, Gpt(name, 2, SAMPLES[1], **KINDS[kind]), mode)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", GRIDS)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_replicas(pipeline: int, mode: str) -> None:
    """Of unlike sizes, with labels of which most do not count."""
    run(run_threads, Gpt("1f1b", pipeline, SAMPLES[2], zero=True), mode)


@pytest.mark.slow
def test_gloo() -> None:
    run(run_processes, Gpt(samples=SAMPLES[1], zero=True, checkpoint=True), "2d")


def evaluate(work: Gpt, samples: int) -> tuple[float | None, int, torch.Tensor | None]:
    inputs, labels = work.batch(0, 0)
    batch = {"input_ids": inputs["input_ids"][:samples]}, labels[:samples]
    output = execute_pipeline(iter([batch]), pipeline_of(work), forward_only=True, return_outputs=True)
    outputs = output.outputs
    assert isinstance(outputs, torch.Tensor)
    return None if output.loss is None else output.loss.item(), output.samples, outputs


@pytest.mark.slow
@pytest.mark.some(3)
@pytest.mark.parametrize("samples", [8, 7])
@pytest.mark.parametrize("mode", ["2.5d", "3d", "2d"])
def test_an_evaluation_has_the_loss_and_the_outputs_of_all_samples(mode: str, samples: int) -> None:
    """In their order, also of a batch that has no equal parts. Each rank has its columns of the outputs."""
    work = Gpt(samples=SAMPLES[1], microbatches=2)
    [(loss, _, outputs)] = run_threads(evaluate, 1, work, samples)
    assert outputs is not None
    for other, count, mine in run_threads(evaluate, GRIDS[mode]["tensor"], work, samples, **GRIDS[mode]):
        assert (other, count) == (pytest.approx(loss, abs=TOLERANCE), samples)
        columns = mine.shape[-1]
        which = [each for each in outputs.split(columns, dim=-1) if torch.allclose(each, mine[..., : each.shape[-1]])]
        assert which, "no columns of the whole outputs"


def weights(work: Gpt) -> list[tuple[str, Any, torch.Tensor]]:
    model, context = pipeline_of(work), current_context()
    splits = splits_of(model)
    return [
        (name.split(".", 2)[2], part_of(parameter, splits, context.tensor_rank), parameter.detach())
        for name, parameter in model.named_parameters()
    ]


@pytest.mark.parametrize("mode", GRIDS)
def test_initial_weights_do_not_depend_on_the_mode(mode: str) -> None:
    """And ranks hold each entry of a split weight once, or once in each layer of depth."""
    work = Gpt()
    whole = {name: each for name, _, each in run_threads(weights, 1, work)[0]}
    counts = {name: torch.zeros_like(each) for name, each in whole.items()}
    for parts in run_threads(weights, GRIDS[mode]["tensor"], work, **GRIDS[mode]):
        assert {name for name, _, _ in parts} == whole.keys()
        for name, part, mine in parts:
            its, held, counted = whole[name], mine, counts[name]
            for dim, start, length in part:
                start = min(start, its.shape[dim])
                its, held = its.narrow(dim, start, length), held.narrow(dim, 0, length)
                counted = counted.narrow(dim, start, length)
            assert torch.equal(held, its), name
            counted.add_(1)
    for name, counted in counts.items():
        holders = GRIDS[mode].get("tensor_depth", 1) if counted.dim() > 1 else GRIDS[mode]["tensor"]
        assert bool((counted == holders).all()), name


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("modes", [("2d", "1d", "3d"), ("3d", "2.5d", "2d")], ids="-".join)
def test_a_checkpoint_goes_on_in_another_mode(tmp_path: Path, modes: tuple[str, ...]) -> None:
    whole = expected(SAMPLES[1])
    for number, mode in enumerate(modes):
        grid = GRIDS.get(mode, {"tensor": 2})
        work = Gpt("1f1b", 1 + number % 2, SAMPLES[1], steps=1 + number)
        results = run_threads(train, grid["tensor"] * work.pipeline, work, str(tmp_path / "saved"), number, **grid)
        for result in results:
            result.losses[:0] = whole.losses[:number] if result.losses[0] is not None else [None] * number
            result.norms[:0] = whole.norms[:number]
    require_trained(results, whole, TOLERANCE)


def test_a_promised_shape_is_that_of_the_whole_activation() -> None:
    layout = WorldLayout.of(8, 1, 8, tensor_mode="3d")
    assert tile_shape((16, 5, 8), layout) == (4, 5, 4)
    assert tile_shape((None, 5, 8), layout) == (None, 5, 4)
    assert tile_shape((16, 5, 8), WorldLayout(tensor=8)) == (16, 5, 8)
    for shape in ((6, 5, 8), (16, 5, 9)):
        with pytest.raises(UsageError, match=r"tensor_shape=.* has no equal tiles for tensor mode '3d'"):
            tile_shape(shape, layout)


def saved(folder: str) -> None:
    save_safetensors(folder, pipeline_of(Gpt()))


@pytest.mark.parametrize("mode", GRIDS)
def test_weights_are_saved_whole(tmp_path: Path, mode: str) -> None:
    for name, grid in (("one", {"tensor": 1}), ("grid", GRIDS[mode])):
        run_threads(saved, grid["tensor"], str(tmp_path / name), **grid)
    one, grid = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "grid"))
    assert one.keys() == grid.keys()
    assert all(torch.equal(one[name], grid[name]) for name in one)


def refused(work: Gpt, samples: int, mask: bool = False) -> str:
    model = pipeline_of(work)
    tokens = torch.zeros(samples, 4, dtype=torch.int64)
    inputs = {"input_ids": tokens} | ({"attention_mask": torch.ones_like(tokens)} if mask else {})
    with pytest.raises(UsageError) as error:
        execute_pipeline(iter([(inputs, tokens)]), model)
    return str(error.value)


def test_a_batch_of_training_without_equal_parts_is_refused() -> None:
    said = "a batch of 6 samples has no 4 equal parts for tensor mode '3d': use a multiple of 4, and leave the rest out"
    assert all(said in each for each in run_threads(refused, 8, Gpt(), 6, **GRIDS["3d"]))


def test_a_mask_is_refused_where_attention_has_other_samples() -> None:
    said = run_threads(refused, 8, Gpt(), 8, True, **GRIDS["3d"])
    assert all("a GPT takes no attention mask in tensor mode '3d'" in each for each in said)


def masked(work: Gpt) -> float:
    inputs, labels = work.batch(0, 0)
    mask = torch.ones_like(labels)
    mask[::2, -3:] = 0
    output = execute_pipeline(iter([({**inputs, "attention_mask": mask}, labels)]), pipeline_of(work))
    assert output.loss is not None
    return output.loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["2d", "2.5d"])
def test_a_mask_is_divided_by_samples(mode: str) -> None:
    work = Gpt(samples=SAMPLES[1], microbatches=1)
    [whole] = run_threads(masked, 1, work)
    assert run_threads(masked, GRIDS[mode]["tensor"], work, **GRIDS[mode]) == pytest.approx(
        [whole] * GRIDS[mode]["tensor"], abs=TOLERANCE
    )
    assert abs(whole - (expected(SAMPLES[1]).losses[0] or 0)) > 1e-3


def unknown(module: torch.nn.Module | None, **options: Any) -> str:
    chunks = pipeline_of(Gpt()).chunks if module is None else module
    with pytest.raises(UsageError) as error:
        Pipeline(chunks, Gpt().schedule, criterion=GPTLMLoss(), **options)
    return str(error.value)


@pytest.mark.parametrize("options", [{"head_slices": 2}, {"loss_over": "batch"}], ids=str)
def test_what_is_not_known_to_work_on_a_grid_is_refused(options: dict[str, Any]) -> None:
    said = run_threads(partial(unknown, **options), 4, None, **GRIDS["2d"])
    name = next(iter(options))
    assert all(f"tensor mode '2d' does not go together with {name}=: leave it out" in each for each in said)


def in_slices() -> str:
    work = Gpt(samples=(8,))
    chunks = build_gpt_pipeline(LAYERS, placement=work.schedule.placement, **work.options)
    schedule = make_schedule("1f1b", ranks=1, microbatches=2, slices=2)
    with pytest.raises(UsageError) as error:
        execute_pipeline(iter([work.batch(0, 0)]), Pipeline(chunks, schedule, criterion=GPTLMLoss()))
    return str(error.value)


def test_slices_on_a_grid_are_refused() -> None:
    said = run_threads(in_slices, 4, **GRIDS["2d"])
    assert all("slices do not go together with a grid of tensor ranks: leave it out" in each for each in said)


def test_stages_that_are_not_known_to_compute_on_a_grid_are_refused() -> None:
    said = run_threads(unknown, 4, torch.nn.Linear(4, 4), **GRIDS["2d"])
    assert all("Linear is not known to compute so: use a GPTStage, set fits_grids = True" in each for each in said)
    whole = build_stage(0, LAYERS, LAYERS, first=True, last=True, **Gpt().options)  # made before the launch
    said = run_threads(unknown, 4, whole, **GRIDS["2d"])
    layer = "embedding.word_embeddings, a VocabParallelEmbedding, has no form in tensor mode '2d'"
    assert all(layer in each for each in said)
