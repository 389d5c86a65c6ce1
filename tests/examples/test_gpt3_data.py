"""The text of the GPT example: its cache is made once, used again, and never believed when it does not fit."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import gpt3.data

VOCABULARY = 300


def message(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed: nothing, or one line."""
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 1
    return lines[0] if lines else ""


def same(one: Any, other: Any) -> bool:
    return bool(one.training.equal(other.training) and one.held_out.equal(other.held_out))


@pytest.fixture
def first(cache: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    corpus = gpt3.data.prepare(text, VOCABULARY)
    assert "mine.pt: not there yet" in message(capsys)
    return corpus


def test_a_second_start_uses_the_cache(cache: Path, text: Path, first: Any, capsys: pytest.CaptureFixture[str]) -> None:
    [made] = cache.iterdir()
    before = made.stat()
    assert same(gpt3.data.prepare(text, VOCABULARY), first)
    assert message(capsys) == ""
    assert (made.stat().st_ino, made.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_tokens_are_the_text_and_every_twentieth_document_is_held_out(text: Path, first: Any) -> None:
    documents = [json.loads(line)["text"] for line in text.read_text(encoding="utf-8").splitlines()]

    def decoded(tokens: Any) -> list[str]:
        texts: list[str] = first.tokenizer.decode(tokens.tolist(), skip_special_tokens=False).split("<|endoftext|>")
        return texts[:-1]

    assert decoded(first.held_out) == documents[::20]
    assert decoded(first.training) == [document for number, document in enumerate(documents) if number % 20]


@pytest.mark.parametrize("damage", ["truncated", "one byte", "empty", "foreign"])
def test_a_damaged_cache_is_made_anew(
    cache: Path, text: Path, first: Any, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = cache / "mine.pt"
    content = bytearray(made.read_bytes())
    middle = len(content) // 2
    match damage:
        case "truncated":
            del content[middle:]
        case "one byte":
            content[middle] ^= 1
        case "empty":
            content.clear()
        case "foreign":
            content[:] = b"something else\nthat somebody put here"
    made.write_bytes(content)
    assert same(gpt3.data.prepare(text, VOCABULARY), first)
    assert "mine.pt: damaged" in message(capsys)
    gpt3.data.prepare(text, VOCABULARY)
    assert message(capsys) == ""


def test_a_cache_of_something_else_is_made_anew(
    cache: Path,
    text: Path,
    first: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    smaller = gpt3.data.prepare(text, VOCABULARY - 20)
    assert "of a vocabulary of 300, not 280" in message(capsys)
    assert smaller.tokenizer.get_vocab_size() == 280
    text.write_text(text.read_text(encoding="utf-8").replace("number", "figure"), encoding="utf-8")
    gpt3.data.prepare(text, VOCABULARY - 20)
    assert "of another text" in message(capsys)
    monkeypatch.setattr(gpt3.data, "FORMAT", gpt3.data.FORMAT + 1)
    gpt3.data.prepare(text, VOCABULARY - 20)
    assert "of another version" in message(capsys)


@pytest.mark.parametrize("line", ["no json", '{"txt": "a"}', '{"text": 3}', "[]", '"text"', "{", "", "\udcff"])
def test_a_bad_line_is_named(cache: Path, text: Path, line: str) -> None:
    content = text.read_bytes().splitlines()
    content[6] = line.encode(errors="surrogateescape")
    text.write_bytes(b"\n".join(content))
    with pytest.raises(gpt3.data.DataError, match=r"^\S*mine.jsonl, line 7: [^\n]*$"):
        gpt3.data.prepare(text, VOCABULARY)
    assert list(cache.iterdir()) == []


def test_text_that_cannot_be_used_is_refused(cache: Path, text: Path) -> None:
    with pytest.raises(gpt3.data.DataError, match="No such file"):
        gpt3.data.prepare(text.with_name("nowhere.jsonl"), VOCABULARY)
    text.write_text('{"text": "the only line"}\n', encoding="utf-8")
    with pytest.raises(gpt3.data.DataError, match="at least two lines"):
        gpt3.data.prepare(text, VOCABULARY)


def test_a_failed_write_leaves_the_old_cache(
    cache: Path, text: Path, first: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (cache / "mine.pt").read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(gpt3.data.DataError, match="No space left"):
        gpt3.data.prepare(text, VOCABULARY + 1)
    assert [path.name for path in cache.iterdir()] == ["mine.pt"]
    assert (cache / "mine.pt").read_bytes() == before


def test_without_a_file_the_library_is_read_but_not_its_tests(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    for name in ("a.py", "b.py", "inside/c.py", "test/d.py", "site-packages/e.py", "inside/f.txt"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"this is {name}", encoding="utf-8")
    monkeypatch.setattr(gpt3.data, "LIBRARY", library)
    gpt3.data.prepare(None, VOCABULARY)
    lines = (cache / "python.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"text": f"this is {name}"} for name in ("a.py", "b.py", "inside/c.py")
    ]


def test_other_ranks_wait_for_the_one_that_prepares(cache: Path, text: Path) -> None:
    found: list[Any] = []
    cache.mkdir()
    (cache / "mine.pt").write_bytes(b"half")
    waiting = threading.Thread(target=lambda: found.append(gpt3.data.wait_for(text, VOCABULARY)))
    waiting.start()
    corpus = gpt3.data.prepare(text, VOCABULARY)
    waiting.join(timeout=10)
    assert same(found[0], corpus)


def test_batches_depend_on_seed_and_step_alone(first: Any) -> None:
    batch = first.batch(4, 16, seed=1, step=2)
    assert batch.shape == (4, 16)
    assert batch.equal(first.batch(4, 16, seed=1, step=2))
    assert not batch.equal(first.batch(4, 16, seed=1, step=3))
    assert not batch.equal(first.batch(4, 16, seed=2, step=2))
    assert not batch.equal(first.batch(4, 16, seed=1, step=2, held_out=True))
    longer_than_the_text = len(first.held_out) + 5
    assert first.batch(2, longer_than_the_text, seed=0, step=0, held_out=True).shape == (2, longer_than_the_text)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, cache: Path, text: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(gpt3.data.DataError, match=r"need the package tokenizers: pip install '\.\[examples\]'"):
        gpt3.data.prepare(text, VOCABULARY)
