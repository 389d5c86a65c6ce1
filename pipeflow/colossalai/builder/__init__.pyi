# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.layers import build_pipeline_model, build_pipeline_model_from_cfg

__all__ = ["build_pipeline_model", "build_pipeline_model_from_cfg"]
