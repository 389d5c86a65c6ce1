"""Whatever writes files leaves those of others as they are, and says so where they are in its way. (Files that the
command is told to write replace their predecessors.)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeflow import UsageError, load_safetensors, save_checkpoint, save_safetensors
from pipeflow.checking import keep_weights, record
from pipeflow.colossalai.boosters import write_file
from pipeflow.core.files import replacing
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.agreement import all_gather_object
from pipeflow.testing import run_threads
from pipeflow.training.checkpoint.tensor_files import INDEX, SINGLE, parts_folder
from tests.checkpoint.checkpoints import Run
from tests.checkpoint.test_errors import filled, model
from tests.checkpoint.test_folders import everything

save_file = pytest.importorskip("safetensors.torch").save_file
SHARD = "model-00001-of-00002.safetensors"


def recorded(folder: Path) -> None:
    with record(folder, model()):
        pass


def written(path: Path) -> None:
    write_file(path, lambda file: torch.save({}, file))


def other_weights(path: Path) -> None:
    save_file({"other": torch.ones(2)}, path)


def text(path: Path) -> None:
    path.write_text("years", encoding="utf-8")


def link(path: Path) -> None:
    path.symlink_to("elsewhere")


def checkpointed(folder: Path) -> None:
    save_checkpoint(folder / "it", model())


def link_to_weights(path: Path) -> None:
    save_file(model().state_dict(), path.parent / "blob")
    path.symlink_to("blob")


Writer = Callable[[Path], None]
WRITERS: dict[str, tuple[Writer, str, list[Writer]]] = {  # what writes, under which name, and what is in its way
    "checkpoint": (checkpointed, "it", [text, link, Path.mkdir]),
    "weights": (lambda folder: save_safetensors(folder, model()), SINGLE, [text, link, other_weights, link_to_weights]),
    "index": (lambda folder: save_safetensors(folder, model()), INDEX, [text, link]),
    "old shard": (lambda folder: save_safetensors(folder, model()), SHARD, [text, other_weights]),
    "recording": (recorded, "rank-00000.jsonl", [text, link]),
    "kept weights": (lambda folder: keep_weights(folder, model()), "weights.json", [text, link]),
    "kept values": (lambda folder: keep_weights(folder, model()), "weights.f32", [text, link]),
    "file of torch": (lambda folder: written(folder / "model.pt"), "model.pt", [text, link]),
}
CASES = [
    pytest.param(write, name, put, id=f"{what}-{put.__name__}")
    for what, (write, name, puts) in WRITERS.items()
    for put in puts
]


@pytest.mark.parametrize(("write", "name", "put"), CASES)
def test_what_is_in_the_way_stays(tmp_path: Path, write: Writer, name: str, put: Writer) -> None:
    put(tmp_path / name)
    if put is Path.mkdir:
        text(tmp_path / name / "mine.txt")
    before = everything(tmp_path)
    with pytest.raises(UsageError) as caught:
        write(tmp_path)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert everything(tmp_path) == before


BESIDE = (
    *("mine.txt", "model-ema.safetensors", "model.safetensors.old", "rank-abc.jsonl", "rank-9.jsonl", "weights.bin"),
    *(".part-0-0.safetensors", ".part-beside/x", ".model.pt.parts/x", ".best.new", ".it.previous.txt", "part-0"),
)


@pytest.mark.parametrize("write", [write for write, *_ in WRITERS.values()], ids=WRITERS)
def test_what_is_beside_stays(tmp_path: Path, write: Writer) -> None:
    """Also when it writes again, over what it wrote before."""
    for name in BESIDE:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text(tmp_path / name)
    before = everything(tmp_path)
    for _ in range(2):
        write(tmp_path)
        after = everything(tmp_path)
        assert {name: after.get(name) for name in before} == before
    assert len(after) > len(before)
    assert not [name for name in after.keys() - before.keys() if name.startswith(".")]


def test_weights_replace_those_of_the_same_model_and_those_that_pipeflow_wrote(tmp_path: Path) -> None:
    save_file(model(1).state_dict(), tmp_path / SINGLE)  # as transformers does
    save_safetensors(tmp_path, model(2), shard_bytes=20)
    assert len(list(tmp_path.iterdir())) == 5
    save_safetensors(tmp_path, nn.Linear(3, 2))
    assert [file.name for file in tmp_path.iterdir()] == [SINGLE]
    load_safetensors(tmp_path, nn.Linear(3, 2))
    save_safetensors(tmp_path, model(3))
    load_safetensors(tmp_path, loaded := model())
    assert filled(loaded) == {3}


def test_an_interrupted_replacement_of_weights_leaves_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would list files of two models."""
    save_safetensors(tmp_path, model(1), shard_bytes=20)
    renamed: list[Path] = []

    def rename_once(path: Path, target: Path) -> None:
        if renamed:
            raise OSError(5, "Input/output error")
        os.rename(path, target)
        renamed.append(target)

    monkeypatch.setattr(Path, "rename", rename_once)
    with pytest.raises(UsageError, match=r"could not be written: .*Input/output error"):
        save_safetensors(tmp_path, model(2), shard_bytes=20)
    with pytest.raises(UsageError, match="has no weights"):
        load_safetensors(tmp_path, model())


def save_own_weights(folder: Path, name: str) -> str:
    run = Run()
    try:
        save_safetensors(folder / name.format(current_context().rank), run.pipeline)
    except UsageError as error:
        return str(error)
    return ""


def test_ranks_save_weights_to_one_folder_that_they_can_write(tmp_path: Path) -> None:
    text(tmp_path / "file")
    before = everything(tmp_path)
    for name, why in (("{}", "rank 0 passes the path"), ("file", "is not a folder"), ("file/in", "could not be")):
        for message in run_threads(save_own_weights, 2, tmp_path, name):
            assert why in message
        assert everything(tmp_path) == before


def write_into_parts(path: Path) -> Any:
    with parts_folder(path, current_context()) as folder:
        (folder / f"part-{current_context().rank}-0.safetensors").write_bytes(b"x")
        all_gather_object(current_context().world, None)  # no rank leaves the folder before others wrote
    return folder


def test_all_ranks_write_into_one_hidden_folder(tmp_path: Path) -> None:
    assert len(set(run_threads(write_into_parts, 2, tmp_path / "it"))) == 1
    assert everything(tmp_path) == {}


def test_two_writers_of_one_file_have_files_of_their_own(tmp_path: Path) -> None:
    with replacing(tmp_path / "it") as one, replacing(tmp_path / "it") as other:
        assert one != other
        text(one)
        text(other)
