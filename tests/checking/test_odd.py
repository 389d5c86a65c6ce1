"""Odd models and loops: dummy losses, placeholders, sparse gradients, copies in another precision, values that are not
finite; and what must not be said of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from pipeflow.checking import Result, check, record, scripted
from pipeflow.checking.calls import _is_library
from pipeflow.checking.parts import find_masters, parts_of
from pipeflow.checking.runs import OutputRows, Rank, RecordedRun, load, unmatched
from pipeflow.checking.sketches import Block, row_sketches, sketch
from pipeflow.checking.two_runs import TwoRuns
from pipeflow.core.errors import UsageError
from pipeflow.testing import run_processes

WORDS, WIDTH, SAMPLES, STEPS = 20, 8, 8, 2
Gradients = dict[str, nn.Parameter]


class Net(nn.Module):
    """A model whose norm is used twice, with a cut of the graph before its second use."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.first, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.other, self.shift = 0, 0.0

    def forward(self, words: Tensor) -> Tensor:
        values = self.first(self.norm(self.embed((words + self.other) % WORDS)))
        cut = self.embed(words).detach()
        values = values + self.norm((cut + (torch.arange(WIDTH) * self.shift).to(cut.dtype)).requires_grad_())
        found: Tensor = self.head(values)
        return found


def samples() -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (STEPS, SAMPLES), generator=torch.Generator().manual_seed(1))
    return words, words.roll(1, 1)


def train(
    folder: Path,
    model: nn.Module | None = None,
    *,
    parts: int = 1,
    after: Callable[[Gradients], None] = lambda _: None,
    before_step: Callable[[Gradients], None] = lambda _: None,
    times: float = 1.0,
) -> Path:
    """A recorded job.

    Args:
        parts: of the accumulation.
        after: is called after each part.
        before_step: is called before the optimizer steps.
        times: factor of the loss.
    """
    model = Net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with record(folder, model):
        for words, labels in zip(*samples(), strict=True):
            optimizer.zero_grad()
            for given, wanted in zip(words.chunk(parts), labels.chunk(parts), strict=True):
                (nn.functional.cross_entropy(model(given), wanted) / parts * times).backward()
                after(dict(model.named_parameters()))
            before_step(dict(model.named_parameters()))
            optimizer.step()
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("plain"), parts=4)


def cause_of(result: Result) -> tuple[str, str]:
    assert result.cause is not None
    return result.cause.name, result.cause.evidence


class Sent(torch.autograd.Function):
    """Sends activations, and receives their gradients where a backward starts at a number that is no loss."""

    @staticmethod
    def forward(_: object, values: Tensor, dummy: float) -> Tensor:
        dist.send(values.detach(), 1)
        return torch.tensor(dummy)

    @staticmethod
    def backward(_: object, __: Tensor) -> tuple[Tensor, None]:
        gradient = torch.empty(SAMPLES, WIDTH)
        dist.recv(gradient, 1)
        return gradient, None


