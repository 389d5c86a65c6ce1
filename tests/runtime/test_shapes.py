"""Batches of any length and size, one after the other; and a shape that was promised but does not come."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, PipelineError, UsageError, execute_pipeline
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.protocol import Tag
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import WIDTH, PlainModel, TiedModel, TinyModel, TreeModel
from tests.runtime.skips import counted
from tests.runtime.work import build, gradients_of, require_near, schedule_of

# A sequence is expected once it came twice: so repeats, changes after one and after several, and going back.
SIZES = [(7, 3), (7, 3), (7, 3), (7, 5), (7, 5), (7, 3), (4, 3), (9, 2), (9, 2), (9, 2), (9, 2), (7, 3), (7, 1)]
VARIANTS = [("1f1b", 2, 1), ("gpipe", 3, 1), ("interleaved-1f1b", 2, 2)]


def run_sizes(model: TinyModel, variant: tuple[str, int, int]) -> list[tuple[float, float, dict[str, Any]]]:
    """Trains and evaluates on batches of many sizes in turn; per batch both losses and the gradients."""
    pipeline = build(model, schedule_of(variant, 4))
    told = []
    for seed, (samples, length) in enumerate(SIZES):
        pipeline.zero_grad()
        batch = model.batch(samples, length=length, seed=seed)
        other = model.batch(samples + seed % 2, length=length + seed % 3, seed=100 + seed)
        evaluated = execute_pipeline(iter([other]), pipeline, forward_only=True, broadcast_loss=True)
        trained = execute_pipeline(iter([batch]), pipeline, broadcast_loss=True)
        assert evaluated.loss is not None
        assert trained.loss is not None
        told.append((evaluated.loss.item(), trained.loss.item(), gradients_of(pipeline)))
    return told


def require_sizes(model: TinyModel, results: list[list[tuple[float, float, dict[str, Any]]]]) -> None:
    for seed, (samples, length) in enumerate(SIZES):
        evaluated, _ = model.plain_step(model.batch(samples + seed % 2, length=length + seed % 3, seed=100 + seed))
        trained, gradients = model.plain_step(model.batch(samples, length=length, seed=seed))
        for result in results:
            assert result[seed][0] == pytest.approx(evaluated.item(), rel=1e-12)
            assert result[seed][1] == pytest.approx(trained.item(), rel=1e-12)
            require_near(result[seed][2], gradients)


@pytest.mark.some(2)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("model", [TiedModel(), TreeModel()], ids=str)
def test_any_size_follows_any_other_on_threads(model: TinyModel, variant: tuple[str, int, int]) -> None:
    require_sizes(model, run_threads(run_sizes, variant[1], model, variant))


@pytest.mark.slow
def test_any_size_follows_any_other_on_gloo() -> None:
    require_sizes(TreeModel(), run_processes(run_sizes, 2, TreeModel(), ("interleaved-1f1b", 2, 2)))


class Sending(nn.Module):
    """Hands on the batch in another form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, values: Tensor) -> Any:
        whole = values.long()
        return {"numbers": values * 1, "whole and numbers": [whole, values * 1], "whole": whole}[self.form]


def count_messages(form: str) -> tuple[int, int, int]:
    """How many headers, metadata and tensors this rank sends in an evaluation after two alike."""
    with counted() as sent:
        stage = Sending(form) if current_context().pipeline_rank == 0 else Passing()
        pipeline = Pipeline(stage, schedule_of(("1f1b", 2, 1), 4), criterion=mean_of)
        for _ in range(3):
            before = +sent.tensors
            execute_pipeline(iter([(torch.ones(8, 1 << 17), None)]), pipeline, forward_only=True)
        sent.tensors.subtract(before)
        return sent.tensors[Tag.HEADER, 1], sent.tensors[Tag.METADATA, 1], sent.tensors[Tag.ACTIVATION, 1]


def mean_of(output: Any, _: Any) -> Tensor:
    return output.mean() if isinstance(output, Tensor) else output[0].double().mean()


@pytest.mark.parametrize(
    ("form", "messages"), [("numbers", (0, 0, 4)), ("whole and numbers", (0, 0, 8)), ("whole", (4, 0, 4))]
)
def test_an_activation_of_any_size_that_is_expected_is_one_message(form: str, messages: tuple[int, int, int]) -> None:
    """It has a header only if no number in it can say that another one comes."""
    first, _ = run_threads(count_messages, 2, form)
    assert first == messages


