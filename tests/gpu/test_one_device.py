"""Several stages on one GPU, as threads of this process. Skipped where there is none."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeflow
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import RankError, run_threads
from tests.losses.forms import Loss, in_a_buffer, mean_ce, sum_over_count, with_z_loss
from tests.losses.test_check import less_than_the_batch
from tests.losses.words import Words, batch_of
from tests.runtime import kinds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]

WIDTH, SAMPLES = 64, 16


def layer(index: int) -> nn.Module:
    generator = torch.Generator().manual_seed(index)
    linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / WIDTH**0.5)
    return nn.Sequential(linear, nn.Tanh()).cuda()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(99)
    shape = (SAMPLES, WIDTH)
    inputs, labels = (torch.randn(shape, generator=generator, dtype=torch.float64).cuda() for _ in range(2))
    return inputs, labels


def squares(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().mean()


def pipeline(name: str, microbatches: int, known: bool, **options: Any) -> pipeflow.Pipeline:
    context = current_context()
    schedule = pipeflow.make_schedule(name, ranks=context.pipeline_size, microbatches=microbatches)
    chunks = nn.ModuleList(layer(stage) for stage in schedule.placement.stages_of(context.pipeline_rank))
    shape = (SAMPLES // microbatches, WIDTH) if known else None
    shapes: dict[str, Any] = {"tensor_shape": shape, "tensor_dtype": torch.float64}
    return pipeflow.Pipeline(chunks, schedule, criterion=squares, **shapes, **options)


def difference_from_plain(name: str, microbatches: int, known: bool) -> float:
    model = pipeline(name, microbatches, known)
    for _ in range(3):
        model.zero_grad()
        pipeflow.execute_pipeline(iter([batch()]), model)
    torch.cuda.synchronize()
    placement = model.schedule.placement
    plain = nn.Sequential(*(layer(stage) for stage in range(placement.num_stages)))
    inputs, labels = batch()
    squares(plain(inputs), labels).backward()
    gradients = [
        (mine.grad, its.grad)
        for stage, chunk in zip(placement.stages_of(current_context().pipeline_rank), model.chunks, strict=True)
        for mine, its in zip(chunk.parameters(), plain[stage].parameters(), strict=True)
    ]
    pairs = [(mine, its) for mine, its in gradients if mine is not None and its is not None]
    assert len(pairs) == len(gradients)
    return max(float((mine - its).norm() / its.norm()) for mine, its in pairs)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-v", "dualpipe"])
def test_gradients_equal_the_plain_models(name: str, known: bool) -> None:
    assert max(run_threads(difference_from_plain, 4, name, 8, known, device="cuda")) < 1e-12


def kinds_differ(name: str) -> list[str]:
    """Of every use of recomputation and offload: where gradients differ. The host never waits for the device."""
    plain, data = pipeline(name, 8, True), batch()
    expected: kinds.Gradients = {}
    wrong = []
    pipeflow.execute_pipeline(iter([data]), plain)  # the first two steps try how the loss is divided
    for schedule in kinds.uses_of(plain.schedule):
        for mode in ("default", "error"):  # the first step makes streams and pinned memory
            plain.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            pipeflow.execute_pipeline(iter([data]), plain, schedule=schedule)
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            expected = expected or kinds.gradients_of(plain)
            wrong += kinds.differing(schedule, kinds.gradients_of(plain), expected)
    return wrong


@pytest.mark.parametrize("name", ["gpipe", "interleaved-1f1b", "zb-v"])
def test_recomputed_and_offloaded_microbatches_have_the_same_gradients(name: str) -> None:
    """One rank, since threads share the mode that tells of waits."""
    assert run_threads(kinds_differ, 1, name, device="cuda") == [[]]


def peak_bytes(use: str) -> int:
    """The most memory of a step; copies must free what they move."""
    plain = pipeflow.make_schedule("gpipe", ranks=1, microbatches=8)
    model = pipeflow.Pipeline(
        nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(8))).cuda(),
        plain,
        criterion=squares,
    )
    data = torch.randn(8 * 4096, 1024, device="cuda")
    for _ in range(3):  # the first two try how the loss is divided
        torch.cuda.reset_peak_memory_stats()
        pipeflow.execute_pipeline(
            iter([(data, data)]), model, schedule=kinds.uses_of(plain, (use,))[1] if use else plain
        )
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_recomputation_and_offload_free_memory() -> None:
    """Of 8 microbatches, 7 keep little or nothing; each saves 128 MiB."""
    [plain], *others = (run_threads(peak_bytes, 1, use, device="cuda") for use in ("", "recomputed", "offloaded"))
    for [peak] in others:
        assert peak < plain - 4 * 128 * 2**20


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_replicas_average_their_gradients(name: str) -> None:
    """Alike, since both have the same batch."""
    assert max(run_threads(difference_from_plain, 4, name, 8, True, device="cuda", data=2)) < 1e-12


def step_without_synchronisation(name: str) -> None:
    model = pipeline(name, 8, known=True)
    data = batch()
    for _ in range(2):  # which try how the loss is divided
        pipeflow.execute_pipeline(iter([data]), model)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pipeflow.execute_pipeline(iter([data]), model)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_step_never_waits_for_the_device(name: str) -> None:
    run_threads(step_without_synchronisation, 1, name, device="cuda")


def bits_of_steps(name: str, known: bool, graph: bool) -> list[Tensor]:
    """Losses and gradients of steps on different batches, with dropout. The host never waits for the device."""
    model = pipeline(name, 8, known, graph=graph)
    for chunk in model.chunks:
        chunk.append(nn.Dropout(0.2))  # type: ignore[operator]  # a Sequential
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
    torch.manual_seed(3)
    for step in range(9):
        data = (batch()[0] * (1 + step), batch()[1])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step > 4 and current_context().pipeline_size == 1 else "default")
        told = pipeflow.execute_pipeline(iter([data]), model)
        torch.cuda.set_sync_debug_mode("default")
        found += [*told.losses.values(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    torch.cuda.synchronize()
    return [each.cpu() for each in found]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1"])
def test_graphs_replay_the_bits_of_other_steps(name: str, known: bool) -> None:
    """One rank, since threads share the generator of random numbers."""
    [plain], [found] = (run_threads(bits_of_steps, 1, name, known, graph, device="cuda") for graph in (False, True))
    assert all(map(torch.equal, plain, found))


def losses_of_forms(form: Loss, own: bool) -> list[tuple[float, float]]:
    """The losses of three steps, with those of the whole batch, of a criterion or of a module's own loss."""
    words, labels = (each.cuda() for each in batch_of(7))
    module, plain = Words(form).cuda(), Words(form).cuda()
    schedule, example = pipeflow.make_schedule("1f1b", ranks=2, microbatches=3), {"idx": words, "targets": labels}
    data = example if own else (words, labels)
    model = pipeflow.Pipeline.from_module(module, schedule, data, criterion=None if own else form)
    found = []
    for _ in range(3):
        output = pipeflow.execute_pipeline(iter([data]), model, broadcast_loss=True)
        assert output.loss is not None
        found.append((output.loss.item(), form(plain(words), labels).item()))
    return found


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("form", [mean_ce, sum_over_count, with_z_loss, in_a_buffer])
def test_a_loss_is_that_of_the_whole_batch(form: Loss, own: bool) -> None:
    for found in run_threads(losses_of_forms, 2, form, own, device="cuda"):
        for mine, expected in found:
            assert mine == pytest.approx(expected, rel=1e-9)


