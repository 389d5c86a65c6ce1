"""ColossalAI's ChatGLM models: transformers' GlmModel and GlmForCausalLM. Their weights have GLM's names."""

from __future__ import annotations

from pipeflow.huggingface.library import library

__all__ = ["ChatGLMForConditionalGeneration", "ChatGLMModel"]

ChatGLMModel = library().GlmModel
ChatGLMForConditionalGeneration = library().GlmForCausalLM
