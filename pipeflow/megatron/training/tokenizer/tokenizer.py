"""Megatron-LM's `megatron.training.tokenizer.tokenizer`."""

from __future__ import annotations

from collections.abc import Sequence


class _NullTokenizer:
    """A tokenizer of text that consists of numbers from 0 to `vocab_size` - 1, with one more token, `eod`, for the end
    of a document. The attribute `vocab_size` includes that token.
    """

    def __init__(self, vocab_size: int) -> None:
        self.eod = int(vocab_size)
        self.vocab_size = self.eod + 1

    def tokenize(self, text: str) -> list[int]:
        """Returns the numbers in a text, which are separated by spaces."""
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of these numbers."""
        return " ".join(map(str, ids))