def test_a_loss_that_is_read_wrongly_is_refused() -> None:
    """Made-up outputs tell it."""
    with pytest.raises(RankError, match="made up"):
        run_threads(losses_of_forms, 2, less_than_the_batch, False, device="cuda")


def measured() -> tuple[pipeflow.Timeline, pipeflow.Schedule]:
    model = pipeline("1f1b", 8, known=True)
    pipeflow.execute_pipeline(iter([batch()]), model)
    timeline = pipeflow.execute_pipeline(iter([batch()]), model, trace=True).timeline
    assert timeline is not None
    return timeline, model.schedule


def test_the_timeline_comes_from_events() -> None:
    for timeline, schedule in run_threads(measured, 4, device="cuda"):
        for row, rank in zip(timeline.rows, range(4), strict=True):
            assert [span.action for span in row] == list(schedule.actions(rank))
            assert all(span.end > span.start for span in row)
            assert all(after.start >= before.start for before, after in pairwise(row))


def loss_of_one_rank_with_chunks(chunks: int) -> float:
    schedule = pipeflow.make_schedule("interleaved-1f1b", ranks=1, microbatches=4, chunks=chunks)
    stages = nn.ModuleList(layer(stage) for stage in range(chunks))
    model = pipeflow.Pipeline(stages, schedule, criterion=squares)
    output = pipeflow.execute_pipeline(iter([batch()]), model, broadcast_loss=True)
    assert output.loss is not None
    return float(output.loss)


def test_one_rank_with_four_chunks_runs_the_whole_model() -> None:
    [loss] = run_threads(loss_of_one_rank_with_chunks, 1, 4, device="cuda")
    inputs, labels = batch()
    plain = nn.Sequential(*(layer(stage) for stage in range(4)))
    assert loss == pytest.approx(squares(plain(inputs), labels).item(), rel=1e-12)
