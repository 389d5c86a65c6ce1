"""Mock data under Megatron-LM's names: samples that follow from the seed, and what each flag changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeflow.megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from pipeflow.megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from pipeflow.megatron.core.datasets.utils import compile_helpers
from pipeflow.megatron.training.tokenizer.tokenizer import _NullTokenizer

LENGTH = 64


@pytest.fixture
def config() -> Any:
    return GPTDatasetConfig(random_seed=0, sequence_length=LENGTH, tokenizer=_NullTokenizer(vocab_size=LENGTH))


def sample_with_an_end(config: Any) -> tuple[Any, int]:
    """A sample in which a document ends well before the sequence does, and where."""
    dataset = MockGPTDataset(config, 100)
    for sample in (dataset[index] for index in range(len(dataset))):
        ends = (sample["tokens"] == config.tokenizer.eod).nonzero().flatten().tolist()
        if len(ends) == 1 and 0 < ends[0] < LENGTH - 3:
            return sample, ends[0]
    raise AssertionError("no document ends")


def test_the_builder_makes_the_sets_that_are_asked_for(config: Any) -> None:
    compile_helpers()
    builder = BlendedMegatronDatasetBuilder
    train, valid, test = builder(MockGPTDataset, [1000, None, None], lambda: True, config).build()
    assert train is not None
    assert (len(train), valid, test) == (1000, None, None)
    assert builder(MockGPTDataset, [10, 10, 10], lambda: False, config).build() == [None] * 3
    train, valid, _ = builder(MockGPTDataset, [1, 1, None], lambda: True, config).build()
    assert train is not None
    assert valid is not None
    assert not train[0]["tokens"].equal(valid[0]["tokens"])
    [three] = builder(MockGPTDataset, [3], lambda: True, config).build()
    assert three is not None
    with pytest.raises(IndexError, match="sample 3 of 3"):
        three[3]


def test_samples_follow_from_seed_and_index(config: Any) -> None:
    dataset = MockGPTDataset(config, 10)
    again, other = dataset[3], MockGPTDataset(replace(config, random_seed=1), 10)[3]
    assert all(value.equal(again[name]) for name, value in dataset[3].items())
    assert not dataset[4]["tokens"].equal(dataset[3]["tokens"])
    assert not other["tokens"].equal(dataset[3]["tokens"])


def test_a_sample_counts_and_its_labels_are_what_comes_next(config: Any) -> None:
    sample, end = sample_with_an_end(config)
    tokens, labels = sample["tokens"], sample["labels"]
    assert labels[:-1].equal(tokens[1:])
    assert tokens[1:end].equal((tokens[: end - 1] + 1) % config.tokenizer.eod)
    assert int(tokens.max()) < config.tokenizer.vocab_size
    assert sample["position_ids"].tolist() == list(range(LENGTH))
    assert sample["loss_mask"].equal(torch.ones(LENGTH))
    assert sample["attention_mask"].equal(torch.ones(1, LENGTH, LENGTH).triu(1).bool())


def test_flags_change_what_they_name(config: Any) -> None:
    plain, end = sample_with_an_end(config)
    for flag, changed in (
        ("reset_position_ids", "position_ids"),
        ("reset_attention_mask", "attention_mask"),
        ("eod_mask_loss", "loss_mask"),
    ):
        sample, same_end = sample_with_an_end(replace(config, **{flag: True}))
        assert same_end == end
        assert {name for name, value in sample.items() if not value.equal(plain[name])} == {changed}
        match changed:
            case "position_ids":
                assert sample[changed][: end + 3].tolist() == [*range(end + 1), 0, 1]
            case "attention_mask":
                assert bool(sample[changed][0, end + 1 :, : end + 1].all())
                assert sample[changed][0, : end + 1].equal(plain[changed][0, : end + 1])
            case _:
                assert sample[changed][: end + 2].tolist() == [1.0] * end + [0.0, 1.0]


def test_the_tokenizer_reads_numbers() -> None:
    tokenizer = _NullTokenizer(vocab_size=64)
    assert (tokenizer.vocab_size, tokenizer.eod) == (65, 64)
    assert tokenizer.detokenize(tokenizer.tokenize("3 1 4")) == "3 1 4"
