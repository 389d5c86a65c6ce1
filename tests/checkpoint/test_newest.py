"""Which checkpoint is the newest: the one of the highest step, or else the last that was begun; never a damaged one."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeflow import Saving, UsageError, latest_checkpoint, load_checkpoint, save_checkpoint
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.optim import named_state
from pipeflow.testing import run_threads
from pipeflow.training.checkpoint.folders import MANIFEST
from pipeflow.training.checkpoint.manifest import Digest, Manifest
from pipeflow.training.checkpoint.storage import write
from tests.checkpoint.checkpoints import Run, under
from tests.checkpoint.test_errors import filled, flip, model
from tests.compiling import READS_UTF8


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_without_a_step_the_last_save_is_the_newest(tmp_path: Path) -> None:
    for epoch in (1, 2, 3, 10):
        save_checkpoint(tmp_path / f"epoch-{epoch}", model(epoch), keep=2)
        assert latest_checkpoint(tmp_path) == tmp_path / f"epoch-{epoch}"
    assert names(tmp_path) == ["epoch-10", "epoch-3"]
    assert load_checkpoint(tmp_path / "epoch-10", model()).step == 0


def test_equal_steps_and_none_among_others(tmp_path: Path) -> None:
    for name, step in (("b", 4), ("a", 4), ("z", 3)):
        save_checkpoint(tmp_path / name, model(), step=step)
    assert latest_checkpoint(tmp_path) == tmp_path / "a"
    save_checkpoint(tmp_path / "last", model())
    assert latest_checkpoint(tmp_path) == tmp_path / "last"
    save_checkpoint(tmp_path / "five", model(), step=5)
    save_checkpoint(tmp_path / "four", model(), step=4)
    assert latest_checkpoint(tmp_path) == tmp_path / "five"
    for bad in (-1, "x", 1.5, True):
        with pytest.raises(UsageError, match="step must be a whole number"):
            save_checkpoint(tmp_path / "bad", model(), step=bad)  # type: ignore[arg-type]


def held_up(monkeypatch: pytest.MonkeyPatch, name: str) -> threading.Event:
    """Lets the save called `name` write once the event is set."""
    go = threading.Event()

    def wait_and_write(file: Path, content: Any) -> Any:
        if file.parent.name.startswith(f".{name}."):
            assert go.wait(30)
        return write(file, content)

    monkeypatch.setattr("pipeflow.training.checkpoint.save.write", wait_and_write)
    return go


def test_of_two_saves_under_way_the_one_begun_last_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = held_up(monkeypatch, "older")
    savings: list[Saving] = [
        save_checkpoint(tmp_path / name, model(number), keep=1, asynchronous=True)
        for number, name in enumerate(["older", "newer"])
    ]
    savings[1].wait()
    go.set()
    savings[0].wait()
    assert names(tmp_path) == ["newer"]


def cut_index(path: Path) -> None:
    (path / "index.json").write_bytes((path / "index.json").read_bytes()[:-1])


def nest(path: Path) -> None:
    (path / "checkpoint.json").write_text("[" * 100_000, encoding="utf-8")


def odd_step(path: Path) -> None:
    file = path / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"step": "x"}), encoding="utf-8")


def remove_all_files(path: Path) -> None:
    for file in path.iterdir():
        if file.name != "checkpoint.json":
            file.unlink()


@pytest.mark.parametrize("damage", [flip, cut_index, nest, odd_step, remove_all_files])
def test_what_is_damaged_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object]
) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path / f"step-{step}", model(step), step=step)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-3"
    damage(tmp_path / "step-3")
    damage(tmp_path / "step-2")
    with caplog.at_level(logging.WARNING, "pipeflow"):
        newest = latest_checkpoint(tmp_path)
    assert newest == tmp_path / "step-1"
    for step in (2, 3):
        assert f"checkpoint {tmp_path / f'step-{step}'} is skipped" in caplog.text
    load_checkpoint(newest, loaded := model())
    assert filled(loaded) == {1}
    save_checkpoint(tmp_path / "step-4", model(4), step=4)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-4"


def test_a_manifest_that_names_no_context_ranks_has_one(tmp_path: Path) -> None:
    """Older versions wrote none."""
    save_checkpoint(tmp_path / "step-1", model(1), step=1)
    file = tmp_path / "step-1" / MANIFEST
    content = json.loads(file.read_bytes())
    assert content["layout"].pop("context") == 1
    del content["sha256"]
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    file.write_text(json.dumps({**content, "sha256": hashlib.sha256(plain.encode()).hexdigest()}), encoding="utf-8")
    assert Manifest.read(tmp_path / "step-1").layout == WorldLayout()


def digested(path: Path) -> None:
    """With a manifest that fits the files as they are."""
    manifest = Manifest.read(path)
    files = {name: Digest.of(path / name) for name in manifest.files}
    Manifest(manifest.step, manifest.sequence, manifest.layout, files).write(path)


def forge_index(path: Path) -> None:
    (path / "index.json").write_text('{"tensors": {}, "values": {}}', encoding="utf-8")
    digested(path)


def forge_dtype(path: Path) -> None:
    file = path / "index.json"
    file.write_text(file.read_text(encoding="utf-8").replace("float32", "int32"), encoding="utf-8")
    digested(path)


def forge_data(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    digested(path)


@pytest.mark.parametrize("forge", [forge_index, forge_dtype, forge_data])
def test_what_has_fitting_digests_but_cannot_be_read_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, forge: Callable[[Path], object]
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path / f"step-{step}", model(step), step=step)
    forge(tmp_path / "step-2")
    with caplog.at_level(logging.WARNING, "pipeflow"):
        newest = latest_checkpoint(tmp_path)
    assert f"checkpoint {tmp_path / 'step-2'} is skipped" in caplog.text
    assert newest == tmp_path / "step-1"
    load_checkpoint(newest, loaded := model())
    assert filled(loaded) == {1}


def test_without_verifying_digests_sizes_are_looked_at(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path / f"step-{step}", model(step), step=step)
    flip(tmp_path / "step-2")
    cut_index(tmp_path / "step-3")
    assert latest_checkpoint(tmp_path, verify=False) == tmp_path / "step-2"
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"


def resume(folder: Path) -> tuple[Path | None, int]:
    run, newest = Run(), latest_checkpoint(folder)
    assert newest is not None
    return newest, run.load(newest).step


def test_all_ranks_go_on_from_the_same_one(tmp_path: Path) -> None:
    """Of four, one alone finds the damage in its share."""
    for step in (1, 2):
        under((2, 2, 1), save_after, tmp_path / f"step-{step}", step)
    flip(tmp_path / "step-2")
    assert under((2, 2, 1), resume, tmp_path) == [(tmp_path / "step-1", 1)] * 4
    assert run_threads(latest_checkpoint, 2, tmp_path / "nowhere") == [None, None]


def save_after(path: Path, steps: int) -> None:
    run = Run()
    run.train(steps)
    run.save(path)


def test_links(tmp_path: Path) -> None:
    """A checkpoint that a link points to is kept; a link is none itself, even if it points to itself."""
    save_checkpoint(tmp_path / "step-1", model(1), step=1)
    (tmp_path / "best").symlink_to("step-1")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for step in (2, 3, 4):
        save_checkpoint(tmp_path / f"step-{step}", model(step), step=step, keep=1)
    assert names(tmp_path) == ["best", "gone", "loop", "step-1", "step-4"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-4"
    load_checkpoint(tmp_path / "best", loaded := model())
    assert filled(loaded) == {1}


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets data files be written to a device that is full."""
    opened = Path.open

    def open_full(file: Path, mode: str = "r", **options: Any) -> Any:
        if mode == "xb":
            opened(file, mode).close()
            return opened(Path("/dev/full"), "wb", **options)
        return opened(file, mode, **options)

    monkeypatch.setattr(Path, "open", open_full)


