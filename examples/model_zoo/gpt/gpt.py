"""`model_zoo.gpt.gpt` of ColossalAI's tutorials: the parts of the GPT of `gpt3`."""

from __future__ import annotations

from gpt3.model import GPTBlock, GPTEmbedding, GPTLMHead, GPTLMLoss

__all__ = ["GPTBlock", "GPTEmbedding", "GPTLMHead", "GPTLMLoss"]