class Marking(nn.Module):
    """Hands on numbers of which the first has the bits that begin a message without what is expected."""

    def forward(self, values: Tensor) -> Tensor:
        output = values * 1
        output.view(-1).view(torch.int64)[0] = 0x7FF9_ACED_FACE_0B0E
        return output


def run_marked() -> list[Tensor]:
    stage = [Marking(), Passing()][current_context().pipeline_rank]
    pipeline = Pipeline(stage, schedule_of(("1f1b", 2, 1), 2))
    batch = torch.ones(2, 3, dtype=torch.float64), None
    outputs = [
        execute_pipeline(iter([batch]), pipeline, forward_only=True, return_outputs=True).outputs for _ in range(4)
    ]
    return [output for output in outputs if isinstance(output, Tensor)]


def test_numbers_with_the_bits_of_the_mark_arrive() -> None:
    _, outputs = run_threads(run_marked, 2)
    for output in outputs:
        assert output.isnan().tolist() == [[True, False, False]] * 2
        assert output.nansum() == 4


class Changing(nn.Module):
    """Hands on a tree that depends on the batch: another container, another dtype, one tensor or two."""

    def forward(self, values: Tensor) -> Any:
        match int(values.flatten()[0]):
            case 0:
                return values + 0.5
            case 1:
                return (values,)
            case 2:
                return {"a": values, "b": (values > 0.5)}
            case 3:
                return {"b": values, "a": values.float()}
            case _:
                return [values, values.long(), values[:0]]


class Summing(nn.Module):
    """Adds up all tensors of a tree, each by its place in it, the more for each kind of tree."""

    factors: ClassVar = {Tensor: 1, tuple: 10, dict: 100, list: 1000}

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, tree: Any) -> Tensor:
        leaves: list[Tensor] = (
            list(tree.values()) if isinstance(tree, dict) else [tree] if isinstance(tree, Tensor) else list(tree)
        )
        total = torch.stack([weight * leaf.sum() for weight, leaf in zip(self.weight, leaves, strict=False)]).sum()
        return total * self.factors[type(tree)]


TREES = [0, 0, 0, 1, 1, 1, 0, 2, 3, 2, 3, 3, 3, 2, 2, 4, 4, 4, 0, 0]


def run_trees() -> list[list[float]]:
    rank = current_context().pipeline_rank
    chunks = [Changing(), Passing(), Summing()][rank]
    schedule = schedule_of(("1f1b", 3, 1), 2)
    pipeline = Pipeline(chunks, schedule, criterion=lambda output, _: output, weigh=len)
    told = []
    for kind in TREES:
        pipeline.zero_grad()
        batch = torch.full((2, 3), float(kind), dtype=torch.float64)
        execute_pipeline(iter([(batch, None)]), pipeline)
        told.append(next(pipeline.parameters()).grad.tolist() if rank == 2 else [])  # type: ignore[union-attr]
    return told


class Passing(nn.Module):
    def forward(self, tree: Any) -> Any:
        return tree


def test_a_tree_may_change_with_every_batch() -> None:
    *_, told = run_threads(run_trees, 3)
    sums: dict[int, list[float]] = {
        0: [1.5, 0, 0],
        1: [30, 0, 0],
        2: [600, 300, 0],
        3: [900, 900, 0],
        4: [12000, 12000, 0],
    }
    assert told == [[float(value) for value in sums[kind]] for kind in TREES]