@pytest.mark.parametrize("width", [3, 300])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    save_checkpoint(tmp_path / "step-1", model(1), step=1)
    with monkeypatch.context() as patch:
        full(patch)
        with pytest.raises(
            UsageError, match=r"step-2 could not be written: .*No space left on device; nothing was saved"
        ):
            save_checkpoint(tmp_path / "step-2", model(2, width), step=2)
    assert names(tmp_path) == ["step-1"]


def test_an_asynchronous_save_that_fails_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "pipeflow"):
        full(patch)
        saving = save_checkpoint(tmp_path / "step-2", model(2), asynchronous=True)
        saving._task._thread.join()  # nobody waits for it
    assert (
        f"rank 0: checkpoint {tmp_path / 'step-2'} could not be written: [Errno 28] No space left on device"
        in caplog.text
    )
    with pytest.raises(UsageError, match="No space left on device"):
        saving.wait()
    save_checkpoint(tmp_path / "step-3", model(3))
    assert names(tmp_path) == ["step-3"]


def test_what_a_failed_save_left_goes_with_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody waited for it."""
    with monkeypatch.context() as patch:
        full(patch)
        save_checkpoint(tmp_path / "step-2", model(2), asynchronous=True)._task._thread.join()
    save_checkpoint(tmp_path / "step-3", model(3))
    assert names(tmp_path) == ["step-3"]


def compiled(module: nn.Module) -> nn.Module:
    result = torch.compile(module)
    assert isinstance(result, nn.Module)
    return result


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of what torch.compile imports
def test_a_compiled_module_and_the_plain_one_load_each_others(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "compiled", compiled(model(1)))
    load_checkpoint(tmp_path / "compiled", plain := model())
    assert filled(plain) == {1}
    inner = nn.ModuleList([compiled(layer) for layer in plain.children()])
    save_checkpoint(tmp_path / "plain", plain)
    for parameter in plain.parameters():
        nn.init.zeros_(parameter)
    load_checkpoint(tmp_path / "plain", inner)
    assert filled(plain) == {1}


@READS_UTF8
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_states_of_a_compiled_modules_optimizer(tmp_path: Path) -> None:
    plain, wrapped = model(1), compiled(model(2))
    moments = []
    for module, path in ((wrapped, "compiled"), (plain, None)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        if path:
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            save_checkpoint(tmp_path / path, module, optimizer)
        else:
            load_checkpoint(tmp_path / "compiled", module, optimizer)
        moments.append(named_state(optimizer, module))
    assert moments[0].keys() == moments[1].keys() == {name for name, _ in plain.named_parameters()}
    for name, state in moments[0].items():
        assert torch.equal(state["momentum_buffer"], moments[1][name]["momentum_buffer"])


def train_beside_a_slow_save(folder: Path) -> list[float]:
    """Three steps in the time in which rank 0 writes; the timeout is half of that."""
    run = Run()
    saving = run.save(folder / "older", asynchronous=True)
    losses = run.train(3)
    saving.wait()
    return losses


def test_a_slow_save_of_one_rank_holds_up_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    def slowly(file: Path, content: Any) -> Any:
        if file.name.startswith("__0"):
            time.sleep(4)
            waited.append(True)
        return write(file, content)

    monkeypatch.setattr("pipeflow.training.checkpoint.save.write", slowly)
    first, other = run_threads(train_beside_a_slow_save, 2, tmp_path, timeout=2.0)
    assert waited
    assert first == other
    assert latest_checkpoint(tmp_path) == tmp_path / "older"
