"""What goes wrong with checkpoints: every rank raises one clear line, nothing is half loaded, nothing is lost."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeflow import (
    PipeflowError,
    Pipeline,
    PipelineError,
    UsageError,
    latest_checkpoint,
    load_checkpoint,
    make_schedule,
    save_checkpoint,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from pipeflow.training.checkpoint.folders import PROCESS
from pipeflow.training.checkpoint.task import Task
from tests.checkpoint.checkpoints import Run, under

HERE = PROCESS[:8]  # the machine


def model(fill: float = 0.0, width: int = 3) -> nn.Module:
    module = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2))
    for parameter in module.parameters():
        nn.init.constant_(parameter, fill)
    return module


def filled(module: nn.Module) -> set[float]:
    return {value for parameter in module.parameters() for value in parameter.flatten().tolist()}


def data_file(path: Path) -> Path:
    return max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)


def truncate(path: Path) -> Path:
    file = data_file(path)
    file.write_bytes(file.read_bytes()[:-7])
    return file


def flip(path: Path) -> Path:
    file = data_file(path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    return file


def remove(path: Path) -> Path:
    file = data_file(path)
    file.unlink()
    return file


def cut_manifest(path: Path) -> Path:
    file = path / "checkpoint.json"
    file.write_bytes(file.read_bytes()[:100])
    return file


@pytest.mark.parametrize("damage", [truncate, flip, remove, cut_manifest])
def test_a_damaged_file_is_named_and_nothing_is_changed(tmp_path: Path, damage: Callable[[Path], Path]) -> None:
    save_checkpoint(tmp_path / "step", model(1))
    file = damage(tmp_path / "step")
    untouched = model(2)
    with pytest.raises(UsageError, match=f"{file} is (damaged|missing)"):
        load_checkpoint(tmp_path / "step", untouched)
    assert filled(untouched) == {2}


def test_a_path_that_is_none(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step", model())
    with pytest.raises(UsageError, match=r"nothing is not a checkpoint: it does not exist"):
        load_checkpoint(tmp_path / "nothing", model())
    with pytest.raises(UsageError, match=r"has no checkpoint.json.*latest_checkpoint\(folder\) finds"):
        load_checkpoint(tmp_path, model())


def test_a_newer_format(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step", model())
    file = tmp_path / "step" / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"format": 99}), encoding="utf-8")
    with pytest.raises(UsageError, match=r"written by a newer pipeflow: its format is 99.*update pipeflow"):
        load_checkpoint(tmp_path / "step", model())


def test_another_model(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step", model(1))
    other = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Linear(3, 2))
    with pytest.raises(UsageError, match="a checkpoint of another model") as caught:
        load_checkpoint(tmp_path / "step", other)
    assert "it has no '2.weight'" in str(caught.value)
    assert "its '1.weight' is not in the model" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"its '0.weight' is \(3, 3\), not \(5, 5\)"):
        load_checkpoint(tmp_path / "step", model(width=5))


def test_what_the_optimizer_needs_and_is_not_there(tmp_path: Path) -> None:
    module = model()
    save_checkpoint(tmp_path / "step", module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="saved without an optimizer"):
        load_checkpoint(tmp_path / "step", module, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(UsageError, match="saved without a scheduler"):
        load_checkpoint(tmp_path / "step", module, scheduler=scheduler)
    with pytest.raises(UsageError, match="parameters that are not in the model: make it from"):
        save_checkpoint(tmp_path / "step", model(), optimizer)
    with pytest.raises(UsageError, match="must only contain plain values and tensors"):
        save_checkpoint(tmp_path / "step", module, extra=Path)


def numbered_anew(path: Path, pass_names: bool) -> str:
    """Every stage calls its first layer 0, and saves."""
    context = current_context()
    schedule = make_schedule("gpipe", ranks=2, microbatches=1)
    layer = nn.Linear(2, 2)
    stage = nn.Sequential(layer)
    torch.manual_seed(0)
    nn.init.constant_(layer.weight, context.pipeline_rank)
    pipeline = Pipeline(stage, schedule)
    try:
        save_checkpoint(path, pipeline, names=(lambda stage, name: f"layers.{stage}.{name}") if pass_names else None)
    except PipeflowError as error:
        return str(error)
    return ""


def test_names_of_two_stages_that_collide(tmp_path: Path) -> None:
    for message in run_threads(numbered_anew, 2, tmp_path / "step", False):
        assert "stages 0 and 1 both have a tensor named '0.weight'" in message
        assert "pass names=lambda stage, name" in message
    assert latest_checkpoint(tmp_path) is None
    assert run_threads(numbered_anew, 2, tmp_path / "step", True) == ["", ""]
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    whole = nn.ModuleDict({"layers": nn.Sequential(*layers)})
    load_checkpoint(
        tmp_path / "step", whole, names=lambda _, name: name.replace(".0.", ".0.0.").replace(".1.", ".1.0.")
    )
    assert [layer.weight.mean().item() for layer in layers] == [0, 1]


def fail_on_one_rank(folder: Path) -> list[str]:
    """Rank 1 may write no file of more than a hundred bytes; after each failure all save again."""
    run, rank = Run(), current_context().rank
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    messages = []
    for asynchronous in (False, True):
        saving = None
        try:
            if rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
            saving = run.save(folder / "first", asynchronous=asynchronous)
            saving.wait()
        except PipeflowError as error:
            messages.append(f"{type(error).__name__}: {error}")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert (saving is not None) == asynchronous
        run.save(folder / "second")
    return messages


@pytest.mark.slow
def test_a_failed_write_is_raised_on_every_rank(tmp_path: Path) -> None:
    """At once, or by the wait for an asynchronous save; and the next one is as good as any."""
    for rank, messages in enumerate(run_processes(fail_on_one_rank, 2, tmp_path)):
        assert len(messages) == 2
        for message in messages:
            assert message.startswith("UsageError" if rank == 1 else "PipelineUsageError")
            assert f"checkpoint {tmp_path / 'first'} could not be written: [Errno 27] File too large" in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["second"]


def load_what_is_damaged(path: Path) -> tuple[str, bool]:
    run = Run()
    before = run.pieces()
    with pytest.raises((UsageError, PipelineError)) as caught:
        run.load(path)
    after = run.pieces()
    return str(caught.value), all((after[name][1] == part).all() for name, (_, part) in before.items())


def test_damage_that_one_rank_sees_stops_all(tmp_path: Path) -> None:
    under((1, 1, 1), lambda: Run().save(tmp_path / "step"))
    file = flip(tmp_path / "step")
    for message, unchanged in under((2, 2, 1), load_what_is_damaged, tmp_path / "step"):
        assert f"{file} is damaged: its SHA-256 does not match" in message
        assert unchanged


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (3, 20, 100):
        save_checkpoint(tmp_path / f"step-{step}", model(step), step=step)
    save_checkpoint(tmp_path / "step-5", model(5), step=5, keep=2)  # an earlier step again: it is kept all the same
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-100", "step-5"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-100"
    assert latest_checkpoint(tmp_path / "nowhere") is None
    with pytest.raises(UsageError, match="keep must be at least 1"):
        save_checkpoint(tmp_path / "step-6", model(), keep=0)


@pytest.mark.parametrize("function", [save_checkpoint, load_checkpoint])
def test_the_path_comes_before_the_model(function: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the path of a checkpoint comes first, got Sequential"):
        function(model(), tmp_path)


def test_a_checkpoint_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "step"
    save_checkpoint(path, model(1))
    save_checkpoint(path, model(2))
    load_checkpoint(path, loaded := model())
    assert filled(loaded) == {2}
    path.rename(tmp_path / ".step.previous")  # as when a process is killed between the two renames
    assert latest_checkpoint(tmp_path) == path
    load_checkpoint(path, loaded := model())
    assert filled(loaded) == {2}
    save_checkpoint(tmp_path / "other", model(3))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["other", "step"]


def test_what_a_killed_save_left_is_neither_believed_nor_kept(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step-1", model(1), step=1)
    for name in (f".step-2.7-{HERE}1-0a.writing", f".step-2.7-{HERE}1-0b.completing"):
        (tmp_path / "step-1").rename(tmp_path / name)
        assert latest_checkpoint(tmp_path) is None
        save_checkpoint(tmp_path / "step-1", model(1), step=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]


def sleep_for_its_rank() -> None:
    context = current_context()
    Task(context, lambda: time.sleep(context.rank)).wait()


def test_a_rank_that_takes_longer_than_the_deadline_of_a_wait_is_not_given_up() -> None:
    run_threads(sleep_for_its_rank, 2, timeout=0.5)
