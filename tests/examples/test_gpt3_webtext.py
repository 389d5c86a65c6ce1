"""The dataset of loose JSON: what a sample is, and a cache that one process makes and the others wait for."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

import gpt3.data
import gpt3.webtext
from tests.examples.conftest import write_text

LENGTH = 32


def opened(text: Path, seq_len: int = LENGTH) -> Any:
    return gpt3.webtext.WebtextDataset(text, seq_len, vocabulary=300)


def forbid_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt3.webtext, "_encode", lambda *_: pytest.fail("the text was read again"))


def test_a_sample_is_a_document_cut_or_padded(text: Path) -> None:
    write_text(text, ["word " * 100, "word"])
    dataset = opened(text)
    assert len(dataset) == 2
    (long, labels), (short, _) = dataset[0], dataset[1]
    assert labels.equal(long["input_ids"])
    assert long["input_ids"].shape == short["input_ids"].shape == (LENGTH,)
    assert long["input_ids"].dtype == torch.int64
    assert int(long["attention_mask"].sum()) == LENGTH
    kept = int(short["attention_mask"].sum())
    assert short["attention_mask"].tolist() == [1] * kept + [0] * (LENGTH - kept)
    assert 1 <= kept < 5
    assert short["input_ids"][:kept].equal(long["input_ids"][:kept])


def test_the_cache_is_used_by_the_next(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(text)
    length, ids, mask = torch.load(text.with_name(f"gpt_webtext_{LENGTH}.pt"), weights_only=True)
    assert length == LENGTH
    assert ids.equal(first.data)
    assert mask.equal(first.attention_mask)
    forbid_encoding(monkeypatch)
    assert opened(text).data.equal(first.data)


@pytest.mark.parametrize("unfit", ["damaged", "of another length", "older than the text", "beyond the vocabulary"])
def test_a_cache_that_does_not_fit_is_made_anew(text: Path, unfit: str) -> None:
    first = opened(text)
    cache = text.with_name(f"gpt_webtext_{LENGTH}.pt")
    match unfit:
        case "damaged":
            cache.write_bytes(cache.read_bytes()[:100])
        case "of another length":
            torch.save((LENGTH + 1, first.data, first.attention_mask), cache)
        case "older than the text":
            torch.save((LENGTH, first.data * 0, first.attention_mask), cache)
            write_text(text, ["new words"] * 3)
        case "beyond the vocabulary":
            torch.save((LENGTH, first.data + 300, first.attention_mask), cache)
    again = opened(text)
    assert again.data.shape == ((3, LENGTH) if unfit == "older than the text" else first.data.shape)
    assert not again.data.equal(first.data * 0)
    assert torch.load(cache, weights_only=True)[1].equal(again.data)


@pytest.mark.parametrize("line", ["no json", '{"txt": "a"}', '{"text": 3}'])
def test_a_bad_line_is_named_and_nothing_is_kept(text: Path, line: str) -> None:
    text.write_text('{"text": "good"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(gpt3.data.DataError, match=r"mine.jsonl, line 2: not of the form"):
        opened(text)
    assert [path.name for path in text.parent.glob("*.pt")] == []


def test_text_that_is_not_there_is_named(text: Path) -> None:
    with pytest.raises(gpt3.data.DataError, match=r"nowhere.jsonl: No such file"):
        opened(text.with_name("nowhere.jsonl"))
    text.write_text("", encoding="utf-8")
    with pytest.raises(gpt3.data.DataError, match="has no lines"):
        opened(text)


def open_and_count(text: Path, start: Any, results: Any) -> None:
    from gpt3 import webtext

    counted = mock.Mock(wraps=webtext._encode)
    webtext._encode = counted
    start.wait()
    dataset = webtext.WebtextDataset(text, LENGTH, vocabulary=300)
    results.put((counted.call_count, dataset.data.tolist()))


def test_of_processes_that_start_together_one_writes(text: Path) -> None:
    context: Any = multiprocessing.get_context("forkserver")
    start, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=open_and_count, args=(text, start, results), daemon=True) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(10)
    assert sorted(count for count, _ in found) == [0, 0, 0, 1]
    assert all(ids == found[0][1] for _, ids in found)


def test_the_tokenizer_of_gpt_2_is_used_where_it_is(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for transformers, which need not be installed: what is asked of it, and what is made of the answer."""
    asked: list[Any] = []

    class Tokenizer:
        unk_token = "?"
        pad_token = None

        @classmethod
        def from_pretrained(cls, name: str, *, local_files_only: bool) -> Tokenizer:
            asked.append((name, local_files_only))
            return cls()

        def __len__(self) -> int:
            return 50257

        def __call__(self, texts: list[str], **options: Any) -> dict[str, Any]:
            asked.append((self.pad_token, options))
            ids = torch.arange(len(texts) * LENGTH).view(len(texts), LENGTH) % 100
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    module: Any = ModuleType("transformers")
    module.GPT2Tokenizer = Tokenizer
    monkeypatch.setitem(sys.modules, "transformers", module)
    dataset = opened(text)
    options = {"padding": "max_length", "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
    assert asked == [("gpt2", True), ("?", options)]
    assert dataset[0][0]["input_ids"].tolist() == list(range(LENGTH))
    folder = text.with_name("gpt2")
    folder.mkdir()
    opened(text, LENGTH * 2 - LENGTH // 2)
    assert asked[2] == (str(folder), True)


def test_a_tokenizer_that_has_no_tokens_is_not_used(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers makes one where it finds no files: every id would be 0."""

    class Empty:
        unk_token = pad_token = "?"

        @classmethod
        def from_pretrained(cls, *_: object, **__: object) -> Empty:
            return cls()

        def __len__(self) -> int:
            return 1

        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            ids = torch.zeros(len(texts), LENGTH, dtype=torch.int64)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    module: Any = ModuleType("transformers")
    module.GPT2Tokenizer = Empty
    monkeypatch.setitem(sys.modules, "transformers", module)
    ids = torch.zeros(3, LENGTH, dtype=torch.int64)
    torch.save((LENGTH, ids, torch.ones_like(ids)), text.with_name(f"gpt_webtext_{LENGTH}.pt"))  # as it once was made
    assert len(opened(text).data.unique()) > 1
    text.with_name("gpt2").mkdir()
    with pytest.raises(gpt3.data.DataError, match=r"gpt2: has no GPT-2 tokenizer: put its vocab\.json"):
        opened(text, LENGTH + 1)
