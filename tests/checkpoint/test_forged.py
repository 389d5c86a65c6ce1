"""What a forged file asks for: no memory beyond its bytes, no file outside of its folder, words for what is wrong."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeflow import UsageError, latest_checkpoint, load_checkpoint, load_safetensors, save_checkpoint
from pipeflow.training.checkpoint.plain import loaded
from pipeflow.training.checkpoint.storage import Part, require_whole
from tests.checkpoint.corruption import Forger, Ground, Subject

LARGE = 2**31  # bytes; nobody notices so many that are only asked for, so the tests ask whether they were made


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._called = function, arguments

    def __reduce__(self) -> Any:
        return self._called


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def with_pickle(pickled: bytes, *records: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of torch.save with this pickle and these records of data."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")
        for number, record in enumerate(records):
            archive.writestr(f"archive/data/{number}", record)
    return stream.getvalue()


def tensor_of(numel: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """A pickle of a tensor over record 0, which it says has `numel` floats."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", numel) if value == "the storage" else None

    stream = io.BytesIO()
    rebuild = torch._utils._rebuild_tensor_v2
    Pickler(stream, 2).dump(Call(rebuild, "the storage", 0, sizes, strides, False, OrderedDict()))
    return stream.getvalue()


def copies(function: Any) -> bytes:
    """Many copies of one long value: a million entries in a few thousand bytes."""
    long = list(range(1000))
    return saved([Call(function, long) for _ in range(1000)])


def overlapping() -> bytes:
    """An archive whose records are all the same bytes."""
    content = bytearray(with_pickle(pickle.dumps(1, 2), *(bytes(1000) for _ in range(50))))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        first = archive.getinfo("archive/data/0").header_offset
        others = [archive.getinfo(f"archive/data/{number}") for number in range(1, 50)]
    directory = content.index(b"PK\1\2")
    for each in others:
        entry = content.index(each.filename.encode(), directory) - 46
        content[entry + 42 : entry + 46] = first.to_bytes(4, "little")
    return bytes(content[:first] + content[first : first + 1100] + content[directory:])


FORGED: dict[str, Callable[[], bytes]] = {
    "bytearray": lambda: saved(Call(bytearray, LARGE)),
    "storage": lambda: saved(Call(torch.UntypedStorage, LARGE)),
    "tensor class": lambda: saved(Call(torch.FloatTensor, LARGE)),
    "one of many": lambda: saved({"step": 1, "extra": [1, {"a": Call(bytearray, LARGE)}]}),
    "deflated": lambda: with_pickle(pickle.dumps("x" * 10**8, 2), compression=zipfile.ZIP_DEFLATED),
    "deflated data": lambda: with_pickle(
        tensor_of(10**7, (10**7,), (1,)), bytes(4 * 10**7), compression=zipfile.ZIP_DEFLATED
    ),
    "short record": lambda: with_pickle(tensor_of(10**9, (10**9,), (1,)), bytes(4)),
    "long view": lambda: with_pickle(tensor_of(1, (10**9,), (1,)), bytes(4)),
    "repeated entry": lambda: with_pickle(tensor_of(1, (10**9,), (0,)), bytes(4)),
    "copied lists": lambda: copies(set),
    "copied counters": lambda: copies(Counter),
    "copied texts": lambda: saved([Call(bytearray, text, "latin-1") for text in ["x" * 10**5] for _ in range(1000)]),
    "no archive": lambda: pickle.dumps({"step": 1}, 2),
    "no pickle": lambda: with_pickle(b"."),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_no_value_takes_more_memory_than_it_has_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forge: Callable[[], bytes]
) -> None:
    """Refused before torch reads it; and a job that resumes goes on from the checkpoint before."""
    forged = forge()
    read = torch.load

    def only_honest(stream: Any, **options: Any) -> Any:
        assert stream.getvalue() != forged
        return read(stream, **options)

    for step in (1, 2):
        save_checkpoint(tmp_path / f"step-{step}", nn.Linear(2, 2), step=step)
    forger = Forger(tmp_path / "step-2", tmp_path, None)  # type: ignore[arg-type]  # which makes no choice
    data = forger.folder / "__0_0.distcp"
    index = json.loads((forger.folder / "index.json").read_bytes())
    index["values"]["run"] = [data.name, data.stat().st_size, len(forged)]
    data.write_bytes(data.read_bytes() + forged)
    (forger.folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    forger.reseal()
    monkeypatch.setattr("torch.load", only_honest)
    with pytest.raises(UsageError, match=r"'run' in .* is damaged: it cannot be read"):
        load_checkpoint(forger.folder, nn.Linear(2, 2))
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"


def test_overlapping_records_are_refused() -> None:
    with pytest.raises((ValueError, zipfile.BadZipFile)):
        loaded(overlapping())


PLAIN: list[Any] = [
    *(1, None, True, 2**70, -3, 1.5, "ü" * 1000, b"bytes" * 100, bytearray(b"abc"), bytearray(), complex(1, 2)),
    *((), (1,), (1, 2, 3, 4), [], list(range(1000)), {1: 2, "a": [1, {2: 3}]}, {1, 2}, set(), Counter("hello")),
    *(OrderedDict(a=1), torch.Size([2, 3]), torch.float32, torch.device("cpu"), [b"x" * 50] * 500),
    *(torch.zeros(3), torch.zeros(()), torch.zeros(0, 4), torch.ones(4, 5).T, torch.ones(4, 5)[1:3, ::2]),
    *(torch.zeros(3, dtype=torch.uint16), torch.zeros(3, dtype=torch.float8_e4m3fn), torch.ones(2).expand(5, 2)),
    *(torch.zeros(3, dtype=torch.bfloat16), nn.Parameter(torch.ones(2)), nn.Buffer(torch.ones(2))),
    *(nn.BatchNorm1d(3).state_dict(), torch.eye(3).to_sparse(), [OrderedDict(a=1) for _ in range(300)]),
]


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch 2.15 says how long it takes
@pytest.mark.parametrize("value", PLAIN, ids=lambda value: str(value)[:20])
def test_plain_values_are_read(value: Any) -> None:
    found = loaded(saved(value))
    assert type(found) is type(value)
    assert str(found) == str(value)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("runs"))


