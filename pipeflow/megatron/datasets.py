"""Megatron-LM's `megatron.core.datasets`, with its tokenizer: samples of counting numbers, made only from a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset


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


Sample = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class GPTDatasetConfig:
    """Settings of samples. A sequence may contain several documents.

    Attributes:
        random_seed: seed of the samples.
        sequence_length: number of tokens in a sample.
        tokenizer: the tokenizer.
        reset_position_ids: count positions from 0 in each document.
        reset_attention_mask: hide earlier documents from each document.
        eod_mask_loss: exclude the token after the end of a document from the loss.
    """

    random_seed: int
    sequence_length: int
    tokenizer: _NullTokenizer
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False


class MockGPTDataset(Dataset[Sample]):
    """A data set of `size` samples. A sample is a sequence of documents that count upwards from random numbers.

    For a sequence length s, a sample has `tokens`, `labels` and `position_ids`, int64 (s,). Its `loss_mask`, float
    (s,), is 0 for tokens excluded from the loss. Its `attention_mask`, bool (1, s, s), is True where a token must not
    attend.
    """

    def __init__(self, config: GPTDatasetConfig, size: int) -> None:
        self.config = config
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} of {self.size}")
        text = self._text(index)
        tokens, labels = text[:-1], text[1:]
        length, eod = self.config.sequence_length, self.config.tokenizer.eod
        positions, hidden = torch.arange(length), torch.ones(length, length, dtype=torch.bool).triu(1)
        ends = (tokens == eod).nonzero().flatten().tolist()
        for end in ends:
            if self.config.reset_position_ids:
                positions[end + 1 :] = torch.arange(length - end - 1)
            if self.config.reset_attention_mask:
                hidden[end + 1 :, : end + 1] = True
        counts = torch.ones(length)
        if self.config.eod_mask_loss:
            counts[ends] = 0
        return {
            "tokens": tokens,
            "labels": labels,
            "attention_mask": hidden[None],
            "loss_mask": counts,
            "position_ids": positions,
        }

    def _text(self, index: int) -> Tensor:
        """The tokens of a sample and one more, since labels are tokens shifted by one."""
        wanted, words = self.config.sequence_length + 1, self.config.tokenizer.eod
        generator = torch.Generator().manual_seed(1_000_003 * self.config.random_seed + index)
        pieces, length = [], 0
        while length < wanted:
            start, count = torch.randint(words, (2,), generator=generator).tolist()
            pieces += [(start + torch.arange(count)) % words, torch.tensor([self.config.tokenizer.eod])]
            length += count + 1
        return torch.cat(pieces)[:wanted]


class BlendedMegatronDatasetBuilder:
    """Builds the data sets for training, validation and test.

    Args:
        dataset: class whose `dataset(config, size)` makes a data set.
        sizes: number of samples of each of the three; None makes none.
        is_built_on_rank: returns True on ranks that build.
        config: the configuration of the data sets.
    """

    def __init__(
        self,
        dataset: Callable[[GPTDatasetConfig, int], MockGPTDataset],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: GPTDatasetConfig,
    ) -> None:
        self.dataset = dataset
        self.sizes = sizes
        self.is_built_on_rank = is_built_on_rank
        self.config = config

    def build(self) -> list[MockGPTDataset | None]:
        """Returns the three data sets, each with its own seed; None for those not built here."""
        built = self.is_built_on_rank()
        seeds = [self.config.random_seed + 1000 * index for index in range(len(self.sizes))]
        return [
            self.dataset(replace(self.config, random_seed=seed), size) if built and size is not None else None
            for seed, size in zip(seeds, self.sizes, strict=True)
        ]


def compile_helpers() -> None:
    """Does nothing, since nothing has to be compiled here."""
