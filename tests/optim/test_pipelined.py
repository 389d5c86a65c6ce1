"""The optimizer's step within the schedule: the same bits as a step after it, whether it stands or is undone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import (
    Kind,
    MasterWeights,
    Pipeline,
    PipelinedOptimizer,
    PipelineError,
    PipelineSharedModuleWrapper,
    Schedule,
    UsageError,
    clip_grad_norm_,
    execute_pipeline,
    make_schedule,
    with_offload,
    with_optimizer_step,
    with_recompute,
)
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import NonFiniteGradientError
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime import confirmation
from pipeflow.testing.ranks import run_processes, run_threads
from pipeflow.training import Engine
from tests.families import make_near

MICROBATCHES, CLIP = 8, 3.0
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=3e-3, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True, weight_decay=0.1),
}


class Layer(nn.Module):
    """A stage with buffers that count, so that a forward that ran once too often shows."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = hidden + torch.tanh(self.norm(self.linear(self.dropout(hidden))))
        return output


@dataclass(frozen=True)
class Case:
    """A training run; `clip` is the norm to which gradients are clipped, 0 for no clipping."""

    schedule: Schedule
    optimizer: str = "adamw"
    steps: int = 12
    clip: float = CLIP
    norm: bool = True
    dropout: float = 0.0
    tied: bool = False
    broadcast_loss: bool = False
    decay: float = 0.99
    shape: tuple[int | None, ...] | None = None
    short: int | None = None  # number of samples in some of the batches


@dataclass(frozen=True)
class Trained:
    """What a rank has after a run."""

    weights: dict[str, Tensor]
    states: dict[int, dict[str, Tensor]]
    losses: list[float | None]
    norms: list[float]
    undone: int = 0


def build(case: Case, schedule: Schedule) -> Pipeline:
    """This rank's stages; weights are drawn from a generator of the rank's own."""
    placement, rank = case.schedule.placement, current_context().pipeline_rank
    chunks = nn.ModuleList(Layer(6, case.dropout) for _ in placement.stages_of(rank))
    for stage, chunk in zip(placement.stages_of(rank), chunks, strict=True):
        generator = torch.Generator().manual_seed(stage)
        for parameter in chunk.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        if not case.norm:
            chunk.norm = nn.Identity()
    if case.tied:
        ends = 0, placement.num_stages - 1
        wrapper = PipelineSharedModuleWrapper(sorted({placement.paths[0][stage] for stage in ends}))
        for stage, chunk in zip(placement.stages_of(rank), chunks, strict=True):
            if stage in ends:
                wrapper.register_module(chunk.get_submodule("linear"))
    return Pipeline(chunks, schedule, criterion=nn.MSELoss(), tensor_shape=case.shape)


