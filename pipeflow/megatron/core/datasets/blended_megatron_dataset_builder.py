"""Megatron-LM's `megatron.core.datasets.blended_megatron_dataset_builder`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pipeflow.megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset


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