class Ends(nn.Module):
    """A tied embedding and head, or one of them on each rank, of which all are given the words."""

    def __init__(self, ranks: int, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.ranks, self.rank = ranks, rank
        self.embed: nn.Module = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.embed.weight = self.head.weight = weight
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if rank:
            del self.first
            self.embed = nn.Identity()
            self.embed.weight = weight
        if not rank and ranks > 1:
            del self.head, self.last

    def forward(self, words: Tensor) -> Tensor:
        if self.rank:
            received = torch.empty(SAMPLES, WIDTH)
            dist.recv(received, 0)
            self.received = received.requires_grad_()
            return self.head(self.last(self.embed(self.received)))  # type: ignore[no-any-return]  # a module's
        values: Tensor = self.first(self.embed(words))
        return self.head(self.last(values)) if self.ranks == 1 else values


def ends(folder: str, names: Sequence[tuple[str, float, float]]) -> None:
    """The jobs of these names on one rank or two, whose backwards start at a dummy, and send a multiple."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for name, dummy, times in names:
        model = Ends(ranks, rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with record(Path(folder, name), model):
            for words, labels in zip(*samples(), strict=True):
                optimizer.zero_grad()
                values = model(words)
                if rank == 0 and ranks > 1:
                    Sent.apply(values, dummy).backward()  # type: ignore[no-untyped-call]  # torch's
                else:
                    nn.functional.cross_entropy(values, labels).backward()
                if rank:
                    assert model.received.grad is not None
                    dist.send(model.received.grad * times, 0)
                if ranks > 1:
                    dist.all_reduce(model.embed.weight.grad)
                optimizer.step()


@pytest.fixture(scope="module")
def of_ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ends")
    run_processes(ends, 1, str(folder), [("plain", 0.0, 1.0)])
    run_processes(ends, 2, str(folder), [("zero", 0.0, 1.0), ("one", 1.0, 3.0)])
    return folder


def test_a_dummy_loss_and_a_placeholder_are_alike(of_ends: Path) -> None:
    result = check(of_ends / "plain", of_ends / "zero")
    assert result.alike, result
    assert not result.notes


def test_stages_whose_backward_starts_at_a_dummy_need_no_reduction(of_ends: Path) -> None:
    assert cause_of(check(of_ends / "plain", of_ends / "one"))[0] != "missing_reduction"


def test_sparse_gradients_are_compared(plain: Path, tmp_path: Path) -> None:
    assert check(plain, train(tmp_path / "sparse", Net(sparse=True))).alike

    def doubled(parameters: Gradients) -> None:
        gradient = parameters["embed.weight"].grad
        assert gradient is not None
        parameters["embed.weight"].grad = gradient * 2

    result = check(plain, train(tmp_path / "wrong", Net(sparse=True), before_step=doubled))
    assert result.first is not None
    assert (result.first.parameter, cause_of(result)[0]) == ("embed.weight", "scale")


def test_parameters_without_a_shape_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"weight has no shape yet: call the model once"):
        record(tmp_path, nn.LazyLinear(3)).__enter__()


def test_a_model_of_which_only_a_part_is_recorded_is_refused(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with record(tmp_path, model.embed):
        model(samples()[0][0]).sum().backward()
        with pytest.raises(UsageError, match="record all modules"):
            optimizer.step()


def with_copies(
    folder: Path,
    parts: int,
    *,
    flat: bool = False,
    overwritten: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    rate: float = 0.1,
) -> Path:
    """A job of this dtype, whose optimizer steps float32 copies, each or one for all, that have the gradients."""
    model = Net().to(dtype)
    parameters = [*model.parameters()]
    copies = [each.detach().float() for each in parameters]
    copies = [torch.cat([each.flatten() for each in copies])] if flat else copies
    optimizer = torch.optim.SGD(copies, rate)
    with record(folder, model):
        for words, labels in zip(*samples(), strict=True):
            optimizer.zero_grad()
            for given, wanted in zip(words.chunk(parts), labels.chunk(parts), strict=True):
                (nn.functional.cross_entropy(model(given).float(), wanted) / parts).backward()
                found = [each.grad.float() for each in parameters if each.grad is not None]
                found = [torch.cat([each.flatten() for each in found])] if flat else found
                for copy, gradient in zip(copies, found, strict=True):
                    copy.grad = gradient if copy.grad is None or overwritten else copy.grad + gradient
                model.zero_grad()
            optimizer.step()
            with torch.no_grad():
                flat_values = torch.cat([each.flatten() for each in copies])
                for each, values in zip(parameters, flat_values.split([*map(torch.numel, parameters)]), strict=True):
                    each.copy_(values.view_as(each))
    return folder


def test_gradients_of_copies_in_another_precision_are_compared(tmp_path: Path) -> None:
    one = with_copies(tmp_path / "one", 1)
    result = check(one, with_copies(tmp_path / "four", 4))
    assert (result.alike, result.compared["gradients"], result.notes) == (True, 6 * STEPS, [])
    result = check(one, with_copies(tmp_path / "wrong", 4, overwritten=True))
    assert result.first is not None
    assert (result.first.what, cause_of(result)[0]) == ("gradient", "missing_microbatch")


@pytest.mark.parametrize(("dtype", "rate"), [(torch.float32, 0.1), (torch.bfloat16, 0.0)])
def test_gradients_that_no_one_sees_are_noted(tmp_path: Path, dtype: torch.dtype, rate: float) -> None:
    one, flat = (
        with_copies(tmp_path / name, 1, flat=name == "flat", dtype=dtype, rate=rate) for name in ("one", "flat")
    )
    for result in (check(flat, flat), check(one, flat)):
        assert result.alike, result
        assert [note[:50] for note in result.notes] == ["the gradients of embed.weight, first.bias, first.w"] * STEPS


@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_the_first_value_that_is_not_finite(plain: Path, tmp_path: Path, what: str) -> None:
    def spoil(parameters: Gradients) -> None:
        gradient = parameters["first.weight"].grad
        assert gradient is not None
        gradient[0, 0] = torch.inf

    if what == "gradient":
        result = check(plain, train(tmp_path / "wrong", before_step=spoil))
    else:
        result = check(plain, train(tmp_path / "wrong", times=torch.nan))
    assert result.first is not None
    name = "first.weight" if what == "gradient" else ""
    assert (result.first.what, result.first.parameter, result.first.step) == (what, name, 0)
    assert cause_of(result)[0] == "unknown"
    assert "in the candidate that are not finite" in cause_of(result)[1]
    assert "in the reference that are not finite" in cause_of(check(tmp_path / "wrong", plain))[1]


def test_a_row_of_no_numbers_leaves_the_others_alike() -> None:
    values = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).double().square().numpy()
    wrong = values.copy()
    wrong[2] = torch.nan
    one, other = (OutputRows(each, [(0,)] * 4, [0] * 4, (3,)) for each in (values, wrong))
    assert unmatched(one, other, 1e-6)[:2] == ([2], [2])


def halved(parameters: Gradients) -> None:
    for each in parameters.values():
        assert each.grad is not None
        each.grad *= 0.5


def test_samples_that_count_by_powers_of_a_factor(plain: Path, tmp_path: Path) -> None:
    result = check(plain, train(tmp_path / "wrong", parts=4, after=halved, times=2.0))
    name, said = cause_of(result)
    assert (name, result.to_json()["factor"]) == ("scale", pytest.approx(0.5, rel=1e-3))
    assert "samples count 1, 0.5, 0.25, 0.125 times" in said


def test_two_kinds_of_samples_are_no_powers(plain: Path, tmp_path: Path) -> None:
    assert cause_of(check(plain, train(tmp_path / "wrong", parts=2, after=halved, times=2.0)))[0] == "masked_tokens"


def test_a_module_that_is_used_twice_is_not_computed_again(plain: Path, tmp_path: Path) -> None:
    def noisy(parameters: Gradients) -> None:
        gradient = parameters["head.weight"].grad
        assert gradient is not None
        gradient += 0.1 * gradient.std() * torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0))

    assert cause_of(check(plain, train(tmp_path / "wrong", before_step=noisy)))[0] != "order"


def test_rows_of_a_norm_are_not_elsewhere(plain: Path, tmp_path: Path) -> None:
    model = Net()
    model.shift = 0.1
    result = check(plain, train(tmp_path / "wrong", model))
    assert result.first is not None
    assert (result.first.module, cause_of(result)[0]) == ("norm", "unknown")


def test_inputs_that_are_words_are_not_called_right(plain: Path, tmp_path: Path) -> None:
    model = Net()
    model.other = 3
    result = check(plain, train(tmp_path / "wrong", model))
    assert result.first is not None
    assert result.first.module == "embed"
    assert "its inputs were not all compared" in cause_of(result)[1]


def on_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")


def test_parts_of_ranks_with_factors_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, values = nn.Linear(WIDTH, 4), torch.randn(SAMPLES, WIDTH)

    def run(folder: Path, model: nn.Module, times: float, rank: int | None) -> None:
        parts = None if rank is None else lambda *_: (0, rank, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with record(folder, model, parts=parts):
            outputs = model(values)
            outputs.backward(outputs.detach())
            for each in model.parameters():
                assert each.grad is not None
                each.grad *= times
            optimizer.step()

    parts = [nn.Linear(WIDTH, 2) for _ in range(2)]
    for rank, part in enumerate(parts):
        part.load_state_dict({name: each.chunk(2)[rank].clone() for name, each in whole.state_dict().items()})
    run(tmp_path / "plain", whole, 1.0, None)
    for rank, part in enumerate(parts):
        on_rank(monkeypatch, rank)
        run(tmp_path / "parts", part, (0.5, 0.8)[rank], rank)
    assert cause_of(check(tmp_path / "plain", tmp_path / "parts")) == (
        "scale",
        "the parts of ranks 0, 1 are 0.5, 0.8 times the reference's",
    )


def test_a_norm_for_torchs_public_function(tmp_path: Path) -> None:
    def clip(times: float) -> Callable[[Gradients], None]:
        def clipped(parameters: Gradients) -> None:
            norm = get_total_norm([each.grad for each in parameters.values() if each.grad is not None])
            clip_grads_with_norm_(parameters.values(), 0.01, norm * times)

        return clipped

    one = train(tmp_path / "one", before_step=clip(1.0))
    result = check(one, train(tmp_path / "wrong", before_step=clip(1.5)))
    assert result.first is not None
    assert (result.first.what, cause_of(result)[0]) == ("norm", "norm")


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, words: Tensor) -> Tensor:
        values = torch.nn.functional.one_hot(words, WORDS).float()[:, :WIDTH]
        found: Tensor = torch.fft.irfft(torch.fft.rfft(values) * self.filter, n=WIDTH)
        return found


def test_imaginary_parts_are_compared(tmp_path: Path) -> None:
    def lost(gradient: Tensor) -> Tensor:
        return torch.complex(gradient.real, 0.0 * gradient.imag)

    def job(folder: Path, is_lost: bool) -> Path:
        model = Filter()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with record(folder, model, whole="*"):
            model(samples()[0][0]).square().sum().backward()
            assert model.filter.grad is not None
            model.filter.grad = lost(model.filter.grad) if is_lost else model.filter.grad
            optimizer.step()
        return folder

    result = check(job(tmp_path / "one", False), job(tmp_path / "wrong", True))
    assert result.first is not None
    assert (result.first.what, result.first.parameter) == ("gradient", "filter")


class Experts(nn.Module):
    def __init__(self, own: range) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, 1)
        experts = [nn.Linear(WIDTH, 1) for _ in range(4)]
        self.experts = nn.ModuleList(experts[index] for index in own)
        self.own = own

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.router(values) + sum(expert(values) for expert in self.experts)
        return found


def test_ranks_with_some_of_the_experts_are_no_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(folder: Path, own: range) -> None:
        model = Experts(own)
        with record(folder, model, names=lambda name: name.replace("experts.0", f"experts.{own[0]}")):
            model(torch.ones(SAMPLES, WIDTH)).sum().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()

    run(tmp_path / "plain", range(2))
    for rank in range(2):
        on_rank(monkeypatch, rank)
        run(tmp_path / "ranks", range(rank, rank + 1))
    assert TwoRuns(load(tmp_path / "plain"), load(tmp_path / "ranks")).stages == {}


def test_the_runner_of_scripts_is_no_code_of_the_job() -> None:
    assert _is_library(str(scripted.__file__))


def test_zeros_of_other_stages_are_no_losses() -> None:
    ranks = [
        Rank(rank, {}, {}, [{"loss": [{"value": value} for value in values]}])
        for rank, values in enumerate([(0.0, 0.0), (2.0, 0.0)])
    ]
    assert RecordedRun(Path(), ranks).losses(0) == {1: [2.0, 0.0]}
    assert RecordedRun(Path(), ranks[:1]).losses(0) == {0: [0.0, 0.0]}


@pytest.mark.parametrize("shape", [(6,), (6, 4)])
def test_sketches_are_as_exact_under_autocast(shape: tuple[int, ...]) -> None:
    block = Block(torch.randn(shape, generator=torch.Generator().manual_seed(0)), (0,) * len(shape))
    wanted, rows = sketch(block), row_sketches(block.values, (0,))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sketch(block), wanted)
        assert torch.equal(row_sketches(block.values, (0,)), rows)


def test_modules_that_change_their_input_are_compared(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Identity())
    with record(tmp_path, model):
        model(torch.ones(SAMPLES, WIDTH)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert [name for name, _ in load(tmp_path).outputs(0)] == ["0", "1", ""]


def test_a_parameter_with_the_values_of_another_has_no_copy_that_is_known() -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)).bfloat16()
    parts = parts_of([model], None, None)
    find_masters(parts, [each.detach().float() for each in model.parameters()])
    assert all(part.master is None for part in parts)


def test_of_many_rows_those_that_have_no_like_are_found_and_measured() -> None:
    draw = np.random.default_rng(0)
    values = draw.normal(size=(4000, 9))
    values[:, 8] = 1.0
    order = draw.permutation(len(values))
    others = values[order] * (1 + 1e-9)
    others[:5] += 1.0
    mine, theirs = (OutputRows(each, [(0,)] * len(each), [0] * len(each), ()) for each in (values, others))
    found = unmatched(mine, theirs, 1e-6)
    assert sorted(found.reference) == sorted(order[:5])
    assert found.candidate == [0, 1, 2, 3, 4]
    nearest = [np.sqrt(np.square(values[:, :8] - each[:8]).mean(axis=1)).min() for each in others[:5]]
    back = [np.sqrt(np.square(others[:, :8] - values[each, :8]).mean(axis=1)).min() for each in order[:5]]
    assert found.error == pytest.approx(max(*nearest, *back) / mine.size)
    theirs.values[:, 0] += 100.0  # now none has, and only some are measured
    assert len(unmatched(mine, theirs, 1e-6).reference) == len(values)


def test_too_many_rows_that_are_alike_are_refused() -> None:
    values = np.zeros((20_000, 9))
    values[:, 8], values[:, 1] = 1.0, np.arange(len(values))
    others = values + 0.5 * (np.arange(9) == 1)
    mine, theirs = (OutputRows(each, [(0,)] * len(each), [0] * len(each), ()) for each in (values, others))
    with pytest.raises(UsageError, match=r"20,000 rows, of which too many are alike: record fewer samples"):
        unmatched(mine, theirs, 1e-6)
