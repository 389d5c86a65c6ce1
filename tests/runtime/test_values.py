"""The values that pass: what a stage returns is what the next one gets, and what a batch holds reaches every stage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Along, Divided, Pipeline, UsageError, Whole, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from tests.runtime.work import gradients_of, plain

MICROBATCHES = 4


def schedule_of(name: str = "1f1b", ranks: int = 2, **options: Any) -> Any:
    return make_schedule(name, ranks=ranks, microbatches=MICROBATCHES, **options)


def evaluated(stages: nn.Module, inputs: Any, **options: Any) -> Any:
    pipeline = Pipeline(stages, schedule_of(**options))
    return plain(execute_pipeline(iter([(inputs, None)]), pipeline, forward_only=True, return_outputs=True).outputs)


class Conjugating(nn.Module):
    """Returns the lazy conjugate of its input times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0 + 1.0j, dtype=torch.complex128))

    def forward(self, values: Tensor) -> Tensor:
        return (values * self.weight).conj()


def complex_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = (torch.randn(8, 3, dtype=torch.complex128, generator=generator) for _ in range(2))
    return inputs, labels


def distance(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).abs().square().mean()


def run_conjugating() -> tuple[float | None, Any]:
    pipeline = Pipeline(Conjugating(), schedule_of(), criterion=distance)
    output = execute_pipeline(iter([complex_batch()]), pipeline)
    return None if output.loss is None else output.loss.item(), gradients_of(pipeline)["weight"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", [run_threads, run_processes])
def test_lazy_conjugates_are_sent_as_they_are(start: Any) -> None:
    first, last = Conjugating(), Conjugating()
    inputs, labels = complex_batch()
    loss = distance(last(first(inputs)), labels)
    loss.backward()
    results = start(run_conjugating, 2)
    assert results[1][0] == pytest.approx(loss.item(), rel=1e-12)
    for (_, gradient), module in zip(results, (first, last), strict=True):
        assert module.weight.grad is not None
        assert abs(gradient - module.weight.grad.numpy()) <= 1e-12 * abs(module.weight.grad.numpy())


class Imaginary(nn.Module):
    """Returns a lazy negative: the imaginary part of a conjugate."""

    def forward(self, values: Tensor) -> Tensor:
        return values.conj().imag


def run_negative() -> Any:
    chunk = Imaginary() if current_context().pipeline_rank == 0 else nn.Identity()
    return evaluated(chunk, complex_batch()[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", [run_threads, run_processes])
def test_lazy_negatives_are_sent_as_they_are(start: Any) -> None:
    _, found = start(run_negative, 2)
    assert abs(found + complex_batch()[0].imag.numpy()).max() == 0


class Counting(nn.Module):
    """Returns a buffer that it overwrites in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(1)

    def forward(self, values: Tensor) -> Tensor:
        self.count += 1
        return self.count


class Static(nn.Module):
    """Returns a view of memory that all its forwards write to."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.empty(3, 2)

    def forward(self, values: Tensor) -> Tensor:
        self.memory[:2].copy_(values)
        return self.memory[:2]


class Late(nn.Module):
    """Returns a view of memory that it has never written to, and will write to in the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.next, self.memory = 1.0, torch.zeros(3)

    def forward(self, values: Tensor) -> Tensor:
        if self.next > 1:
            self.memory.fill_(self.next)
        self.next += 1
        return self.memory[:1]


class Keeping(nn.Module):
    """Returns its first output again and again, into which it writes the others."""

    def __init__(self) -> None:
        super().__init__()
        self.output: Tensor | None = None

    def forward(self, values: Tensor) -> Tensor:
        self.output = values + 1 if self.output is None else self.output.copy_(values + 1)
        return self.output


class Inferring(nn.Module):
    """Returns a tensor of inference mode, of which torch counts no versions."""

    def forward(self, values: Tensor) -> Tensor:
        with torch.inference_mode():
            return values * 2


def run_overwriting(kind: type[nn.Module], last: bool) -> Any:
    """One rank with all stages, whose values stay in its memory; or two."""
    context = current_context()
    chunks = [nn.Identity(), kind()] if last else [kind(), nn.Identity()]
    if context.pipeline_size == 1:
        return evaluated(nn.ModuleList(chunks), INPUTS, name="looped-bfs", ranks=1, chunks=2)
    return evaluated(chunks[context.pipeline_rank], INPUTS, name="gpipe")


INPUTS = torch.arange(16.0).view(8, 2)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_stage_overwrites_later_arrives_as_it_was(ranks: int, last: bool) -> None:
    assert run_threads(run_overwriting, ranks, Counting, last)[-1].tolist() == [1, 2, 3, 4]
    assert (run_threads(run_overwriting, ranks, Static, last)[-1] == INPUTS.numpy()).all()
    assert run_threads(run_overwriting, ranks, Late, last)[-1].tolist() == [0, 2, 3, 4]
    assert (run_threads(run_overwriting, ranks, Keeping, last)[-1] == INPUTS.numpy() + 1).all()


@pytest.mark.parametrize("last", [False, True])
def test_a_stage_may_compute_in_inference_mode(last: bool) -> None:
    assert (run_threads(run_overwriting, 2, Inferring, last)[-1] == 2 * INPUTS.numpy()).all()


class Masked(nn.Module):
    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        return hidden if mask is None else hidden * mask


class First(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def chunk_of_masked() -> nn.Module:
    return First() if current_context().pipeline_rank == 0 else Masked()


def run_mistyped() -> None:
    pipeline = Pipeline(chunk_of_masked(), schedule_of())
    for mask in (torch.ones(8, 1), Whole(torch.ones(2))):
        batch = {"hidden": INPUTS, "maks": mask, "id": "a name is no tensor"}
        with pytest.raises(
            UsageError, match=r"no stage takes the batch's entry 'maks': stages take \['hidden', 'mask'"
        ):
            execute_pipeline(iter([(batch, None)]), pipeline, forward_only=True)
        batch["mask"] = batch.pop("maks")
        execute_pipeline(iter([(batch, None)]), pipeline, forward_only=True)


@pytest.mark.parametrize("start", [run_threads, run_processes])
def test_an_entry_that_no_stage_names_is_an_error_on_all_ranks(start: Any) -> None:
    start(run_mistyped, 2)


class Attending(nn.Module):
    """Takes a mask between positions, which has no sample in it."""

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden @ mask


def run_whole(mask: Any) -> Any:
    chunk = First() if current_context().pipeline_rank == 0 else Attending()
    return evaluated(chunk, {"hidden": torch.eye(8), "mask": mask})


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", [run_threads, run_processes])
def test_an_entry_can_be_whole_for_every_microbatch(start: Any) -> None:
    mask = torch.ones(8, 8).tril()
    assert (start(run_whole, 2, Whole(mask))[1] == mask.numpy()).all()


class AnyKeywords(nn.Module):
    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return x + others["offset"]


def run_named_alike() -> Any:
    chunk = AnyKeywords() if current_context().pipeline_rank else Naming()
    return evaluated(chunk, {"x": INPUTS, "offset": INPUTS})


class Naming(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_an_entry_called_as_the_first_parameter_is_not_passed_twice() -> None:
    assert (run_threads(run_named_alike, 2)[1] == 3 * INPUTS.numpy()).all()


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        masked: Tensor = self.linear(hidden) * mask
        return masked


def run_compiled(compiled: bool) -> tuple[float | None, Any]:
    stage: Any = Weighted()
    if compiled and current_context().pipeline_rank == 1:
        stage = torch.compile(stage, backend="eager")
    pipeline = Pipeline(stage, schedule_of(), criterion=nn.functional.mse_loss)
    inputs = {"hidden": INPUTS.double(), "mask": torch.ones(8, 1, dtype=torch.float64)}
    output = execute_pipeline(iter([(inputs, INPUTS.double())]), pipeline)
    gradients = [parameter.grad.numpy() for parameter in pipeline.parameters() if parameter.grad is not None]
    return None if output.loss is None else output.loss.item(), gradients


def test_a_compiled_stage_takes_dict_inputs() -> None:
    for found, expected in zip(run_threads(run_compiled, 2, True), run_threads(run_compiled, 2, False), strict=True):
        assert found[0] == pytest.approx(expected[0])
        for mine, its in zip(found[1], expected[1], strict=True):
            assert abs(mine - its).max() <= 1e-12 * abs(its).max()


def run_one_replica_compiled() -> None:
    stage: Any = Weighted()
    if current_context().data_rank:
        stage = torch.compile(stage, backend="eager")
    Pipeline(stage, schedule_of())


def test_a_compiled_replica_has_the_names_of_a_plain_one() -> None:
    run_threads(run_one_replica_compiled, 4, data=2)


def inputs_that_train(weight: nn.Parameter) -> dict[str, Any]:
    """Made of a parameter outside of the pipeline: no leaves."""
    values = INPUTS.double()
    return {"hidden": values * weight, "mask": torch.exp(weight).expand(8, 1)}


def run_training_inputs(ranks: int) -> tuple[Any, Any]:
    weight = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    leaf = torch.ones(8, 2, dtype=torch.float64, requires_grad=True)
    name, options = ("1f1b", {}) if ranks > 1 else ("looped-bfs", {"chunks": 2})
    chunks = Weighted() if ranks > 1 else nn.ModuleList([Weighted(), Weighted()])
    pipeline = Pipeline(chunks, schedule_of(name, ranks, **options), criterion=nn.functional.mse_loss)
    for _ in range(2):
        inputs = inputs_that_train(weight)
        inputs["hidden"] = inputs["hidden"] * leaf
        execute_pipeline(iter([(inputs, INPUTS.double())]), pipeline)
    return plain(weight.grad), plain(leaf.grad)


@pytest.mark.parametrize("ranks", [1, 2])
def test_inputs_that_are_no_leaves_train(ranks: int) -> None:
    """Each rank has the part that its stages make of the inputs' gradient."""
    weight = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    leaf = torch.ones(8, 2, dtype=torch.float64, requires_grad=True)
    first, last = Weighted(), Weighted()
    for _ in range(2):
        inputs = inputs_that_train(weight)
        output = last(first(inputs["hidden"] * leaf, inputs["mask"]), inputs["mask"])
        nn.functional.mse_loss(output, INPUTS.double()).backward()
    results = run_threads(run_training_inputs, ranks, ranks)
    assert weight.grad is not None
    assert leaf.grad is not None
    assert sum(result[0] for result in results) == pytest.approx(weight.grad.item(), rel=1e-12)
    assert abs(results[0][1] - leaf.grad.numpy()).max() <= 1e-12


class AttendingToOne(Attending):
    """Takes a list of masks."""

    def forward(self, hidden: Tensor, mask: list[Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(hidden, mask[0])


def run_whole_that_trains(in_list: bool) -> None:
    weight = nn.Parameter(torch.eye(2, dtype=torch.float64))
    stage = AttendingToOne() if in_list else Attending()
    pipeline = Pipeline(stage, schedule_of(ranks=1), criterion=nn.functional.mse_loss)
    mask = weight.exp()
    inputs = {"hidden": INPUTS.double(), "mask": Whole([mask] if in_list else mask)}
    execute_pipeline(iter([(inputs, INPUTS.double())]), pipeline)
    expected = nn.Parameter(torch.eye(2, dtype=torch.float64))
    nn.functional.mse_loss(INPUTS.double() @ expected.exp(), INPUTS.double()).backward()
    torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("in_list", [False, True])
def test_a_whole_entry_trains(in_list: bool) -> None:
    run_threads(run_whole_that_trains, 1, in_list)


class Turned(nn.Module):
    """Takes values whose samples lie along dim 1, and positions whose samples do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(4))

    def forward(self, values: Tensor, positions: dict[str, Tensor]) -> Tensor:
        values = values + positions["of"].sum(0).T[..., None]
        for block in self.blocks:
            values = torch.tanh(block(values)).cumsum(0)  # along positions, not along samples
        return values


def turned() -> tuple[Tensor, Tensor, Tensor]:
    """Values of 5 positions and 7 samples, 3 numbers for each, and labels."""
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 7, 3), (3, 7, 5), (5, 7, 3)
    values, positions, labels = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return values, positions, labels


def along(values: Tensor, positions: Tensor, labels: Tensor) -> Any:
    return {"values": Along(values, 1), "positions": Along({"of": positions, "unit": "token"}, -2)}, Along(labels, 1)


def run_turned(module: nn.Module, schedule: str, divides: bool) -> tuple[float, Any, Any]:
    batch: Any = along(*turned())
    if divides:
        parts = zip(*(each.split([1, 3, 2, 1], 1) for each in turned()), strict=True)
        batch = Divided([along(*part) for part in parts])
    example = batch.microbatches[0] if divides else batch
    pipeline = Pipeline.from_module(
        copy.deepcopy(module), schedule_of(schedule), example, criterion=nn.functional.mse_loss
    )

    def kept(output: Tensor) -> Any:
        return {"all": Along(output, 1), "first": output[0]}

    output = execute_pipeline(iter([batch]), pipeline, return_outputs=kept, broadcast_loss=True)
    assert output.loss is not None
    gradients = {name: each.grad for name, each in pipeline.named_parameters() if each.grad is not None}
    return output.loss.item(), output.outputs, gradients


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe-v", "dualpipe"])
def test_samples_may_lie_along_another_dimension(schedule: str, divides: bool) -> None:
    """In inputs, in labels, and in outputs that are joined; dualpipe's last stages exchange theirs."""
    module, (values, positions, labels) = Turned(), turned()
    expected = module(values, {"of": positions})
    loss = nn.functional.mse_loss(expected, labels)
    loss.backward()
    for found, outputs, gradients in run_threads(run_turned, 2, module, schedule, divides):
        assert found == pytest.approx(loss.item(), rel=1e-12)
        if outputs is not None:
            torch.testing.assert_close(outputs["all"], expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(outputs["first"], expected[0], rtol=1e-12, atol=1e-12)
        for name, gradient in gradients.items():
            wanted = module.get_parameter(name).grad
            torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)


def run_turned_badly(batch: Any, keep: Any) -> str:
    pipeline = Pipeline.from_module(Turned(), schedule_of(ranks=1), along(*turned()), criterion=nn.functional.mse_loss)
    with pytest.raises(UsageError) as caught:
        execute_pipeline(iter([batch]), pipeline, return_outputs=keep)
    return str(caught.value)


def test_samples_along_another_dimension_that_do_not_fit() -> None:
    values, positions, labels = turned()
    for batch, keep, message in (
        (
            along(values, positions[:, :6], labels),
            False,
            "of a batch differ in dim 0: [6, 7]; each needs",
        ),
        (along(values[0, 0], positions, labels), False, "pipeflow.Along(value, 1) needs tensors of as many samples"),
        (along(values, positions, labels), True, "for a microbatch of 2 samples, and entries of the batch have"),
    ):
        [told] = run_threads(run_turned_badly, 1, batch, keep)
        assert message in told