class Misshaping(nn.Module):
    """Once it is told to, makes something that was not promised, for one microbatch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.wrong = ""
        self.calls = 0

    def forward(self, hidden: Tensor) -> Any:
        output = self.inner(hidden)
        self.calls += 1
        if self.calls != 2:
            return output
        made = {"shape": output[:, :-1], "longer": output.repeat(1, 2, 1), "dtype": output.float(), "tree": (output,)}
        return made.get(self.wrong, output)


def run_misshapen(wrong_rank: int) -> list[str]:
    """Per wrong thing, the error; after each, a good step."""
    model, rank = PlainModel(), current_context().pipeline_rank
    schedule = schedule_of(("1f1b", 3, 1), 3)
    [stage] = model.chunks(schedule, rank)
    misshaping = Misshaping(stage)
    pipeline = Pipeline(
        misshaping, schedule, criterion=model.criterion, tensor_shape=(2, 3, WIDTH), tensor_dtype=torch.float64
    )
    batch, told = model.batch(6), []
    _, expected = model.plain_step(batch)
    for wrong in ("shape", "longer", "dtype", "tree"):
        misshaping.wrong, misshaping.calls = wrong if rank == wrong_rank else "", 0
        kind = UsageError if rank == wrong_rank else PipelineError
        with pytest.raises(kind) as caught:
            execute_pipeline(iter([batch]), pipeline)
        told.append(str(caught.value))
        if isinstance(caught.value, PipelineError):
            assert (caught.value.rank, caught.value.stage, caught.value.microbatch) == (wrong_rank, wrong_rank, 1)
        misshaping.wrong = ""
        pipeline.zero_grad()
        execute_pipeline(iter([batch]), pipeline)
        require_near({name.replace("inner.", ""): value for name, value in gradients_of(pipeline).items()}, expected)
    return told


@pytest.mark.some(2)
@pytest.mark.parametrize("start", [run_threads, run_processes])
@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_a_broken_promise_is_one_clear_error(start: Any, wrong_rank: int) -> None:
    for told in start(run_misshapen, 3, wrong_rank):
        shorter, longer, dtype, tree = told
        it, bare = (
            f"stage {wrong_rank} returned a torch.float",
            f"a torch.float64 of shape (2, 3, {WIDTH}) with a gradient",
        )
        promised = f" with a gradient, but its receiver expects {bare}, which tensor_shape and tensor_dtype say"
        assert f"{it}64 of shape (2, 2, {WIDTH}){promised}" in shorter
        assert f"{it}64 of shape (2, 6, {WIDTH}){promised}" in longer
        assert f"{it}32 of shape (2, 3, {WIDTH}){promised}" in dtype
        assert f"stage {wrong_rank} returned {bare} in a tree, but" in tree


# Batches of 4 microbatches, of which 9 samples make 3, 2, 2 and 2; the ragged last batch of an epoch, and back.
RAGGED = [8, 9, 6, 4, 8, 5, 9]


def run_ragged(variant: tuple[str, int, int]) -> list[tuple[float, float, dict[str, Any], int]]:
    """Trains and evaluates on batches of other sizes with an open shape; per batch both losses, the gradients and how
    many programs there are.
    """
    model = PlainModel()
    schedule = schedule_of(variant, 4)
    chunks = nn.ModuleList(model.chunks(schedule, current_context().pipeline_rank))
    told = []
    with counted() as sent:
        pipeline = Pipeline(
            chunks, schedule, criterion=model.criterion, tensor_shape=(None, 3, WIDTH), tensor_dtype=torch.float64
        )
        for seed, samples in enumerate(RAGGED):
            pipeline.zero_grad()
            fewer = model.batch(1 + seed % 5, seed=100 + seed)
            evaluated = execute_pipeline(iter([fewer]), pipeline, forward_only=True, broadcast_loss=True)
            trained = execute_pipeline(iter([model.batch(samples, seed=seed)]), pipeline, broadcast_loss=True)
            assert evaluated.loss is not None
            assert trained.loss is not None
            programs = len(pipeline.runner.programs._kept)
            told.append((evaluated.loss.item(), trained.loss.item(), gradients_of(pipeline), programs))
    assert not {Tag.HEADER, Tag.METADATA, Tag.REDIRECTED}.intersection(tag for tag, _ in sent.tensors)
    return told


@pytest.mark.parametrize("variant", [*VARIANTS, ("chimera", 2, 1), ("zb-h1", 2, 1)], ids=str)
def test_an_open_shape_takes_every_batch(variant: tuple[str, int, int]) -> None:
    """Nothing is told by headers, neither in training nor in evaluation, and no program is compiled again."""
    require_ragged(run_threads(run_ragged, variant[1], variant))


@pytest.mark.exhaustive
def test_an_open_shape_takes_every_batch_on_gloo() -> None:
    require_ragged(run_processes(run_ragged, 2, ("1f1b", 2, 1)))


def require_ragged(results: list[list[tuple[float, float, dict[str, Any], int]]]) -> None:
    model = PlainModel()
    for seed, samples in enumerate(RAGGED):
        evaluated, _ = model.plain_step(model.batch(1 + seed % 5, seed=100 + seed))
        trained, gradients = model.plain_step(model.batch(samples, seed=seed))
        for result in results:
            assert result[seed][:2] == pytest.approx((evaluated.item(), trained.item()), rel=1e-12)
            require_near(result[seed][2], gradients)
            assert result[-1][3] <= 1 + 4  # for training, and for each number of microbatches in evaluation


def run_open_misshapen() -> list[str]:
    model, rank = PlainModel(), current_context().pipeline_rank
    schedule = schedule_of(("1f1b", 2, 1), 2)
    [stage] = model.chunks(schedule, rank)
    misshaping, told = Misshaping(stage), []
    pipeline = Pipeline(
        misshaping, schedule, criterion=model.criterion, tensor_shape=(None, 3, WIDTH), tensor_dtype=torch.float64
    )
    for forward_only in (False, True):
        misshaping.wrong, misshaping.calls = "shape" if rank == 0 else "", 0
        with pytest.raises(UsageError if rank == 0 else PipelineError) as caught:
            execute_pipeline(iter([model.batch(5)]), pipeline, forward_only=forward_only)
        told.append(str(caught.value))
    return told


def test_a_wrong_rest_of_an_open_shape_is_one_clear_error() -> None:
    for told in run_threads(run_open_misshapen, 2):
        for message in told:
            assert f"stage 0 returned a torch.float64 of shape (2, 2, {WIDTH})" in message
            assert f"but its receiver expects a torch.float64 of shape (2, 3, {WIDTH})" in message


def read_other_sizes(smaller: int) -> tuple[str, str]:
    """What is told when a rank reads a smaller batch in the first step, and in a later one; the next ones work."""
    model, rank = PlainModel(), current_context().pipeline_rank
    schedule = schedule_of(("1f1b", 2, 1), 2)
    [stage] = model.chunks(schedule, rank)
    pipeline = Pipeline(
        stage, schedule, criterion=model.criterion, tensor_shape=(None, 3, WIDTH), tensor_dtype=torch.float64
    )
    other = iter([model.batch(4 if rank == smaller else 6)] * 2)
    with pytest.raises(UsageError) as first:
        execute_pipeline(other, pipeline)
    execute_pipeline(iter([model.batch(6)]), pipeline)
    with pytest.raises(UsageError) as later:
        execute_pipeline(other, pipeline)
    execute_pipeline(iter([model.batch(6)]), pipeline)
    return str(first.value), str(later.value)


@pytest.mark.some(1)
@pytest.mark.parametrize("smaller", [0, 1])
@pytest.mark.parametrize("start", [run_threads, run_processes])
def test_ranks_that_read_other_sizes_are_told(start: Any, smaller: int) -> None:
    """At once where all must compare them, and soon if they have changed on one rank alone."""
    sizes = [4 if rank == smaller else 6 for rank in range(2)]
    for first, later in start(read_other_sizes, 2, smaller, timeout=60.0):
        said = " (rank 0), ".join(f"{size} samples in 2 microbatches" for size in sizes)
        assert first.endswith(f"must read the same batch and run the same schedule, but they have {said} (rank 1)")
        assert f"it reads a batch of {sizes[1]} samples, but rank 0 reads a batch of {sizes[0]} samples" in later


def run_other_counts() -> str:
    """The error of ranks whose schedules divide the same batch otherwise, although both have run both schedules."""
    model, schedules = PlainModel(), [schedule_of(("1f1b", 2, 1), count) for count in (2, 3)]
    rank = current_context().pipeline_rank
    [stage] = model.chunks(schedules[0], rank)
    pipeline = Pipeline(
        stage, schedules[0], criterion=model.criterion, tensor_shape=(None, 3, WIDTH), tensor_dtype=torch.float64
    )
    for schedule in schedules:
        execute_pipeline(iter([model.batch(6)]), pipeline, schedule=schedule)
    with pytest.raises(UsageError) as caught:
        execute_pipeline(iter([model.batch(6)]), pipeline, schedule=schedules[rank])
    return str(caught.value)


@pytest.mark.exhaustive
def test_no_message_is_longer_than_its_receive_if_schedules_divide_a_batch_otherwise() -> None:
    for told in run_processes(run_other_counts, 2, timeout=60.0):
        assert "trains with '1f1b', 3 microbatches" in told
        assert "trains with '1f1b', 2 microbatches" in told


def make_with_none_inside() -> None:
    schedule = schedule_of(("1f1b", 1, 1), 1)
    with pytest.raises(UsageError, match=r"the microbatch's size, may be None, got \(2, None\)"):
        Pipeline(nn.Linear(2, 2), schedule, tensor_shape=(2, None))


def test_none_is_the_first_entry_alone() -> None:
    run_threads(make_with_none_inside, 1)
