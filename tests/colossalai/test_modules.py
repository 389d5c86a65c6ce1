"""Small modules of ColossalAI: questions about a process, and precisions."""

from __future__ import annotations

import pytest
import torch

from pipeflow.colossalai.amp import AMP_TYPE
from pipeflow.colossalai.utils import get_current_device, is_using_pp
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import current_context
from pipeflow.optim import HalfPrecision
from pipeflow.testing import run_threads
from pipeflow.training import read_config


def test_questions_about_this_process() -> None:
    assert run_threads(is_using_pp, 2) == [True, True]
    assert run_threads(is_using_pp, 2, tensor=2) == [False, False]
    assert run_threads(lambda: get_current_device() == current_context().device, 1) == [True]
    with pytest.raises(UsageError, match="there is no context"):
        get_current_device()


def test_precisions_are_ours_under_their_names() -> None:
    assert read_config({"fp16": {"mode": AMP_TYPE.NAIVE}}).precision == HalfPrecision("parameters", torch.float16)
    assert read_config({"bf16": {"mode": AMP_TYPE.TORCH}}).precision == HalfPrecision("autocast", torch.bfloat16)
    with pytest.raises(UsageError, match="must be 'parameters' or 'autocast', got"):
        read_config({"fp16": {"mode": AMP_TYPE.APEX}})
