"""A run that is interrupted at any moment and continued ends as one that nothing happens to, bit for bit."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pipeflow import Pipeline, UsageError, get_dataloader, make_schedule, save_checkpoint
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.agreement import all_gather
from pipeflow.optim import MasterWeights
from pipeflow.testing import run_threads
from pipeflow.training import CheckpointHook, Engine, Hook, Step, Trainer
from tests.training.resuming import (
    MODEL,
    SAMPLES,
    Kill,
    KilledError,
    Samples,
    loaders,
    make_trainer,
    require_same,
    result,
    together,
    undisturbed,
)

EPOCHS = 2


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is lost here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def interrupted(folder: Path, moments: list[int], size: int, accumulation: int, options: dict[str, Any]) -> Any:
    """Each life ends at one of the moments, but for the last. What it has at the end, and what it continued from."""
    continued = []
    for number, moment in enumerate([*moments, 10**6]):
        checkpoints = CheckpointHook(folder, **options)
        trainer = make_trainer(checkpoints, [Kill(moment, 50 + 20 * (number % 2))], accumulation)
        with suppress(KilledError):
            trainer.fit(epochs=EPOCHS, **loaders(size))
        continued.append(checkpoints.resumed_from and checkpoints.resumed_from.name)
    return result(trainer), continued


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("size", "accumulation", "options"),
    [
        (5, 1, {"unit": "step", "best": "loss"}),  # the last batch of an epoch is short
        (5, 2, {"unit": "step", "every": 2, "asynchronous": True}),  # and fills no step
        (3, 3, {"unit": "step", "keep": 1}),  # two batches fill no step
        (4, 1, {"unit": "epoch", "best": "accuracy", "asynchronous": True}),
    ],
    ids=str,
)
def test_a_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, size: int, accumulation: int, options: dict[str, Any]
) -> None:
    [expected] = run_threads(undisturbed, 1, EPOCHS, size, accumulation)
    [(found, continued)] = run_threads(interrupted, 1, tmp_path, [26, 9, 31], size, accumulation, options)
    require_same(found, expected)
    assert continued[0] is None
    assert continued[-1] is not None


def in_half(folder: Path, moments: list[int]) -> tuple[dict[str, Any], int]:
    """What it has at the end, and how many steps overflowed in its last life."""
    for moment in (*moments, 10**6):
        trainer = make_trainer(CheckpointHook(folder, unit="step"), [Kill(moment, 50)], is_half=True)
        with suppress(KilledError):
            trainer.fit(epochs=EPOCHS, **loaders(is_half=True))
    optimizer = trainer.engine.optimizer
    assert isinstance(optimizer, MasterWeights)
    return result(trainer), optimizer.skipped


def test_masters_spread_states_and_the_loss_scale(tmp_path: Path) -> None:
    """On two replicas, of which each keeps a half of the optimizer's states."""
    expected = run_threads(in_half, 2, tmp_path / "undisturbed", [], data=2)
    found = run_threads(in_half, 2, tmp_path / "run", [8, 11], data=2)
    for (mine, _), (its, overflows) in zip(found, expected, strict=True):
        require_same(mine, its)
        assert 0 < overflows < 6


@pytest.mark.exhaustive
def test_every_moment(tmp_path: Path) -> None:
    """Among them the last step of an epoch, the evaluation after it, and the very end."""
    [expected] = run_threads(undisturbed, 1, EPOCHS, 8, 1)
    for moment in range(1, 29):
        folder = tmp_path / str(moment)
        [(found, _)] = run_threads(interrupted, 1, folder, [moment], 8, 1, {"unit": "step"})
        require_same(found, expected)


class StopAt(Hook):
    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, trainer: Trainer, step: Step) -> None:
        trainer.should_stop = trainer.should_stop or trainer.engine.steps == self.step


def stopped(folder: Path, step: int, size: int, accumulation: int) -> tuple[list[int], int]:
    """The samples that this replica read before the run stopped."""
    data = Samples()
    trainer = make_trainer(CheckpointHook(folder), [StopAt(step)], accumulation)
    trainer.fit(epochs=EPOCHS, **loaders(size, data))
    return data.read, trainer.engine.steps


