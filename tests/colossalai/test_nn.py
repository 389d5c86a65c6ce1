"""Which layer a name stands for follows from its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from pipeflow.colossalai import nn as col_nn
from pipeflow.core.errors import UsageError
from pipeflow.engine import tensor
from tests.tensor.ranks import Place, indices, joined, normal, on_ranks, require_near

TWO: Any = Place(0, 2)


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda: col_nn.Linear(4, 8, group=TWO), "ColumnParallelLinear"),
        (lambda: col_nn.Linear(4, 8, False, gather_output=True, group=TWO), "ColumnParallelLinear"),
        (lambda: col_nn.Linear(4, 8, input_is_parallel=True, group=TWO), "RowParallelLinear"),
        (lambda: col_nn.Embedding(2048, 4, group=TWO), "HiddenParallelEmbedding"),
        (lambda: col_nn.Embedding(2049, 4, group=TWO), "VocabParallelEmbedding"),
        (lambda: col_nn.Embedding(9, 4, vocab_parallel_limit=8, group=TWO), "VocabParallelEmbedding"),
        (lambda: col_nn.Classifier(4, 2048, group=TWO), "Classifier"),
        (lambda: col_nn.Classifier(4, 2049, group=TWO), "VocabParallelClassifier"),
        (lambda: col_nn.PatchEmbedding(4, 2, 1, 4), "PatchEmbedding"),
        (lambda: col_nn.LayerNorm(4, eps=1e-6), "LayerNorm"),
        (lambda: col_nn.Dropout(0.1), "Dropout"),
    ],
)
def test_names(made: Any, kind: str) -> None:
    assert type(made()) is getattr(tensor, kind)


def test_a_contradiction_is_refused() -> None:
    with pytest.raises(UsageError, match="gather_output"):
        col_nn.Linear(4, 8, input_is_parallel=True, gather_output=True)


@pytest.mark.parametrize("size", [1, 2])
def test_the_loss_of_whole_and_of_split_logits(size: int) -> None:
    logits, labels = normal(6, 12), indices(6, below=12)
    expected = functional.cross_entropy(logits, labels, label_smoothing=0.1)

    def rank() -> None:
        group = col_nn.CrossEntropyLoss().group
        part = logits.chunk(group.size, -1)[group.rank].contiguous()
        require_near(joined(part), logits)
        loss = col_nn.CrossEntropyLoss(num_classes=12, label_smoothing=0.1)
        require_near(loss(part, labels), expected)
        require_near(loss(logits, labels), expected)
        require_near(col_nn.CrossEntropyLoss(label_smoothing=0.1)(logits, labels), expected)
        with pytest.raises(UsageError, match="a vocabulary of 12"):
            loss(logits[:, :5], labels)
        if group.size > 1:
            with pytest.raises(UsageError, match="labels must be from 0 to 5"):
                col_nn.CrossEntropyLoss()(part, torch.full((6,), 11))

    on_ranks(size, rank)
