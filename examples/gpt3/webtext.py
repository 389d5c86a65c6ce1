"""WebtextDataset: documents in JSON lines as sequences of one length, tokenized once.

The cache `gpt_webtext_{seq_len}.pt` next to the text contains `(seq_len, ids, mask)`. The first process on a machine
makes it while it holds a lock on the text; the others read it afterwards. Must not contain: batches, or which rank
reads which.
"""

from __future__ import annotations

import fcntl
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gpt3.data import END, DataError, documents, train_tokenizer, whole_file

BYTES = 256  # a tokenizer with only these tokens is untrained: transformers makes one if it finds no files
Sample = tuple[dict[str, Tensor], Tensor]


class WebtextDataset(Dataset[Sample]):
    """The documents in a file of `{"text": ...}` lines, each cut or padded to `seq_len` tokens.

    A sample is `({"input_ids": ids, "attention_mask": mask}, ids)`, int64 tensors of shape (seq_len,); the mask is 0
    for padding. The tokenizer is GPT-2's if transformers and the tokenizer's files are on this machine (in a folder
    `gpt2` next to the text, or in transformers' cache), else a byte-level BPE of at most `vocabulary` tokens, trained
    on the text.

    The cache is made again if its length differs, if it is older than the text or damaged, or if it has tokens beyond
    `vocabulary`. Raises DataError with the line for text that cannot be read, and for a folder `gpt2` without a
    tokenizer.
    """

    def __init__(self, path: str | Path, seq_len: int = 1024, *, vocabulary: int = 50257) -> None:
        text = Path(path)
        cache = text.with_name(f"gpt_webtext_{seq_len}.pt")
        try:
            with text.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed or this process ends
                found = _load(cache, text, seq_len, vocabulary)
                if found is None:
                    found = _encode(text, seq_len, vocabulary)
                    with whole_file(cache) as file:
                        torch.save((seq_len, *found), file)
        except OSError as error:
            raise DataError(f"{error.filename or cache}: {error.strerror}") from None
        self.data, self.attention_mask = found

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Sample:
        return {"input_ids": self.data[index], "attention_mask": self.attention_mask[index]}, self.data[index]


def _load(cache: Path, text: Path, seq_len: int, vocabulary: int) -> tuple[Tensor, Tensor] | None:
    """The ids and the mask in the cache; None if it does not fit."""
    try:
        if cache.stat().st_mtime_ns < text.stat().st_mtime_ns:
            return None
        length, ids, mask = torch.load(cache, weights_only=True)
    except (FileNotFoundError, RuntimeError, EOFError, ValueError, TypeError, pickle.UnpicklingError):
        return None
    if length != seq_len or ids.shape != mask.shape or not 0 < int(ids.max()) < vocabulary:
        return None
    return ids, mask


def _encode(text: Path, seq_len: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    texts = list(documents(text))
    if not texts:
        raise DataError(f"{text}: has no lines")
    tokenizer = _gpt2_tokenizer(text)
    if tokenizer is None:
        return _encode_ourselves(text, texts, seq_len, vocabulary)
    tokenizer.pad_token = tokenizer.unk_token
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=seq_len, return_tensors="pt")
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    if int(ids.max()) >= vocabulary:
        raise DataError(f"{text}: GPT-2's tokenizer gives token {int(ids.max())}, beyond a vocabulary of {vocabulary}")
    return ids, mask


def _gpt2_tokenizer(text: Path) -> Any:
    """GPT-2's own tokenizer, if it is available without the network; else None."""
    try:
        from transformers import GPT2Tokenizer
    except ImportError:
        return None
    folder = text.with_name("gpt2")
    try:
        tokenizer = GPT2Tokenizer.from_pretrained(str(folder) if folder.is_dir() else "gpt2", local_files_only=True)
    except OSError:
        tokenizer = None
    if tokenizer is not None and len(tokenizer) > BYTES:
        return tokenizer
    if folder.is_dir():
        raise DataError(f"{folder}: has no GPT-2 tokenizer: put its vocab.json and merges.txt there, or remove it")
    return None


def _encode_ourselves(text: Path, texts: list[str], seq_len: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    tokenizer = train_tokenizer(text, vocabulary)
    tokenizer.enable_truncation(seq_len)
    tokenizer.enable_padding(length=seq_len, pad_id=tokenizer.token_to_id(END), pad_token=END)
    encoded = tokenizer.encode_batch_fast(texts)
    ids = torch.tensor([each.ids for each in encoded])
    mask = torch.tensor([each.attention_mask for each in encoded])
    return ids, mask
