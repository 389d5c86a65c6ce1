# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.chatglm import ChatGLMConfig

__all__ = ["ChatGLMConfig"]
