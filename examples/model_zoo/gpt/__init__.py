"""`model_zoo.gpt` of ColossalAI's tutorials: the GPT of `gpt3`."""

from __future__ import annotations

from gpt3.model import GPTLMLoss

__all__ = ["GPTLMLoss"]
