"""Hooks: what a `Trainer` does beside training. Each is a file here; `Hook` is their base."""

from __future__ import annotations

from pipeflow.training.hook import Hook
from pipeflow.training.hooks.metrics import AccuracyHook, MetricHook
from pipeflow.training.hooks.rates import RateHook

__all__ = ["AccuracyHook", "Hook", "MetricHook", "RateHook"]