def same_bytes_twice(tensors: dict[str, Any]) -> None:
    """Two tensors in the same bytes, and so more entries than the files have."""
    names = [name for name in sorted(tensors) if name.endswith("0.weight")]
    tensors[names[0]]["parts"][0][2:] = tensors[names[1]]["parts"][0][2:]


def few_bytes(tensors: dict[str, Any]) -> None:
    tensors["model.0.weight"]["parts"][0][4] = 100


@pytest.mark.parametrize("forge", [same_bytes_twice, few_bytes])
def test_an_index_that_claims_more_than_there_is(tmp_path: Path, ground: Ground, forge: Callable[[Any], None]) -> None:
    forger = ground.copy(tmp_path)
    index = json.loads((forger.folder / "index.json").read_bytes())
    forge(index["tensors"])
    (forger.folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    forger.reseal()
    with pytest.raises(UsageError, match=r"index.json is damaged: .*(in two places|too few for a part)"):
        load_checkpoint(forger.folder, Subject(7).model)


@pytest.mark.parametrize("file", ["__0_0.distcp", "index.json", "checkpoint.json"])
def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, ground: Ground, file: str) -> None:
    forger = ground.copy(tmp_path)
    (forger.folder / file).rename(tmp_path / "outside")
    (forger.folder / file).symlink_to(tmp_path / "outside")
    with pytest.raises(UsageError, match=r"is a link, not a file|is not a checkpoint"):
        load_checkpoint(forger.folder, Subject(7).model)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"


def parts(shape: tuple[int, ...], places: list[Any]) -> list[Part]:
    return [Part("weight", 0, "float32", shape, offset, sizes) for offset, sizes in places]


def test_many_parts() -> None:
    """Looking at them takes seconds. Empty ones are refused."""
    many = 20_000
    whole = ((0,), (4,))
    with pytest.raises(ValueError, match="is empty"):
        require_whole(parts((4,), [whole, *(((0,), (0,)) for _ in range(many))]))
    require_whole(parts((1, many), [((0, number), (1, 1)) for number in range(many)]))
    twice = [((0, number, 0), (1, 1, 1)) for number in range(many - 1)]
    with pytest.raises(ValueError, match="overlap"):
        require_whole(parts((1, many, 1), [*twice, twice[7]]))


@pytest.mark.parametrize(
    ("shape", "places"),
    [
        ((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))]),
        ((4, 4), [((0, 0), (4, 2)), ((0, 1), (4, 2))]),
        ((2, 2), [((0, 0), (2, 1)), ((0, 0), (1, 2))]),
        ((3,), [((0,), (1,)), ((1,), (1,)), ((1,), (1,))]),
        ((), [((), ()), ((), ())]),
    ],
)
def test_parts_that_overlap(shape: tuple[int, ...], places: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"overlap|do not make up"):
        require_whole(parts(shape, places))


def test_parts_that_do_not_overlap() -> None:
    require_whole(parts((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 4))]))
    require_whole(parts((), [((), ())]))
    require_whole(parts((0, 3), [((0, 0), (0, 2)), ((0, 2), (0, 1))]))


INDEXES: dict[str, Any] = {
    "no JSON": "{",
    "deep": "[" * 10**5,
    "not UTF-8": b"\xff\xfe\x00",
    "null": None,
    "a list": [],
    "a text": "x",
    "no map": {},
    "map is null": {"weight_map": None},
    "map is a list": {"weight_map": ["a"]},
    "a number": {"weight_map": {"weight": 1}},
    "null file": {"weight_map": {"weight": None}},
    "a list as file": {"weight_map": {"weight": ["a.safetensors"]}},
    "no name": {"weight_map": {"weight": ""}},
    "above": {"weight_map": {"weight": "../model.safetensors"}},
    "absolute": {"weight_map": {"weight": "/model.safetensors"}},
    "a folder": {"weight_map": {"weight": "folder.safetensors"}},
    "missing": {"weight_map": {"weight": "missing.safetensors"}},
    "NUL": {"weight_map": {"weight": "a\0.safetensors"}},
    "another kind": {"weight_map": {"weight": "model.bin"}},
    "long": {"weight_map": {"weight": "a" * 300 + ".safetensors"}},
    "a pipe": {"weight_map": {"weight": "pipe.safetensors"}},
    "itself": {"weight_map": {"weight": "model.safetensors.index.json"}},
}


@pytest.mark.parametrize("content", INDEXES.values(), ids=INDEXES)
def test_an_odd_index_of_safetensors_is_refused(tmp_path: Path, content: Any) -> None:
    """Although the file that it could mean has the weights."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    folder = tmp_path / "in"
    (folder / "folder.safetensors").mkdir(parents=True)
    os.mkfifo(folder / "pipe.safetensors")
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    text = content if isinstance(content, bytes | str) and content not in ("x",) else json.dumps(content)
    (folder / "model.safetensors.index.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    linear = nn.Linear(2, 2, bias=False)
    before = linear.weight.clone()
    with pytest.raises(UsageError, match=r"damaged( or missing)?: .*; download it again"):
        load_safetensors(folder, linear)
    assert torch.equal(linear.weight, before)
