"""The text, its tokens and the batches. Tokens are made once and cached in one file, which is written whole or not at
all.

The text is a file with one JSON object `{"text": ...}` per line: your own, or the sources of Python's standard library,
10 MB that every machine has. A byte-level BPE is trained on it. The cache is `data/<name>.pt` in this repository, or in
$PIPEFLOW_CACHE. It records its source and begins with a digest, so it is made again if it is damaged or the text has
changed. Must not contain: ranks; every rank draws the same batches by itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import platform
import sysconfig
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 1  # of the cache: increase it when the contents change
SAMPLE = 20_000_000  # characters that the tokenizer is trained on, at most
HELD_OUT = 20  # every twentieth document is kept from training
END = "<|endoftext|>"  # between documents
LIBRARY = Path(sysconfig.get_path("stdlib"))
NOT_READ = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}


class DataError(Exception):
    """The text or its cache cannot be used; the message is one line with the place and the reason."""


@dataclass(frozen=True)
class Corpus:
    """The tokens of the text, in two parts, and the tokenizer that made them."""

    training: Tensor
    held_out: Tensor
    tokenizer: Tokenizer

    def batch(self, size: int, length: int, *, seed: int, step: int, held_out: bool = False) -> Tensor:
        """Token ids (size, length), from places in the text that depend only on seed and step."""
        tokens = self.held_out if held_out else self.training
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        starts = torch.randint(max(1, len(tokens) - length), (size, 1), generator=generator)
        return tokens[(starts + torch.arange(length)) % len(tokens)].long()


def prepare(data: Path | None, vocabulary: int) -> Corpus:
    """The corpus of the file `data` (None: Python's standard library), from the cache or made now.

    One process per machine calls this, the others call `wait_for`. Raises DataError for text that cannot be read.
    """
    cache, source = _cache_of(data), _source_of(data)
    corpus, fault = _load(cache, source, vocabulary)
    if corpus is None:
        print(f"{cache}: {fault}; reading the text and training a tokenizer, some seconds", flush=True)
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            _write(cache, source, vocabulary, data or write_library(cache.with_suffix(".jsonl")))
        except OSError as error:
            raise DataError(f"{error.filename or cache}: {error.strerror}") from None
        corpus, fault = _load(cache, source, vocabulary)
    if corpus is None:
        raise DataError(f"{cache}: {fault}, although just written")
    return corpus


def wait_for(data: Path | None, vocabulary: int) -> Corpus:
    """The corpus that another process of this machine prepares."""
    cache, source = _cache_of(data), _source_of(data)
    while (corpus := _load(cache, source, vocabulary)[0]) is None:
        time.sleep(0.2)
    return corpus


def _cache_of(data: Path | None) -> Path:
    folder = Path(os.environ.get("PIPEFLOW_CACHE") or Path(__file__).parents[2] / "data")
    return folder / ("python.pt" if data is None else f"{data.stem}.pt")


def _source_of(data: Path | None) -> str:
    """An id of the text: the digest of the user's file, or Python's version for the standard library."""
    if data is None:
        return f"Python {platform.python_version()} in {LIBRARY}"
    try:
        with data.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{data}: {error.strerror}") from None


def _load(cache: Path, source: str, vocabulary: int) -> tuple[Corpus, str] | tuple[None, str]:
    """The corpus in the cache; or None and the reason why it cannot be used."""
    try:
        digest, content = cache.read_bytes().split(b"\n", 1)
    except FileNotFoundError:
        return None, "not there yet"
    except (OSError, ValueError):
        return None, "damaged"
    if digest.decode(errors="replace") != hashlib.sha256(content).hexdigest():
        return None, "damaged"
    made = torch.load(io.BytesIO(content), weights_only=True)
    if made["format"] != FORMAT:
        return None, "of another version"
    if made["source"] != source:
        return None, "of another text"
    if made["vocabulary"] != vocabulary:
        return None, f"of a vocabulary of {made['vocabulary']}, not {vocabulary}"
    return Corpus(made["training"], made["held_out"], _tokenizers().Tokenizer.from_str(made["tokenizer"])), ""


def _write(cache: Path, source: str, vocabulary: int, data: Path) -> None:
    tokenizer = train_tokenizer(data, vocabulary)
    parts = {"held_out": array("i"), "training": array("i")}
    end = tokenizer.token_to_id(END)
    assert end is not None
    texts_left, number = documents(data), 0
    while texts := list(islice(texts_left, 100)):
        for encoded in tokenizer.encode_batch_fast(texts):
            parts["training" if number % HELD_OUT else "held_out"].extend([*encoded.ids, end])
            number += 1
    if number < 2:
        raise DataError(f"{data}: needs at least two lines of text, since the first is kept from training")
    tokens = {name: torch.frombuffer(part, dtype=torch.int32) for name, part in parts.items()}
    made = {"format": FORMAT, "source": source, "vocabulary": vocabulary, "tokenizer": tokenizer.to_str(), **tokens}
    content = io.BytesIO()
    torch.save(made, content)
    with whole_file(cache) as file:
        file.write(hashlib.sha256(content.getvalue()).hexdigest().encode() + b"\n" + content.getvalue())


def library() -> Path:
    """The file with the sources of Python's standard library; the first process that calls this writes it."""
    file = _cache_of(None).with_suffix(".jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        return file if file.exists() else write_library(file)
    finally:
        os.close(folder)


def write_library(data: Path) -> Path:
    """Writes the sources of Python's standard library, without tests and tables, as JSON lines."""
    paths = (path for path in sorted(LIBRARY.rglob("*.py")) if not NOT_READ & set(path.relative_to(LIBRARY).parts))
    with whole_file(data) as file:
        for path in paths:
            file.write(json.dumps({"text": path.read_text(encoding="utf-8", errors="replace")}).encode() + b"\n")
    return data


def documents(data: Path) -> Iterator[str]:
    """The text of every line. Raises DataError with the number of an invalid line."""
    with data.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = json.loads(line)["text"].encode(errors="replace").decode()
            except (ValueError, KeyError, TypeError, AttributeError):
                raise DataError(f'{data}, line {number}: not of the form {{"text": "..."}}') from None
            yield text


def _tokenizers() -> ModuleType:
    """The package tokenizers. Raises DataError if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise DataError("the examples need the package tokenizers: pip install '.[examples]'") from None
    return tokenizers


def train_tokenizer(data: Path, vocabulary: int) -> Tokenizer:
    """A byte-level BPE of at most `vocabulary` tokens, including END, trained on the file `data`."""
    package = _tokenizers()
    tokenizer: Tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_sample(data), trainer)
    return tokenizer


def _sample(data: Path) -> Iterator[str]:
    left = SAMPLE
    for text in documents(data):
        if left <= 0:
            return
        yield text[:left]
        left -= len(text)


@contextmanager
def whole_file(path: Path) -> Iterator[io.BufferedWriter]:
    """A file that appears under its name when it is complete; if writing fails, it does not appear."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
