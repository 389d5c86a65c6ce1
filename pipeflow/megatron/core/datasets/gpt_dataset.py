"""Megatron-LM's `megatron.core.datasets.gpt_dataset`: samples of counting numbers, made only from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pipeflow.megatron.training.tokenizer.tokenizer import _NullTokenizer

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

    For a sequence length s, a sample has `tokens`, `labels` and `position_ids`, int64 (s,); `loss_mask`, float (s,), 0
    for tokens excluded from the loss; `attention_mask`, bool (1, s, s), True where a token must not attend.
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
