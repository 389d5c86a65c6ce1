# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.trainers import BaseHook
from pipeflow.colossalai.hooks import AccuracyHook, LRSchedulerHook, LogMemoryByEpochHook, LogMetricByEpochHook, LogMetricByStepHook, LogTimingByEpochHook, LossHook, SaveCheckpointHook, TensorboardHook, ThroughputHook

__all__ = ["AccuracyHook", "BaseHook", "LRSchedulerHook", "LogMemoryByEpochHook", "LogMetricByEpochHook", "LogMetricByStepHook", "LogTimingByEpochHook", "LossHook", "SaveCheckpointHook", "TensorboardHook", "ThroughputHook"]
