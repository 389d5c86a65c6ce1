"""A checkpoint that is damaged, forged or malicious is refused with nothing changed, or loads what was saved; none runs
code.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from pathlib import Path

import pytest
import torch

from pipeflow import UsageError, load_checkpoint
from pipeflow.training.checkpoint.manifest import Manifest
from tests.checkpoint.corruption import KINDS, MANIFESTS, Evil, Forger, Ground, Subject


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("runs"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_every_kind_of_corruption(ground: Ground) -> None:
    found = Counter(ground.trial(seed) for seed in range(3 * len(KINDS)))
    assert {outcome for _, outcome in found} <= {"refused", "right values"}
    assert {kind for kind, outcome in found if outcome == "right values"} == {"add", "malicious metadata"}


@pytest.mark.drill
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda kind: KINDS[kind].__name__)
def test_many_corruptions(ground: Ground, kind: int, turn: int) -> None:
    seeds = [kind + len(KINDS) * (3 + 5 * turn + number) for number in range(5)]
    assert [seed for seed in seeds if ground.trial(seed)[1] == "wrong"] == []


def test_the_trials_notice_what_is_wrong(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that verifies nothing, and one that unpickles what torch's readers do."""

    def believe(manifest: Manifest, folder: Path, *_: object) -> None:
        pickle.loads((folder / ".metadata").read_bytes())

    monkeypatch.setattr(Manifest, "require_sizes", believe)
    monkeypatch.setattr(Manifest, "require_digests", lambda *_: None)
    bad = [KINDS.index(Forger.malicious_metadata), KINDS.index(Forger.flip)]
    assert "wrong" in {ground.trial(kind + len(KINDS) * turn)[1] for kind in bad for turn in range(3)}


@pytest.mark.parametrize("content", MANIFESTS, ids=lambda each: str(each)[:40])
def test_an_odd_manifest_is_refused(tmp_path: Path, ground: Ground, content: tuple[str | None, object]) -> None:
    key, value = content
    forger = ground.copy(tmp_path)
    if key is None:
        (forger.folder / "checkpoint.json").write_text(str(value), encoding="utf-8")
    else:
        forger.seal(forger.manifest() | {key: value})
    subject = Subject(7)
    before = subject.everything()
    with pytest.raises(UsageError, match=r"damaged|pipeflow reads 2|written by a newer pipeflow"):
        load_checkpoint(forger.folder, subject.model)
    assert subject.everything() == before


def test_a_pickle_that_torch_would_unpickle_does_run() -> None:
    """What the trials put into checkpoints is malicious indeed."""
    with pytest.raises(FileExistsError):
        pickle.loads(pickle.dumps(Evil(Path("/"))))
    stream = io.BytesIO()
    torch.save(Evil(Path("/")), stream)
    stream.seek(0)
    with pytest.raises(FileExistsError):
        torch.load(stream, weights_only=False)
