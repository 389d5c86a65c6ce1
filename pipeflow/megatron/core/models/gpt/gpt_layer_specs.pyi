# Written by `make stubs` from the table of the package.
from pipeflow.megatron.gpt_model import get_gpt_layer_local_spec

__all__ = ["get_gpt_layer_local_spec"]