def batches(number: int, short: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Some have large labels, so that their gradient is clipped; some of these and of others have `short` samples."""
    generator = torch.Generator().manual_seed(1 + current_context().data_rank)
    for index in range(number):
        inputs, labels = torch.randn(2, 4 * MICROBATCHES, 6, generator=generator)
        first = short if index % 3 == 1 else None
        yield inputs[:first], labels[:first] * (8 if index % 7 in (1, 2, 5) else 1)


def train_after(case: Case) -> Trained:
    """Steps the optimizer after each batch."""
    model = build(case, case.schedule)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, case.decay)
    norms, losses = [], []
    for batch in batches(case.steps, case.short):
        losses.append(execute_pipeline(iter([batch]), model, broadcast_loss=case.broadcast_loss).loss)
        if case.clip:
            norms.append(clip_grad_norm_(model, case.clip).item())
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
    return Trained(weights_of(model), states_of(optimizer), list(map(read, losses)), norms)


def train_ahead(case: Case) -> Trained:
    """Steps the optimizer within each batch."""
    model = build(case, with_optimizer_step(case.schedule))
    inner = OPTIMIZERS[case.optimizer](model.parameters())
    rates = torch.optim.lr_scheduler.ExponentialLR(inner, case.decay)
    policy: Any = "stop" if case.clip else "ignore"
    optimizer = PipelinedOptimizer(model, inner, clip_grad_norm=case.clip, non_finite=policy)
    losses = []
    for batch in batches(case.steps, case.short):
        losses.append(execute_pipeline(iter([batch]), model, broadcast_loss=case.broadcast_loss).loss)
        rates.step()
    optimizer.confirm()
    assert optimizer.steps == case.steps
    norm = [] if optimizer.grad_norm is None else [optimizer.grad_norm.item()]
    return Trained(weights_of(model), states_of(inner), list(map(read, losses)), norm, optimizer.undone)


def read(loss: Tensor | None) -> float | None:
    return None if loss is None else loss.item()


def weights_of(model: Pipeline) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in (*model.named_parameters(), *model.named_buffers())}


def states_of(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    states: dict[int, dict[str, Tensor]] = optimizer.state_dict()["state"]
    return dict(sorted(states.items()))


def require_same(ahead: Trained, after: Trained) -> None:
    for one, other in ((ahead.weights, after.weights), *zip(ahead.states.values(), after.states.values(), strict=True)):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])), name
    assert ahead.losses == after.losses
    assert ahead.norms == after.norms[-1:]


def compare(case: Case, ranks: int, *, data: int = 1) -> tuple[int, int]:
    """Trains in both ways and requires the same of all ranks. Returns the number of clipped and of undone steps."""
    results = run_threads(lambda: (train_ahead(case), train_after(case)), ranks, data=data)
    for ahead, after in results:
        require_same(ahead, after)
    [undone] = {ahead.undone for ahead, _ in results}
    return sum(norm > case.clip for norm in results[0][1].norms), undone


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
def test_weights_are_the_same_in_every_bit_over_a_hundred_steps(name: str) -> None:
    clipped, undone = compare(Case(make_schedule(name, ranks=4, microbatches=MICROBATCHES), steps=100), 4)
    assert 20 < clipped < 80
    assert 10 < undone < clipped  # after one that is undone, the next waits for its norm


@pytest.mark.some(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_of_torch_are_undone_with_their_states(optimizer: str) -> None:
    schedule = make_schedule("zb-v", ranks=2, microbatches=MICROBATCHES)
    clipped, undone = compare(Case(schedule, optimizer), 2)
    assert clipped > undone > 0


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1"])
def test_forwards_that_ran_ahead_run_again(name: str) -> None:
    options = {"chunks": 2} if name.startswith("interleaved") else {}
    schedule = make_schedule(name, ranks=3, microbatches=6, **options)
    assert compare(Case(schedule, steps=6, shape=(None, 6) if name in ("gpipe", "zb-h1") else None), 3)[1]


def test_batches_with_fewer_samples_than_microbatches_are_stepped() -> None:
    schedule = make_schedule("zb-v", ranks=2, microbatches=MICROBATCHES)
    clipped, undone = compare(Case(schedule, norm=False, short=3), 2)
    assert clipped > undone > 0


def test_an_undone_forward_draws_the_same_numbers_again() -> None:
    """On one rank, since threads share a generator."""

    def trained() -> tuple[Trained, Trained]:
        case = Case(make_schedule("gpipe", ranks=1, microbatches=MICROBATCHES), clip=0.5, dropout=0.5)
        torch.manual_seed(3)
        ahead = train_ahead(case)
        torch.manual_seed(3)
        return ahead, train_after(case)

    [(ahead, after)] = run_threads(trained, 1)
    require_same(ahead, after)
    assert ahead.undone


def trained_by_processes() -> tuple[Trained, Trained]:
    case = Case(make_schedule("zb-v", ranks=2, microbatches=MICROBATCHES), dropout=0.3, shape=(None, 6))
    torch.manual_seed(5)
    ahead = train_ahead(case)
    torch.manual_seed(5)
    return ahead, train_after(case)


@pytest.mark.slow
def test_processes_take_back_what_they_sent_and_drew() -> None:
    for ahead, after in run_processes(trained_by_processes, 2):
        require_same(ahead, after)
        assert ahead.undone


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "looped-bfs", "zb-h2", "zb-v"])
def test_what_a_forward_saved_may_be_gone_or_on_the_host_when_it_is_undone(name: str) -> None:
    schedule = make_near(name, ranks=2, microbatches=MICROBATCHES)
    cost = CostModel.even(schedule.placement, offload=0.1)
    offloaded = with_offload(schedule, cost)
    assert Kind.O in offloaded.kinds
    assert compare(Case(offloaded, steps=4), 2)[1]
    assert compare(Case(with_recompute(schedule), steps=4, norm=False), 2)[1]
    both = with_offload(with_recompute(schedule, [0]), cost, [1])
    assert compare(Case(both, steps=4, norm=False), 2)[1]


def test_a_tied_weight_is_stepped_when_its_gradient_is_summed() -> None:
    assert compare(Case(make_schedule("1f1b", ranks=2, microbatches=4), clip=1.5, tied=True), 2)[1]
    assert compare(Case(make_schedule("zb-v", ranks=2, microbatches=4), tied=True), 2)[1]


def test_replicas_and_copies_of_stages_end_a_step_together() -> None:
    assert compare(Case(make_schedule("1f1b", ranks=2, microbatches=4), clip=1.5), 4, data=2)[1]
    assert compare(Case(make_schedule("chimera", ranks=2, microbatches=4), norm=False), 2)[1]


def test_a_loss_for_every_rank_ends_a_step_for_all() -> None:
    assert compare(Case(make_schedule("zb-h2", ranks=3, microbatches=6), broadcast_loss=True), 3)[1]


def test_nothing_is_kept_if_nothing_is_checked() -> None:
    case = Case(make_schedule("zb-h2", ranks=2, microbatches=4), clip=0)
    assert compare(case, 2) == (0, 0)


def test_a_rank_goes_on_before_the_others_have_ended_the_step() -> None:
    """Rank 0 begins the second step although rank 1 has not ended the first: it is held until rank 0 has begun."""
    schedule = with_optimizer_step(make_schedule("zb-h2", ranks=2, microbatches=4))
    begun = Event()

    class Told(nn.Linear):
        calls = 0

        def forward(self, hidden: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 4:
                begun.set()
            return super().forward(hidden)

    def trained() -> bool:
        rank = current_context().pipeline_rank
        model = Pipeline(Told(6, 6) if rank == 0 else nn.Linear(6, 6), schedule, criterion=nn.MSELoss())
        optimizer = PipelinedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_grad_norm=1e6)
        waits: list[bool] = []
        if rank == 1:
            step = optimizer.step

            def late(stage: int) -> None:
                waits.append(begun.wait(20))
                step(stage)

            optimizer.step = late  # type: ignore[method-assign]
        for batch in batches(2):
            execute_pipeline(iter([batch]), model)
        optimizer.confirm()
        return all(waits)

    assert run_threads(trained, 2) == [True, True]


def planted(policy: str, where: int) -> tuple[str, int, list[bool]]:
    """Trains with a label that is infinite in one step. Returns the error, the skipped steps, and whether the weights
    changed in each step.
    """
    case = Case(make_schedule("zb-h2", ranks=2, microbatches=4))
    model = build(case, with_optimizer_step(case.schedule))
    chosen: Any = policy
    optimizer = PipelinedOptimizer(model, torch.optim.AdamW(model.parameters()), non_finite=chosen)
    error, changed = "", []
    for index, (inputs, labels) in enumerate(batches(4)):
        before = weights_of(model)
        try:
            execute_pipeline(iter([(inputs, labels * float("inf") if index == where else labels)]), model)
            optimizer.confirm()
        except NonFiniteGradientError as caught:
            error = str(caught)
        name = "chunks.0.linear.weight"
        changed.append(not torch.equal(before[name], model.get_parameter(name)))
    return error, optimizer.skipped, changed


def test_a_step_with_an_infinite_gradient_is_undone() -> None:
    for error, skipped, changed in run_threads(lambda: planted("skip", 1), 2):
        assert (error, skipped, changed) == ("", 1, [True, False, True, True])
    for error, _, changed in run_threads(lambda: planted("stop", 1), 2):
        assert error.startswith("the gradient is not finite in step 1")
        assert changed == [True, False, True, True]


def failing(case: str) -> str:
    """The error of what cannot work."""
    schedule = make_schedule("zb-h2", ranks=2, microbatches=4)
    stepping = with_optimizer_step(schedule)
    model = build(Case(schedule), stepping)
    inner = torch.optim.AdamW(model.parameters())
    try:
        if case == "none":
            execute_pipeline(batches(1), model)
        if case == "wrapped":
            PipelinedOptimizer(model, MasterWeights(model, inner))
        if case == "closure":
            PipelinedOptimizer(model, torch.optim.LBFGS(model.parameters()))
        if case == "others":
            PipelinedOptimizer(model, torch.optim.AdamW([nn.Parameter(torch.ones(1))]))
        if case == "clip":
            PipelinedOptimizer(model, inner, clip_grad_norm=-1)
        optimizer = PipelinedOptimizer(model, inner)
        if case == "engine":
            Engine(model, inner).train_step(batches(1))
        if case == "accumulating":
            execute_pipeline(batches(1), model, reduce=False)
        if case == "accumulated":
            execute_pipeline(batches(1), model, schedule=schedule)
            execute_pipeline(batches(1), model)
        if case == "scaled":
            model.loss_scale = 8.0
            execute_pipeline(batches(1), model)
        if case == "frozen":
            next(model.parameters()).requires_grad_(False)
            execute_pipeline(batches(1), model)
        optimizer.confirm()
    except (UsageError, PipelineError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("none", "steps the optimizer (S), but the Pipeline has none"),
        ("wrapped", "a PipelinedOptimizer cannot step a MasterWeights"),
        ("closure", "LBFGS.step needs a closure"),
        ("others", "the optimizer has parameters that are not in the model"),
        ("clip", "clip_grad_norm must be positive"),
        ("engine", "an Engine steps the optimizer itself"),
        ("accumulating", "gradients of several calls cannot be accumulated with reduce=False"),
        ("accumulated", "there are gradients of an earlier call"),
        ("scaled", "it cannot divide them by a loss scale (8)"),
        ("frozen", "parameters were frozen, unfrozen, replaced or converted"),
    ],
)
def test_what_cannot_work_is_refused(case: str, message: str) -> None:
    for error in run_threads(lambda: failing(case), 2):
        assert message in error


def stepped_by_a_second_one() -> tuple[int, int, bool]:
    """The confirmed steps of two optimizers in turn; whether the second, with a rate of 0, kept the weights."""
    case = Case(make_schedule("zb-h2", ranks=2, microbatches=MICROBATCHES), norm=False)
    model = build(case, with_optimizer_step(case.schedule))
    first = PipelinedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    given = batches(2)
    execute_pipeline(given, model)
    first.confirm()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    second = PipelinedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    execute_pipeline(given, model)
    second.confirm()
    return first.steps, second.steps, all(torch.equal(before[name], each) for name, each in model.state_dict().items())


def test_the_last_optimizer_that_was_made_steps() -> None:
    assert run_threads(stepped_by_a_second_one, 2) == [(1, 1, True)] * 2


Call = tuple[str, int]
"""A call of a forward or of the optimizer's step, by its number among these."""


def train_with_errors(case: Case, rank: int, failing: tuple[Call, ...]) -> Trained:
    """Trains; on `rank` these calls fail, and all go on from what they confirmed."""
    model = build(case, with_optimizer_step(case.schedule))
    inner = OPTIMIZERS[case.optimizer](model.parameters())
    optimizer = PipelinedOptimizer(model, inner, clip_grad_norm=case.clip)
    given, failures, index = list(batches(case.steps)), 0, 0
    calls, take = {"forward": 0, "step": 0}, optimizer.step

    def fail(where: str) -> None:
        calls[where] += current_context().pipeline_rank == rank
        if (where, calls[where]) in failing:
            calls[where] += 1
            raise RuntimeError("planted")

    def step(stage: int) -> None:
        fail("step")
        take(stage)

    model.chunks[0].register_forward_pre_hook(lambda *_: fail("forward"))
    optimizer.step = step  # type: ignore[method-assign]
    while index < case.steps:
        try:
            execute_pipeline(iter(given[index:]), model)
            index += 1
        except PipelineError:
            failures += 1
            optimizer.confirm()
            index = optimizer.steps
    optimizer.confirm()
    assert (failures, optimizer.steps) == (len(failing), case.steps)
    return Trained(weights_of(model), states_of(inner), [], [])


@pytest.mark.some(3)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    "failing",
    [
        *([("forward", call)] for call in (13, 14, 20)),
        *([("step", call)] for call in (3, 5)),
        [("step", 5), ("forward", 38)],
    ],
    ids=str,
)
def test_after_errors_all_ranks_have_taken_the_same_steps(rank: int, failing: tuple[Call, ...]) -> None:
    """Also if one rank had ended a step in which another one failed, or had not confirmed the one before; and if it had
    undone a step before.
    """
    case = Case(make_schedule("zb-h2", ranks=3, microbatches=6), steps=6, norm=False, decay=1)
    results = run_threads(lambda: (train_with_errors(case, rank, tuple(failing)), train_after(case)), 3)
    for ahead, after in results:
        require_same(ahead, replace(after, losses=[], norms=[]))


