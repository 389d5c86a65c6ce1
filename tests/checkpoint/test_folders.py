"""What else is in the folder of a save: files of somebody else stay, and so does what another process writes."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from pipeflow import PipeflowError, UsageError, latest_checkpoint, load_checkpoint, save_checkpoint
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from pipeflow.training.checkpoint import folders
from pipeflow.training.checkpoint.folders import Hold
from pipeflow.training.checkpoint.storage import write
from tests.checkpoint.test_errors import HERE, filled, model

ELSEWHERE = "0" * 8  # another machine


def everything(folder: Path) -> dict[str, bytes | str | None]:
    """All paths below a folder, with the contents of files and the targets of links."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
    }


def folder_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_text("years", encoding="utf-8")


def file(path: Path) -> None:
    path.write_text("years", encoding="utf-8")


def link_to_a_checkpoint(path: Path) -> None:
    save_checkpoint(path.parent / "other", model(1))
    path.symlink_to("other")


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def checkpoint_with_a_note(path: Path) -> None:
    save_checkpoint(path, model(1))
    (path / "note.txt").write_text("years", encoding="utf-8")


def checkpoint_with_a_folder(path: Path) -> None:
    save_checkpoint(path, model(1))
    (path / "__9_0.distcp").mkdir()


def checkpoint_of_torch(path: Path) -> None:
    save_checkpoint(path, model(1))
    for name in ("checkpoint.json", "index.json"):
        (path / name).unlink()


def manifest_of_another_tool(path: Path) -> None:
    path.mkdir()
    (path / "checkpoint.json").write_text("{}", encoding="utf-8")


def previous_of_another_tool(path: Path) -> None:
    folder_with_a_file(path.with_name(f".{path.name}.previous"))


@pytest.mark.parametrize(
    "put",
    [
        folder_with_a_file,
        file,
        link_to_a_checkpoint,
        link_to_nothing,
        checkpoint_with_a_note,
        checkpoint_with_a_folder,
        checkpoint_of_torch,
        manifest_of_another_tool,
        previous_of_another_tool,
    ],
)
def test_only_a_checkpoint_is_replaced(tmp_path: Path, put: Callable[[Path], None]) -> None:
    path = tmp_path / "results"
    put(path)
    before = everything(tmp_path)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"results(\.previous)? is a .*only a checkpoint is replaced by another"):
            save_checkpoint(path, model(2))
        assert everything(tmp_path) == before


def test_what_comes_while_a_save_runs_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results"

    def put_and_write(*arguments: Any) -> Any:
        file(path)
        return write(*arguments)

    monkeypatch.setattr("pipeflow.training.checkpoint.save.write", put_and_write)
    with pytest.raises(UsageError, match="results is a file, and only a checkpoint is replaced"):
        save_checkpoint(path, model())
    assert everything(tmp_path) == {"results": b"years"}


def test_an_empty_folder_and_a_damaged_checkpoint_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    for fill in (1, 2):
        save_checkpoint(tmp_path / "step", model(fill))
        (tmp_path / "step" / "checkpoint.json").write_text("", encoding="utf-8")
    save_checkpoint(tmp_path / "step", model(3))
    load_checkpoint(tmp_path / "step", loaded := model())
    assert filled(loaded) == {3}
    assert [each.name for each in tmp_path.iterdir()] == ["step"]


def test_files_of_others_beside_checkpoints_stay(tmp_path: Path) -> None:
    """Also where their names are like those that saves use."""
    folder_with_a_file(tmp_path / ".settings.previous")
    file(tmp_path / ".profile.previous")
    folder_with_a_file(tmp_path / f".a.1-{HERE}1-0a.writing")
    file(tmp_path / f".b.1-{HERE}1-0a.writing")
    before = everything(tmp_path)
    checkpoint_with_a_note(tmp_path / "noted")
    for step in (1, 2):
        save_checkpoint(tmp_path / f"step-{step}", model(), step=step, keep=1)
    assert (tmp_path / "noted" / "note.txt").read_text(encoding="utf-8") == "years"
    after = everything(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert "step-1" not in after
    load_checkpoint(tmp_path / "noted", loaded := model())
    assert filled(loaded) == {1}


@pytest.mark.parametrize("path", [".", "..", "run/..", "", "a" * 250, "/", "a\0b"])
def test_a_path_that_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"a checkpoint needs a name|is not a path|has at most 180 bytes"):
        save_checkpoint(path, model())
    with pytest.raises(UsageError, match=r"is not a (checkpoint|path)"):
        load_checkpoint(path, model())
    assert everything(tmp_path) == {}


def test_a_checkpoint_that_is_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "step", model(1))
    monkeypatch.chdir(tmp_path / "step")
    load_checkpoint(".", loaded := model())
    assert filled(loaded) == {1}


