"""Megatron-LM's `megatron.training.tokenizer.tokenizer`."""

from __future__ import annotations

from collections.abc import Sequence


class _NullTokenizer:
    """Text that is numbers already, 0 to `vocab_size` - 1, and one more token for the end of a document, `eod`. The
    attribute `vocab_size` counts that one, too.
    """

    def __init__(self, vocab_size: int) -> None:
        self.eod = int(vocab_size)
        self.vocab_size = self.eod + 1

    def tokenize(self, text: str) -> list[int]:
        """The numbers of a text, which spaces divide."""
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text again."""
        return " ".join(map(str, ids))
