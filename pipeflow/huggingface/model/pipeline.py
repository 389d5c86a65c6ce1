"""Model: a Pipeline with those attributes of a transformers model that scripts read before they train it. Must not
contain: training, generation and files.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from pipeflow.core.errors import UsageError
from pipeflow.runtime.pipeline import Pipeline


class Model(Pipeline):
    """A Pipeline of a transformers model. See Pipeline for the arguments."""

    @property
    def config(self) -> Any:
        """The model's configuration, which this rank's first stage reads."""
        chunk: Any = self.chunks[0]
        return chunk.root.config

    def get_input_embeddings(self) -> nn.Embedding:
        """The input embeddings of the whole model, on the meta device: with a shape, but without values."""
        rows, width = self._whole.get_input_embeddings().weight.shape
        return nn.Embedding(rows, width, device="meta")

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_: Any, **__: Any) -> nn.Embedding:
        """Returns the input embeddings if they have `new_num_tokens` rows, or for None. Otherwise raises UsageError."""
        embeddings = self.get_input_embeddings()
        if new_num_tokens not in (None, embeddings.num_embeddings):
            raise UsageError(
                f"a Pipeline cannot resize its embeddings from {embeddings.num_embeddings} to {new_num_tokens} rows: "
                "resize them in transformers (model.resize_token_embeddings, model.save_pretrained), then load that "
                "folder"
            )
        return embeddings

    @property
    def _whole(self) -> Any:
        chunk: Any = self.chunks[0]
        return chunk.whole
