"""Files of recordings: what is damaged, cut off, forged, or of another job is one sentence, and nothing is run."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import tracemalloc
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pipeflow.checking import check, record
from pipeflow.checking.files import file_of
from pipeflow.checking.findings import Result, page
from pipeflow.checking.runs import load
from pipeflow.core.errors import UsageError
from tests.checking.jobs import GPT, train


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("plain"), steps=1, whole="*.up.weight")


@pytest.fixture
def other(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "other"))


def said(plain: Path, other: Path) -> str:
    with pytest.raises(UsageError) as caught:
        check(plain, other)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_recording_that_was_cut_off(plain: Path, other: Path) -> None:
    path = file_of(other, 0)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:5], encoding="utf-8")
    assert "was cut off after 1 whole steps" in said(plain, other)
    path.write_text("".join(lines[:9]), encoding="utf-8")
    assert "was cut off after 0 whole steps" in said(plain, other)


def test_a_run_that_failed_leaves_what_it_had(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="mine"), record(tmp_path, GPT()):
        raise RuntimeError("mine")
    assert "is no recording" in said(plain, tmp_path)


def test_a_missing_rank(plain: Path, other: Path) -> None:
    path = file_of(other, 0)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text(lines[0].replace('"world": 1', '"world": 3') + "".join(lines[1:]), encoding="utf-8")
    assert "lacks the files of ranks 1, 2 of 3" in said(plain, other)


def test_no_recording(plain: Path, tmp_path: Path) -> None:
    assert "has no recording" in said(plain, tmp_path)
    assert "is no folder" in said(plain, tmp_path / "never")


def test_other_steps(plain: Path, tmp_path: Path) -> None:
    assert "has 1 steps" in said(plain, train(tmp_path, steps=2))


def test_another_batch(plain: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT()
    with record(tmp_path, model):
        model(torch.zeros(8, 10, dtype=torch.long)).sum().backward()
    result = check(plain, tmp_path)
    assert result.first is not None
    assert result.cause is not None
    assert (result.first.what, result.cause.name) == ("batch", "order")


def test_another_model(plain: Path, tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with record(tmp_path, model):
        model(torch.ones(2, 3)).sum().backward()
    assert "is a recording of another model" in said(plain, tmp_path)


def test_forged_files_are_refused_or_compared(plain: Path, other: Path) -> None:
    """Values of any type at any place: one sentence, or a result."""
    path = file_of(other, 0)
    lines = path.read_text(encoding="utf-8").splitlines()
    chosen = random.Random(0)
    values: list[object] = [None, -1, 1e400, "x", [], {}, {"shape": [2**40], "float64": ""}, [[]], True]
    for _ in range(150):
        index = chosen.randrange(len(lines))
        event = json.loads(lines[index])
        event[chosen.choice([*event])] = chosen.choice(values)
        path.write_text("\n".join([*lines[:index], json.dumps(event), *lines[index + 1 :]]) + "\n", encoding="utf-8")
        with suppress(UsageError):
            check(plain, other)


def _packed(*shape: int, value: float = -1.0) -> dict[str, object]:
    """An array as `line_of` writes it."""
    return {"shape": shape, "float64": base64.b64encode(np.full(prod(shape), value).tobytes()).decode()}


FORGED = [
    ("gradient", {"sketch": _packed(9)}, "has a square below 0"),
    ("output", {"rows": _packed(8, 9)}, "has a square below 0"),
    ("samples", {"mass": _packed(1)}, "has a square below 0"),
    ("output", {"rows": _packed(0, 10**30)}, "an array has no shape"),
    ("output", {"rows": _packed(*[1] * 10**4)}, "an array has no shape"),
    ("output", {"rows": _packed(0, 2**39, 2**39)}, "array is too big"),
]


@pytest.mark.parametrize(("kind", "values", "why"), FORGED)
def test_numbers_that_nothing_records(plain: Path, other: Path, kind: str, values: object, why: str) -> None:
    path = file_of(other, 0)
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    next(event for event in events if event["kind"] == kind).update(values)
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    assert why in said(plain, other)


def test_a_norm_of_zero_is_compared(tmp_path: Path) -> None:
    folders = [train(tmp_path / name, steps=1, clip=1.0) for name in ("one", "other")]
    for path in (file_of(folder, 0) for folder in folders):
        events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        next(event for event in events if event["kind"] == "norm")["value"] = _packed(1, value=0.0)
        path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
        result = check(*folders)
    assert result.alike
    first = check(folders[0], train(tmp_path / "right", steps=1, clip=1.0)).first
    assert first is not None
    assert first.what == "norm"


@pytest.mark.parametrize("shape", [[float("inf"), 16], [-3, 16], [2**40, 16], [1] * 99])
def test_shapes_that_no_tensor_has(plain: Path, other: Path, shape: list[float]) -> None:
    path = file_of(other, 0)
    first, rest = path.read_text(encoding="utf-8").split("\n", 1)
    event = json.loads(first)
    event["tensors"][0]["shape"] = shape
    path.write_text(json.dumps(event) + "\n" + rest, encoding="utf-8")
    assert "has a tensor that cannot be read" in said(plain, other)


def test_a_file_that_is_none(plain: Path, tmp_path: Path) -> None:
    os.mkfifo(file_of(tmp_path, 0))
    assert "this is no file, but a pipe or a device" in said(plain, tmp_path)


def test_a_line_without_an_end_is_not_loaded(plain: Path, other: Path) -> None:
    path = file_of(other, 0)
    with path.open("ab") as file:
        file.truncate(2**31)
    tracemalloc.start()
    try:
        load(other)  # all lines before it are there
        assert tracemalloc.get_traced_memory()[1] < 2**27
        path.write_bytes(path.read_bytes()[:99])
        with path.open("ab") as file:
            file.truncate(2**34)
        assert "has a line of more than 8 GiB" in said(plain, other)
    finally:
        tracemalloc.stop()


def test_a_long_line_is_read_whole(plain: Path, other: Path) -> None:
    path = file_of(other, 0)
    first, rest = path.read_text(encoding="utf-8").split("\n", 1)
    path.write_text(json.dumps(json.loads(first) | {"more": "x" * 2**22}) + "\n" + rest, encoding="utf-8")
    assert check(plain, other).alike


def test_many_missing_ranks_are_counted(plain: Path, other: Path) -> None:
    path = file_of(other, 0)
    text = path.read_text(encoding="utf-8").replace('"world": 1', '"world": 1000000', 1)
    path.write_text(text, encoding="utf-8")
    assert "lacks the files of ranks 1, 2, 3, 4, 5, 6, 7, 8 and 999991 more of 1000000" in said(plain, other)


def test_a_page_of_modules_within_each_other() -> None:
    shown = page(Result([], None, order=["." * 20000, "x" + ".x" * 20000]), "plain", "deep")
    assert shown.count("<li") == 1 + 101 + 101 - 1


def test_other_texts_are_refused(plain: Path, other: Path) -> None:
    path = file_of(other, 0)
    first, *rest = path.read_text(encoding="utf-8").splitlines(keepends=True)
    texts = ("", "\n", "{}\n", "[1]\n", "\x80\n", "cos\nsystem\n", '{"kind": "start"}\n', first + "[" * 10**5 + "\n")
    for text in texts:
        path.write_bytes((text + "".join(rest)).encode("latin-1"))
        said(plain, other)


def test_what_is_recorded_whole_is_a_pattern(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"whole must be a pattern of .*'\*' for all, got True"):
        record(tmp_path, nn.Linear(2, 2), whole=True)  # type: ignore[arg-type]  # a wrong one


def test_nothing_is_recorded_without_a_folder() -> None:
    model = GPT()
    with record(None, model) as recording:
        recording.loss(1.0)
        assert not model._forward_hooks
    assert recording.step == 0


def test_files_of_an_earlier_recording_are_replaced(tmp_path: Path) -> None:
    train(tmp_path, steps=1)
    shutil.copy(file_of(tmp_path, 0), file_of(tmp_path, 1))
    train(tmp_path, steps=1)
    assert load(tmp_path).world == 1


def test_the_page_writes_out_what_no_page_can_show() -> None:
    shown = page(Result([], None, ["a note\x1b[31m"], order=["layer\udc80.\x07"]), "plain\udcff", "wide\x00")
    assert shown.encode().isascii()
    assert all(text in shown for text in (r"layer\udc80", r"\x07", r"plain\udcff", r"wide\x00", r"note\x1b[31m"))
