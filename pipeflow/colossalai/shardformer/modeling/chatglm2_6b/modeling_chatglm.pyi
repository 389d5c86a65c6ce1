# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.chatglm import ChatGLMForConditionalGeneration, ChatGLMModel

__all__ = ["ChatGLMForConditionalGeneration", "ChatGLMModel"]