def read_between(case: Case) -> list[bool]:
    """Whether `state_dict` has the final weights, although it is called before a step is confirmed, and whether an
    evaluation between steps has the same loss.
    """
    ahead, after = build(case, with_optimizer_step(case.schedule)), build(case, case.schedule)
    plain = torch.optim.AdamW(after.parameters(), lr=1e-2)
    optimizer = PipelinedOptimizer(ahead, torch.optim.AdamW(ahead.parameters(), lr=1e-2), clip_grad_norm=case.clip)
    same = []
    for index, batch in enumerate(batches(case.steps)):
        execute_pipeline(iter([batch]), ahead)
        execute_pipeline(iter([batch]), after)
        clip_grad_norm_(after, case.clip)
        plain.step()
        plain.zero_grad()
        if index % 3 == 0 and current_context().rank == 0:
            mine, its = ahead.state_dict(), after.state_dict()
            same.append(all(torch.equal(mine[name], its[name]) for name in its))
        if index % 4 == 1:
            losses = [execute_pipeline(iter([batch]), each, forward_only=True).loss for each in (ahead, after)]
            same.append(losses[0] == losses[1])
    optimizer.confirm()
    same.append(all(torch.equal(*pair) for pair in zip(ahead.parameters(), after.parameters(), strict=True)))
    return [*same, optimizer.undone > 0]


@pytest.mark.parametrize("on_host", [True, False])
def test_weights_that_are_read_on_one_rank_are_confirmed_first(monkeypatch: pytest.MonkeyPatch, on_host: bool) -> None:
    """A rank whose norms a GPU computes tells them from another thread, while it may wait for the rank that reads."""
    monkeypatch.setattr(confirmation, "is_host", lambda device: on_host)
    case = Case(make_schedule("zb-h2", ranks=3, microbatches=6), norm=False)
    for same in run_threads(lambda: read_between(case), 3, timeout=90.0):
        assert all(same)


def test_steps_of_the_optimizer_are_at_the_end_of_each_row() -> None:
    schedule = make_schedule("zb-v", ranks=2, microbatches=2)
    stepping = with_optimizer_step(schedule)
    assert [[str(entry) for entry in row[-2:]] for row in stepping.rows] == [["3S1", "0S1"], ["2S1", "1S1"]]
    assert with_optimizer_step(stepping) == stepping
    assert replace(stepping, rows=tuple(row[:-2] for row in stepping.rows)) == schedule
    forward = schedule.forward_only()
    assert with_optimizer_step(forward) is forward
