# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.layers import build_pipeline_model, build_pipeline_model_from_cfg
from pipeflow.core.partition import partition_balanced, partition_uniform

__all__ = ["build_pipeline_model", "build_pipeline_model_from_cfg", "partition_balanced", "partition_uniform"]