def test_what_a_living_process_writes_stays(tmp_path: Path) -> None:
    """On this machine its lock shows that it lives, on another that it has written within the last hour."""
    here, there = (tmp_path / f".step-9.1-{machine}1-0a.writing" for machine in (HERE, ELSEWHERE))
    for folder in (here, there):
        folder.mkdir()
        (folder / "part-0").write_text("{}", encoding="utf-8")
    hold = Hold(here)
    save_checkpoint(tmp_path / "step-1", model())
    assert here.exists()
    assert there.exists()
    hold.release()
    for path in (there, there / "part-0"):
        os.utime(path, (1e9, 1e9))
    save_checkpoint(tmp_path / "step-2", model())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-1", "step-2"]


def save_what_is_taken_away(path: Path) -> str:
    try:
        save_checkpoint(path, model())
    except PipeflowError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("when", ["before", "before another rank begins", "after"])
def test_a_save_whose_folder_was_removed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Even if a rank that begins later makes it again, or if it was removed when all had been written: nobody can then
    give it its name.
    """

    together = Barrier(2)

    def write_and_remove(target: Path, content: Any) -> Any:
        if when != "after":
            together.wait(60)
            with suppress(FileNotFoundError):  # the other rank was first
                folders.put_away(target.parent, tmp_path / "step")
            together.wait(60)
        try:
            return write(target, content)
        finally:
            if when == "before another rank begins":
                target.parent.mkdir(exist_ok=True)

    def claim_nothing(temporary: Path) -> Path | None:
        folders.put_away(temporary, tmp_path / "step")
        return None

    monkeypatch.setattr("pipeflow.training.checkpoint.save.write", write_and_remove)
    if when == "after":
        monkeypatch.setattr("pipeflow.training.checkpoint.folders.claim", claim_nothing)
    for message in run_threads(save_what_is_taken_away, 2, tmp_path / "step"):
        assert "its hidden folder, .step.1-" in message
        assert "was removed meanwhile; nothing was saved" in message
    assert latest_checkpoint(tmp_path) is None


def test_a_checkpoint_is_saved_though_older_ones_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("pipeflow.training.checkpoint.save.keep_newest", fail)
    with caplog.at_level(logging.WARNING, "pipeflow"):
        save_checkpoint(tmp_path / "step", model(1), keep=1)
    assert f"{tmp_path / 'step'} is saved, but older ones could not be removed: [Errno 1]" in caplog.text
    assert latest_checkpoint(tmp_path) == tmp_path / "step"


def save_own(folder: Path) -> str:
    path = folder / f"rank-{current_context().rank}"
    try:
        save_checkpoint(path, model())
    except UsageError as error:
        return str(error)
    return ""


def test_ranks_that_pass_other_paths(tmp_path: Path) -> None:
    messages = run_threads(save_own, 2, tmp_path)
    assert messages[0] == messages[1]
    assert f"rank 0 passes the path '{tmp_path / 'rank-0'}' and rank 1 '{tmp_path / 'rank-1'}'" in messages[0]
    assert everything(tmp_path) == {}


def load_own(folder: Path) -> str:
    try:
        load_checkpoint(folder / f"rank-{current_context().rank}", model())
    except UsageError as error:
        return str(error)
    return ""


def test_ranks_that_load_other_checkpoints(tmp_path: Path) -> None:
    """One at two paths, such as two copies, is one."""
    save_checkpoint(tmp_path / "rank-0", model(1))
    shutil.copytree(tmp_path / "rank-0", tmp_path / "rank-1")
    assert run_threads(load_own, 2, tmp_path) == ["", ""]
    save_checkpoint(tmp_path / "rank-1", model(2))
    messages = run_threads(load_own, 2, tmp_path)
    assert messages[0] == messages[1]
    assert "rank-1, which are different checkpoints: pass the same path on all ranks; nothing was" in messages[0]


def test_a_failed_save_leaves_what_another_rank_still_writes(tmp_path: Path) -> None:
    """So that rank reports why the save failed, not that its folder is gone."""
    mine, hold, _ = folders.begin(tmp_path / "step")
    other = Hold(mine)
    hold.release()
    folders.discard(mine)
    assert mine.exists()
    other.release()
    folders.discard(mine)
    assert everything(tmp_path) == {}


SAVES = """
import sys, time, torch, pipeflow
from pathlib import Path
folder, first, keep = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) or None
model = torch.nn.Linear(256, 256)
folder.with_name(f"ready-{first}").touch()
while len(list(folder.parent.glob("ready-*"))) < 2:  # else one may end before the other begins
    time.sleep(0.01)
for step in range(first, first + 25):
    pipeflow.save_checkpoint(folder / f"step-{step}", model, step=step, keep=keep)
    pipeflow.save_checkpoint(folder / "same", model, step=step, keep=keep)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("keep", [0, 3])
def test_two_processes_that_save_into_one_folder(tmp_path: Path, keep: int) -> None:
    """All that they save is whole, and they say that there are two."""
    folder = tmp_path / "run"
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", SAVES, folder, str(first), str(keep)], stderr=subprocess.PIPE, text=True
        )
        for first in (1, 1001)
    ]
    said = [job.communicate()[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert any("another process has saved checkpoints into" in each for each in said)
    paths = list(folder.iterdir())
    assert len(paths) == (51 if not keep else len(paths))
    for path in paths:
        load_checkpoint(path, torch.nn.Linear(256, 256))
