"""Damages and forges checkpoints: is each refused in words, with nothing of the run changed and no code run, or loaded
with the values that were saved? And does `latest_checkpoint` then find the newest that is whole?
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeflow import PipelineError, UsageError, latest_checkpoint, load_checkpoint, save_checkpoint

MANIFEST, INDEX, DATA, TORCHS = "checkpoint.json", "index.json", "__0_0.distcp", ".metadata"


class Evil:
    """What creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


@dataclass
class Forger:
    """A checkpoint that is to be corrupted, by choices of its own; nothing about it can be told by its digests when
    it was `resealed`.
    """

    folder: Path
    canary: Path
    choices: random.Random

    def file(self) -> Path:
        return self.choices.choice(sorted(self.folder.iterdir()))

    def flip(self) -> None:
        file = self.file()
        content = bytearray(file.read_bytes())
        content[self.choices.randrange(len(content))] ^= 1 << self.choices.randrange(8)
        file.write_bytes(content)

    def truncate(self) -> None:
        file = self.file()
        content = file.read_bytes()
        file.write_bytes(content[: self.choices.randrange(len(content))])

    def append(self) -> None:
        file = self.file()
        file.write_bytes(file.read_bytes() + self.choices.randbytes(9))

    def overwrite(self) -> None:
        file = self.file()
        content = bytearray(file.read_bytes())
        begin = self.choices.randrange(len(content))
        content[begin : begin + 64] = self.choices.randbytes(len(content[begin : begin + 64]))
        file.write_bytes(content)

    def remove(self) -> None:
        self.file().unlink()

    def add(self) -> None:
        (self.folder / self.choices.choice(["note", "part-0", "__1_0.distcp", "failed"])).write_bytes(b"x")

    def swap(self) -> None:
        one, other = self.choices.sample(sorted(self.folder.iterdir()), 2)
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)

    def forge_manifest(self) -> None:
        """Odd fields, with a digest of their own; at times nothing that is a manifest at all."""
        manifest = self.manifest()
        key, value = self.choice(MANIFESTS)
        if key is None:
            (self.folder / MANIFEST).write_text(value, encoding="utf-8")
            return
        manifest[key] = value
        self.seal(manifest)

    def change_manifest(self) -> None:
        """Another field, and the digest as it was."""
        manifest = self.manifest()
        key, value = self.choice([("step", 99), ("sequence", 10**6), ("format", 1), ("files", {}), ("layout", {})])
        (self.folder / MANIFEST).write_text(json.dumps(manifest | {key: value}), encoding="utf-8")

    def forge_index(self) -> None:
        """Places and shapes that are not so, with digests that fit."""
        index = json.loads((self.folder / INDEX).read_bytes())
        tensors, name = index["tensors"], self.choices.choice(sorted(index["tensors"]))
        offset, sizes, file, begin, length = tensors[name]["parts"][0]
        self.choice(
            [
                lambda: tensors.pop(name),
                lambda: tensors[name].update(dtype="float16"),
                lambda: tensors[name].update(dtype="nn"),
                lambda: tensors[name].update(shape=[10**9, 10**9]),
                lambda: tensors[name].update(parts=[]),
                lambda: tensors[name]["parts"].append(tensors[name]["parts"][0]),
                lambda: tensors[name].update(parts=[[offset, sizes, "../../" + file, begin, length]]),
                lambda: tensors[name].update(parts=[[offset, sizes, file, begin, length * 10**6]]),
                lambda: tensors[name].update(parts=[[offset, sizes, file, begin + 1, length]]),
                lambda: tensors[name].update(parts=[[[-1], sizes, file, begin, length]]),
                lambda: index["values"].pop("run"),
                lambda: index["values"].update(run=[file, begin, length]),
                lambda: index.pop("tensors"),
            ]
        )()
        (self.folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
        self.reseal()

    def forge_data(self) -> None:
        """Something else in the place of a tensor or a value, with digests that fit."""
        other = self.choice([torch.zeros(3, 5), "text", {"step": "x"}, torch.zeros(2, dtype=torch.int8), None])
        self.put(_saved(other) if self.choices.random() < 0.7 else self.choices.randbytes(50))

    def malicious_value(self) -> None:
        """A pickle that runs code, in the place of a tensor or a value, with digests that fit."""
        self.put(self.choice([pickle.dumps, _saved])(Evil(self.canary)))

    def malicious_metadata(self) -> None:
        """A pickle that runs code, where torch's own readers unpickle, with digests that fit."""
        (self.folder / TORCHS).write_bytes(pickle.dumps(Evil(self.canary)))
        self.reseal()

    def choice(self, among: Any) -> Any:
        return self.choices.choice(among)

    def put(self, content: bytes) -> None:
        """Appends it to the data, and has the index point there."""
        index, data = json.loads((self.folder / INDEX).read_bytes()), self.folder / DATA
        where = [DATA, data.stat().st_size, len(content)]
        name = self.choices.choice(sorted({**index["tensors"], **index["values"]}))
        if name in index["values"]:
            index["values"][name] = where
        else:
            index["tensors"][name]["parts"][0][2:] = where
        data.write_bytes(data.read_bytes() + content)
        (self.folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
        self.reseal()

    def manifest(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / MANIFEST).read_bytes())
        return content

    def reseal(self) -> None:
        """Makes every digest fit what is there."""
        manifest = self.manifest()
        for name in manifest["files"]:
            content = (self.folder / name).read_bytes()
            manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        self.seal(manifest)

    def seal(self, manifest: dict[str, Any]) -> None:
        content = {key: value for key, value in manifest.items() if key != "sha256"}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        content["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
        (self.folder / MANIFEST).write_text(json.dumps(content), encoding="utf-8")


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


_DIGEST = {"size": 1, "sha256": "0" * 64}
ODD: dict[str, list[Any]] = {
    "format": [0, -1, 99, "2", None, True, 2.0],
    "step": ["x", float("nan"), -1, 1.5, [], True],
    "sequence": ["x", None, -1],
    "files": [{}, [], None, {"../x": _DIGEST}, {"/etc/passwd": _DIGEST}, {"": _DIGEST}],
    "layout": [{}, None, {"pipeline": 0, "tensor": 1, "data": 1}, [1, 1, 1]],
}
TEXTS = ["", "[" * 10**5, "null", "[]", "\x00", "{}", '"text"', "9" * 10**5]
MANIFESTS: list[tuple[str | None, Any]] = [
    *((field, value) for field, values in ODD.items() for value in values),
    *((None, text) for text in TEXTS),
]
ACCIDENTS: tuple[Callable[[Forger], None], ...] = (
    *(Forger.flip, Forger.truncate, Forger.append, Forger.overwrite, Forger.remove, Forger.add, Forger.swap),
    Forger.change_manifest,
)
FORGERIES: tuple[Callable[[Forger], None], ...] = (
    *(Forger.forge_manifest, Forger.forge_index, Forger.forge_data),
    *(Forger.malicious_value, Forger.malicious_metadata),
)
KINDS = ACCIDENTS + FORGERIES


class Ground:
    """Two checkpoints of a run in `folder`, of which trials corrupt copies of the newer one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.good = folder / "good"
        self.saved = []
        for step in (1, 2):
            subject = Subject(step)
            self.saved.append(subject.weights())
            save_checkpoint(self.good / f"step-{step}", subject.model, subject.optimizer, step=step, data={"sample": 9})

    def trial(self, seed: int) -> tuple[str, str]:
        """The kind of corruption and what came of it: "refused", "right values" or "wrong"."""
        corrupt = KINDS[seed % len(KINDS)]
        runs = self.folder / f"trial-{seed}"
        forger = self.copy(runs, seed)
        corrupt(forger)
        outcome = self.outcome(runs, whole_is_found=corrupt in ACCIDENTS)
        if forger.canary.exists():
            outcome = "wrong"
        shutil.rmtree(runs)
        return corrupt.__name__.replace("_", " "), outcome

    def copy(self, runs: Path, seed: int = 0) -> Forger:
        """A copy of the run's folder, and who corrupts its newer checkpoint."""
        shutil.copytree(self.good, runs, dirs_exist_ok=True)
        return Forger(runs / "step-2", self.folder / f"canary-{seed}", random.Random(seed))

    def outcome(self, runs: Path, *, whole_is_found: bool) -> str:
        subject = Subject(7)
        before = subject.everything()
        newest = latest_checkpoint(runs)
        assert newest is not None
        assert subject.everything() == before
        try:
            step = load_checkpoint(runs / "step-2", subject.model, subject.optimizer).step
            outcome = "right values" if step == 2 and subject.weights() == self.saved[1] else "wrong"
        except UsageError as error:
            outcome = "refused" if str(error) and subject.everything() == before else "wrong"
        except PipelineError:  # something else than a word of ours
            return "wrong"
        if whole_is_found and newest.name != ("step-1" if outcome == "refused" else "step-2"):
            return "wrong"
        if whole_is_found or newest.name == "step-1":  # a job that resumes by itself goes on
            step = load_checkpoint(newest, subject.model, subject.optimizer).step
            return outcome if subject.weights() == self.saved[step - 1] else "wrong"
        return outcome


class Subject:
    """A model, its optimizer and the random state, told as bytes."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=seed / 100)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def weights(self) -> list[bytes]:
        return [_bytes(value) for value in self.model.state_dict().values()]

    def everything(self) -> list[object]:
        states = self.optimizer.state_dict()
        moments = [_bytes(value) for state in states["state"].values() for value in state.values()]
        return [*self.weights(), *moments, str(states["param_groups"]), _bytes(torch.get_rng_state())]


def _bytes(tensor: torch.Tensor) -> bytes:
    content: bytes = tensor.detach().numpy().tobytes()
    return content