def continued(folder: Path, size: int, accumulation: int) -> tuple[list[int], dict[str, Any]]:
    """The samples that it read of the epoch in which it had stopped, and what it has at the end."""
    data, read = Samples(), list[int]()

    class Epoch(Hook):
        def after_training(self, trainer: Trainer) -> None:
            read.extend(data.read if not read else [])

    trainer = make_trainer(CheckpointHook(folder), [Epoch()], accumulation)
    trainer.fit(epochs=EPOCHS, **loaders(size, data))
    return read, result(trainer)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("before", "after", "accumulation", "size", "is_exact"),
    [
        ((1, 1), (2, 1), 1, 4, True),
        ((2, 1), (1, 1), 1, 4, True),
        ((2, 2), (2, 1), 1, 4, False),
        ((1, 2), (1, 1), 2, 2, False),  # as many samples in a step
        ((1, 1), (1, 2), 1, 4, False),
    ],
    ids=str,
)
def test_another_layout_reads_every_sample_once(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int], accumulation: int, size: int, is_exact: bool
) -> None:
    """24 samples: after the third of six steps, twelve are left."""
    (stages, replicas), (stages_after, replicas_after) = before, after
    first = run_threads(stopped, stages * replicas, tmp_path, 3, 4, 1, data=replicas)
    rest = run_threads(continued, stages_after * replicas_after, tmp_path, size, accumulation, data=replicas_after)
    read = [sample for each in first[::stages] for sample in each[0]]
    read += [sample for each in rest[::stages_after] for sample in each[0]]
    assert sorted(read) == list(range(SAMPLES))
    assert {steps for _, steps in first} == {3}
    found, expected = together([each for _, each in rest]), together(run_threads(undisturbed, 1, EPOCHS, 4, 1))
    if is_exact:
        require_same(found, expected)
    assert found["counts"] == expected["counts"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
    for name, weight in found["weights"].items():
        numpy.testing.assert_allclose(weight, expected["weights"][name], rtol=0, atol=1e-10)


def whole_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def dyadic(folder: Path, size: int, accumulation: int, stop: int) -> tuple[int, dict[str, Any]]:
    """Trains for one epoch with numbers of which all sums are exact, in whatever order."""
    context, schedule = current_context(), make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=2)
    stage = nn.ModuleDict({str(context.pipeline_rank): nn.Linear(4, 4, bias=False)})
    layer = stage[str(context.pipeline_rank)]
    assert isinstance(layer, nn.Linear)
    layer.weight = nn.Parameter(whole_numbers(4, 4, seed=context.pipeline_rank))
    stage.forward = layer.forward
    pipeline = Pipeline(stage, schedule, criterion=lambda outputs, labels: (outputs * labels).mean())
    engine = Engine(pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.25), gradient_accumulation=accumulation)
    data = TensorDataset(whole_numbers(32, 4, seed=8), whole_numbers(32, 4, seed=9))
    loader = get_dataloader(data, size // context.data_size, shuffle=True)
    Trainer(engine, [CheckpointHook(folder), StopAt(stop)]).fit(loader, 1)
    return engine.steps, {"weights": {str(context.pipeline_rank): layer.weight.detach().numpy().copy()}}


@pytest.mark.parametrize(("size", "accumulation"), [(8, 1), (4, 2)])
def test_half_the_data_ranks_end_with_the_same_bits(tmp_path: Path, size: int, accumulation: int) -> None:
    """The batch of a step being the same, by larger batches of a replica or by more of them."""
    expected = run_threads(dyadic, 4, tmp_path / "undisturbed", 8, 1, -1, data=2)
    run_threads(dyadic, 4, tmp_path / "run", 8, 1, 2, data=2)
    found = run_threads(dyadic, 2, tmp_path / "run", size, accumulation, -1)
    assert {steps for steps, _ in (*found, *expected)} == {4}
    require_same(together([each for _, each in found]), together([each for _, each in expected]))


def fitted_again(folder: Path | None, steps: int, loader: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Stopped within an epoch and trained on in the same process; and undisturbed."""
    results = []
    for stops in ([steps], []):
        trainer = make_trainer(None if folder is None else CheckpointHook(folder / str(len(stops))))
        given = loaders()
        if loader == "list":
            given["loader"] = list(given["loader"])
        for stop in (*stops, None):
            trainer.fit(epochs=EPOCHS, max_steps=stop, **given)
        results.append(result(trainer))
    return results[0], results[1]


@pytest.mark.some(2)
@pytest.mark.parametrize("loader", ["parallel", "list"])
@pytest.mark.parametrize("steps", [2, 6, 7])
def test_a_second_fit_goes_on(tmp_path: Path, steps: int, loader: str) -> None:
    [(found, expected)] = run_threads(fitted_again, 1, tmp_path if steps == 2 else None, steps, loader)
    require_same(found, expected)


def max_steps(folder: Path) -> dict[str, Any]:
    """Two lives, of which the first is told to stop, the second to go on as far as that."""
    for stop in (4, 8):
        trainer = make_trainer(CheckpointHook(folder))
        trainer.fit(epochs=EPOCHS, max_steps=stop, **loaders())
    return result(trainer)


def test_max_steps_counts_those_of_all_lives(tmp_path: Path) -> None:
    [found] = run_threads(max_steps, 1, tmp_path)
    [expected] = run_threads(undisturbed, 1, EPOCHS, 4, 1, 8)
    require_same(found, expected)


def killed_at_its_end(folder: Path, moments: list[int]) -> dict[str, Any]:
    for moment in (*moments, 10**6):
        trainer = make_trainer(CheckpointHook(folder, unit="step"), [Kill(moment, 70)])
        with suppress(KilledError):
            trainer.fit(epochs=EPOCHS, max_steps=6, **loaders())
    return result(trainer)


def test_the_last_epoch_is_evaluated_where_no_step_is_left(tmp_path: Path) -> None:
    """It is killed after the sixth step, with which training ends and the first of two epochs, too."""
    [expected] = run_threads(undisturbed, 1, EPOCHS, 4, 1, 6)
    [found] = run_threads(killed_at_its_end, 1, tmp_path, [14])
    require_same(found, expected)
    assert found["counts"][:2] == (1, 6)


def larger_batches(folder: Path) -> tuple[list[int], int, int]:
    """Four of 24 samples are left of the first epoch, then batches have eight of them."""
    make_trainer(CheckpointHook(folder)).fit(epochs=EPOCHS, max_steps=5, **loaders())
    data = Samples()
    trainer = make_trainer(CheckpointHook(folder))
    loader = get_dataloader(data, 8, shuffle=True, drop_last=True)
    trainer.fit(loader, EPOCHS, test_loader=loaders()["test_loader"])
    return sorted(data.read), trainer.epoch, trainer.engine.steps


def test_what_is_left_may_fill_no_batch(tmp_path: Path) -> None:
    assert run_threads(larger_batches, 1, tmp_path) == [(list(range(SAMPLES)), 2, 8)]


class OwnState(list[Any]):
    """Batches of a loader that knows by itself where it is."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__(batches)
        self.start = self.next = self.loads = 0

    def __iter__(self) -> Any:
        self.next, self.start = self.start, 0
        while self.next < len(self):
            self.next += 1
            yield self[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start, self.loads = state["next"], self.loads + 1


class Drawing(list[Any]):
    """Batches of a loader that draws random numbers whenever a pass begins, as torch's do."""

    def __iter__(self) -> Any:
        torch.rand(3)
        return super().__iter__()


def other_loaders(folder: Path, kind: str) -> tuple[Any, Any, list[int]]:
    kinds: dict[str, Any] = {"list": list, "own": OwnState, "drawing": Drawing}
    batches, results, loads = list(loaders()["loader"]), [], list[int]()
    for where, moments in (("run", [13]), ("undisturbed", [])):
        for moment in (*moments, 10**6):
            torch.manual_seed(0)
            trainer = make_trainer(CheckpointHook(folder / where, unit="step"), [Kill(moment, 50)])
            loader = kinds[kind](batches)
            try:
                trainer.fit(loader, EPOCHS, test_loader=loaders()["test_loader"])
            except KilledError:
                continue
        results.append((result(trainer), torch.get_rng_state().tolist()))
        loads.append(getattr(loader, "loads", 0))
    return results[0], results[1], loads


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", ["list", "own", "drawing"])
def test_other_loaders(tmp_path: Path, kind: str) -> None:
    [((found, state), (expected, wanted), loads)] = run_threads(other_loaders, 1, tmp_path, kind)
    require_same(found, expected)
    assert state == wanted
    assert loads == [int(kind == "own"), 0]


def kept(folder: Path, options: dict[str, Any]) -> tuple[list[str], str, float]:
    values = iter([3.0, 1.0, 2.0, 2.5, 4.0, 0.5])

    class Told(Hook):
        def after_evaluation(self, trainer: Trainer) -> None:
            trainer.metrics["test"]["loss"] = next(values)

    hook = CheckpointHook(folder, best="loss", **options)
    trainer = make_trainer(hook, [Told()])
    trainer.fit(epochs=5, **loaders(12))
    link = folder / "best"
    return sorted(each.name for each in folder.glob("step-*")), link.resolve().name, hook.best_value


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_and_the_best_are_kept(tmp_path: Path, asynchronous: bool) -> None:
    """Two steps an epoch; the second epoch is best, in the other direction the fifth."""
    folder = tmp_path / "lowest"
    [found] = run_threads(kept, 1, folder, {"asynchronous": asynchronous})
    assert found == (["step-00000004", "step-00000008", "step-00000010"], "step-00000004", 1.0)
    [found] = run_threads(kept, 1, tmp_path / "highest", {"best_is": "highest", "every": 2, "keep": 1})
    assert found == (["step-00000010"], "step-00000010", 4.0)
    (folder / "best").unlink()  # as if it had been killed before it was made
    [(_, best, value)] = run_threads(kept, 1, folder, {})
    assert (best, value) == ("step-00000004", 1.0)


def without_links(folder: Path) -> None:
    make_trainer(CheckpointHook(folder)).fit(epochs=1, max_steps=1, **loaders())
    with pytest.raises(UsageError, match="cannot be written on rank 0: no links here"):
        make_trainer(CheckpointHook(folder, best="loss")).fit(epochs=1, **loaders())


def test_links_are_needed_for_the_best_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    run_threads(without_links, 1, tmp_path)


def refusals(folder: Path) -> list[str]:
    make_trainer(CheckpointHook(folder / "run")).fit(epochs=EPOCHS, max_steps=2, **loaders())
    (folder / "file").write_text("", encoding="utf-8")
    messages = []

    def attempt(hook: CheckpointHook, **options: Any) -> None:
        trainer = make_trainer(hook)
        before = result(trainer)["weights"]
        with pytest.raises(UsageError) as raised:
            trainer.fit(**{**loaders(), "epochs": EPOCHS, **options})
        messages.append(str(raised.value))
        assert all(numpy.array_equal(each, before[name]) for name, each in result(trainer)["weights"].items())

    run = folder / "run"
    attempt(CheckpointHook(folder / "file" / "run"))
    attempt(CheckpointHook(run, resume=False))
    attempt(CheckpointHook(run), loader=get_dataloader(Samples(21), 4))
    attempt(CheckpointHook(run), loader=[(torch.zeros(4, 3, 6), torch.zeros(4, 3, 6))] * 6)
    attempt(CheckpointHook(folder / "best", best="loss"), test_loader=None)
    other = nn.Sequential(nn.Linear(2, 2))
    save_checkpoint(folder / "other" / "step-1", other)
    attempt(CheckpointHook(folder / "other"))
    mine = make_trainer(None).engine
    save_checkpoint(folder / "foreign" / "step-1", mine.model, mine.optimizer, extra={"by": "hand"})
    attempt(CheckpointHook(folder / "foreign"))
    trainer = make_trainer(CheckpointHook(run))
    trainer.engine.scheduler = None
    with pytest.raises(UsageError) as raised:
        trainer.fit(epochs=EPOCHS, **loaders())
    messages.append(str(raised.value))
    if current_context().rank == 0:
        for file in run.glob("step-*/checkpoint.json"):
            file.write_text("{}", encoding="utf-8")
    with current_context().alarm.raised_everywhere():
        all_gather(current_context().world, [0.0])
    attempt(CheckpointHook(run))
    return messages


def test_what_cannot_go_on_is_said_before_anything_changes(tmp_path: Path) -> None:
    """On every rank alike."""
    wanted = (
        "cannot be written on rank 0: .*Not a directory",
        "checkpoints of another run: choose another folder",
        "of an epoch of 24 samples, but this loader has 21",
        "of a loader of get_dataloader, but this is a loader without a state_dict",
        "pass a test_loader to fit",
        "other/step-1",
        "step-1 was not saved by a CheckpointHook",
        "states of StepLR, ExponentialLR, but this run has ExponentialLR",
        "has checkpoints, and none is whole",
    )
    for messages in run_threads(refusals, 2, tmp_path):
        for message, pattern in zip(messages, wanted, strict=True):
            assert re.search(pattern, message), message


def other_errors(folder: Path) -> list[str]:
    messages = []

    def attempt(what: Any) -> None:
        with pytest.raises(UsageError) as raised:
            what()
        messages.append(str(raised.value))

    attempt(lambda: CheckpointHook(folder, 0))
    attempt(lambda: CheckpointHook(folder, unit="batch"))  # type: ignore[arg-type]  # wrong on purpose
    attempt(lambda: CheckpointHook(folder, keep=0))
    attempt(lambda: CheckpointHook(folder, best="distance"))
    hook = CheckpointHook(folder / "metric", best="distance", best_is="lowest")
    attempt(lambda: make_trainer(hook).fit(epochs=1, **loaders()))
    return messages


def test_misuse(tmp_path: Path) -> None:
    wanted = ("every must be", "unit must be", "keep must be", "best_is='lowest' or 'highest'", "it has loss, accuracy")
    [messages] = run_threads(other_errors, 1, tmp_path)
    for message, part in zip(messages, wanted, strict=True):
        assert part in message


def lists_of_replicas(folder: Path, samples: int) -> str:
    batches = list(loaders(samples)["loader"])
    try:
        make_trainer(CheckpointHook(folder)).fit(batches, EPOCHS, max_steps=2)
    except UsageError as error:
        return str(error)
    return ""


def test_a_list_goes_on_with_as_many_replicas_only(tmp_path: Path) -> None:
    assert run_threads(lists_of_replicas, 2, tmp_path, 4, data=2) == [""] * 2
    [message] = run_threads(lists_of_replicas, 1, tmp_path, 4)
    assert "on 2 data ranks, but there are 1 now" in message
    [message, _] = run_threads(lists_of_replicas, 2, tmp_path, 8, data=2)
    assert "after 2 batches of an epoch of 6 batches, but this loader has 3" in message


def shuffled(folder: Path) -> list[int]:
    """The epochs that a sampler was told of; and a loader that shuffles, within an epoch."""
    dataset = TensorDataset(*MODEL.batch(8))
    told = list[int]()

    class Sampler(DistributedSampler[Any]):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    sampler = Sampler(dataset, 1, 0)
    make_trainer(None).fit(DataLoader(dataset, 4, sampler=sampler), 2, test_loader=[MODEL.batch(4)])
    for steps in (1, 2):
        loader = DataLoader(dataset, 4, shuffle=True)
        make_trainer(CheckpointHook(folder)).fit(loader, 1, test_loader=[MODEL.batch(4)], max_steps=steps)
    return told


def test_loaders_of_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "pipeflow"):
        assert run_threads(shuffled, 1, tmp_path) == [[0, 1]]
    assert f"continues from {tmp_path / 'step-00000001'}: 0 epochs and 1 steps" in caplog.text
    assert "a DataLoader that shuffles has another order each time" in caplog.text


def test_a_file_in_the_place_of_the_link_to_the_best_stays(tmp_path: Path) -> None:
    (tmp_path / "best").write_text("years", encoding="utf-8")

    def rank() -> None:
        trainer = make_trainer(CheckpointHook(tmp_path, best="loss"), [], 1)
        with pytest.raises(UsageError, match="best is not a link to the best checkpoint: choose another folder"):
            trainer.fit(epochs=1, **loaders(4))

    run_threads(rank, 1)
    assert [file.read_text(encoding="utf-8") for file in tmp_path.iterdir()] == ["years"]
