"""ColoInitContext: makes modules with parameters that can be split afterwards."""

from __future__ import annotations

from contextlib import AbstractContextManager
from threading import RLock, get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pipeflow.colossalai.tensor import ColoParameter, ColoTensorSpec, ProcessGroup, ReplicaSpec, ShardSpec
from pipeflow.core.errors import UsageError

__all__ = ["ColoInitContext"]

_ONE_THREAD = RLock()  # all threads share torch's hooks


class ColoInitContext(AbstractContextManager["ColoInitContext"]):
    """Inside the `with` block, every parameter that a module registers becomes a ColoParameter on `device`. A parameter
    that several modules share stays one parameter. One on the meta device is left as it is: `from_pretrained` of
    transformers registers the loaded one in its place.

    Args:
        device: device of the parameters.
        dtype: dtype of floating-point parameters; by default they keep their own.
        default_pg: the ProcessGroup of all parameters; by default one without tensor ranks.
        default_dist_spec: must be ReplicaSpec(), the default. Split parameters later with `set_tensor_spec`.

    Raises UsageError for another default_dist_spec, and before `launch`.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        default_pg: ProcessGroup | None = None,
        default_dist_spec: ReplicaSpec | ShardSpec | None = None,
    ) -> None:
        if isinstance(default_dist_spec, ShardSpec):
            raise UsageError("default_dist_spec must be ReplicaSpec(): split parameters with their set_tensor_spec")
        self.device, self.dtype = torch.device(device), dtype
        self._group = ProcessGroup() if default_pg is None else default_pg
        self._made: dict[int, tuple[nn.Parameter, ColoParameter]] = {}
        self._handle: Any = None
        self._thread = 0

    def __enter__(self) -> ColoInitContext:
        _ONE_THREAD.acquire()
        self._thread = get_ident()
        self._handle = register_module_parameter_registration_hook(self._convert)  # type: ignore[arg-type]  # what it returns counts
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
        self._made.clear()
        _ONE_THREAD.release()

    def _convert(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> ColoParameter | None:
        if parameter is None or isinstance(parameter, ColoParameter) or get_ident() != self._thread:
            return None
        if parameter.is_meta and self.device.type != "meta":
            return None
        if id(parameter) not in self._made:  # the dict keeps it alive, so its id stays unique
            dtype = self.dtype if parameter.is_floating_point() else None
            data = parameter.data.to(self.device, dtype or parameter.dtype)
            spec = ColoTensorSpec(self._group, ReplicaSpec(), None)
            made = ColoParameter(data, parameter.requires_grad, spec)
            vars(made).update(vars(parameter))  # marks, such as transformers' for a weight that is loaded
            self._made[id(parameter)] = parameter, made
        return self._made[id(parameter)][1]
