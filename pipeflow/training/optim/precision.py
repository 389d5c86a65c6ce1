"""The precision that a model is trained in: HalfPrecision says it as a value, MasterWeights steps float32 copies of
16-bit weights, and a LossScaler keeps small gradients above zero in float16 (Micikevicius et al., 2018,
arXiv:1710.03740, sections 3.1 and 3.2).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.sharding import local_part
from pipeflow.engine.runtime.confirmation import Clipping, scale_gradients
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.tensor.stepping import innermost
from pipeflow.engine.torch_private.tensors import foreach_copy_
from pipeflow.training.optim.clip import grad_norm
from pipeflow.training.optim.optimizer import Wrapper, give_states


class LossScaler:
    """A loss scale that grows after steps without overflow and shrinks after overflows.

    Args:
        initial_scale: the scale at the start.
        growth_factor: factor by which the scale grows.
        backoff_factor: factor by which the scale shrinks, less than 1.
        growth_interval: number of consecutive steps without overflow after which the scale grows.
        hysteresis: after so many overflows since the scale last grew, each overflow shrinks it; 1 shrinks it at every
            overflow.
        min_scale, max_scale: bounds of the scale.

    Raises UsageError for numbers out of range.
    """

    def __init__(
        self,
        *,
        initial_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        min_scale: float = 1.0,
        max_scale: float = 2.0**32,
    ) -> None:
        if not 0 < min_scale <= initial_scale <= max_scale:
            bounds = f"min_scale {min_scale} <= initial_scale {initial_scale} <= max_scale {max_scale}"
            raise UsageError(f"a LossScaler needs 0 < {bounds}")
        if not 0 < backoff_factor < 1 < growth_factor:
            raise UsageError(
                f"a LossScaler needs 0 < backoff_factor {backoff_factor} < 1 < growth_factor {growth_factor}"
            )
        if growth_interval < 1 or hysteresis < 1:
            raise UsageError(
                f"growth_interval and hysteresis must be at least 1, got {growth_interval} and {hysteresis}"
            )
        self._growth = (growth_factor, growth_interval, max_scale)
        self._backoff = (backoff_factor, hysteresis, min_scale)
        self._now = _counters(initial_scale, 0, hysteresis)  # scale; steps without overflow; overflows until it shrinks

    @property
    def scale(self) -> float:
        """The current factor of the loss. On a GPU the host waits for it if `update` got a tensor there."""
        return float(self._now[0])

    def update(self, *, overflow: bool | Tensor) -> None:
        """Updates the scale after a step, on the device of `overflow` if this is a tensor. All ranks call it with the
        same argument.
        """
        overflow = torch.as_tensor(overflow)
        self._now = self._now.to(overflow.device, non_blocking=True)
        scale, clean, patience = self._now.unbind()
        (growth, interval, largest), (backoff, hysteresis, smallest) = self._growth, self._backoff
        grows, fewer = clean + 1 == interval, (patience - 1).clamp(min=0)
        smaller = torch.where(fewer == 0, (scale * backoff).clamp(min=smallest), scale)
        larger = torch.where(grows, (scale * growth).clamp(max=largest), scale)
        counted, patient = torch.where(grows, 0.0, clean + 1), torch.where(grows, float(hysteresis), patience)
        bad, good = torch.stack([smaller, torch.zeros_like(clean), fewer]), torch.stack([larger, counted, patient])
        self._now = torch.where(overflow, bad, good)

    def factor(self) -> Tensor:
        """`scale` where it is: a float64 scalar, for which the host does not wait."""
        return self._now[0]

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale and its counters."""
        scale, clean, patience = self._now.tolist()
        return {"scale": scale, "clean": int(clean), "patience": int(patience)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""
        self._now = _counters(*(state_dict[key] for key in ("scale", "clean", "patience")))


def _counters(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


LOG = logging.getLogger("pipeflow")


class MasterWeights(Wrapper):
    """Wraps an optimizer so that it steps float32 copies (masters) of the model's bfloat16 or float16 parameters. After
    each step, the parameters are set to the rounded masters. float32 and float64 parameters are their own masters.

    If other code changes a parameter, such as a checkpoint loaded without this optimizer, the next step copies it to
    its master. torch does not report writes through `parameter.data`, so write to the parameter itself, under
    torch.no_grad().

    With a scaler, gradients are `model.loss_scale` times too large until `step` divides them, in float32. If any
    gradient on any rank of the world is not finite, all ranks skip the step and change the scale in the same way. All
    ranks make a MasterWeights and call `step` together.

    Args:
        model: this rank's Pipeline.
        optimizer: an optimizer of its parameters, or a Zero of one.
        scaler: loss scaler; needed for float16, in which small gradients would become zero.

    torch's fused optimizers (`fused=True`) skip the step in their kernels. With them, the host does not wait for a GPU
    until somebody reads `skipped`, `step_was_skipped` or `scaler.scale`.

    Raises UsageError if `optimizer` steps other parameters.
    """

    model: Pipeline

    def __init__(self, model: Pipeline, optimizer: Optimizer, *, scaler: LossScaler | None = None) -> None:
        super().__init__(model, optimizer)
        self.scaler = scaler
        self._overflow, self._skipped = torch.zeros(2, dtype=torch.int64, device="cpu")
        self._clipping = Clipping(self.parameters)
        model.clippings.add(self._clipping)
        self._versions: dict[nn.Parameter, int] = {}
        self._put_masters()
        self._note_versions()
        self._tell_scale()

    @property
    def skipped(self) -> int:
        """Number of skipped steps."""
        return int(self._skipped)

    @property
    def step_was_skipped(self) -> bool:
        """True if the last `step` changed nothing because a gradient overflowed:
        `if not optimizer.step_was_skipped: scheduler.step()`.
        """
        return bool(self._overflow)

    def _put_masters(self) -> None:
        plain, states = innermost(self), {}
        for parameter in self.stepped:
            is_half = parameter.dtype in (torch.bfloat16, torch.float16)
            copy = nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad) if is_half else None
            self.stepped[parameter] = master = parameter if copy is None else copy
            states[id(master)] = plain.state.pop(parameter, {})
        for group in plain.param_groups:
            group["params"] = [self.stepped[parameter] for parameter in group["params"]]
        give_states(plain, states)  # some optimizers have states from the start
        self.share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure, so no loss
        """Steps the masters and sets the parameters to the rounded masters. With a scaler, skips the step if a gradient
        overflowed. Raises PipelineError as `execute_pipeline` does.
        """
        self.refuse_closure(closure)
        norm, clip = self._clipping.taken()
        factor = 1 / self.model.loss_scale if clip is None else clip / self.model.loss_scale
        if self.scaler is None:
            self._step(factor)
            return
        overflow = ~(grad_norm(self.model) if norm is None else norm).isfinite()
        plain = innermost(self)
        if getattr(plain, "_step_supports_amp_scaling", False):
            plain.found_inf = overflow.float()  # type: ignore[attr-defined]  # torch reads it from there
            try:
                self._step(factor)
            finally:
                del plain.found_inf  # type: ignore[attr-defined]  # as above
        elif not overflow:
            self._step(factor)
        elif self.model.context.rank == 0:
            LOG.info("gradients overflowed at loss scale %g: the step is skipped", self.scaler.scale)
        self._overflow = overflow
        self._skipped = self._skipped + overflow
        self.scaler.update(overflow=overflow)
        self._tell_scale()

    def _step(self, factor: float | Tensor) -> None:
        self._read_changed()
        masters = {parameter: master for parameter, master in self.stepped.items() if master is not parameter}
        for parameter, master in masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
        if isinstance(factor, Tensor) or factor != 1:
            scale_gradients([each.grad for each in self.stepped.values() if each.grad is not None], factor)
        self.inner.step()
        if masters:
            foreach_copy_([*map(local_part, masters)], [*map(local_part, masters.values())])
        for master in masters.values():
            master.grad = None
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = {each: each._version for each, master in self.stepped.items() if master is not each}

    @torch.no_grad()
    def _read_changed(self) -> None:
        """Copies weights that other code changed to their masters."""
        for parameter, version in self._versions.items():
            master = self.stepped[parameter]
            if parameter._version != version and not torch.equal(parameter, master.to(parameter.dtype)):
                master.copy_(parameter)
        self._note_versions()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as `Wrapper.state_dict` does, with the scaler's state as "scaler"."""
        self._read_changed()
        scaler = {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        return {**super().state_dict(), **scaler}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a `state_dict`, and sets the model's parameters to its rounded masters. Raises UsageError if it does
        not fit.
        """
        super().load_state_dict(state_dict)
        self._note_versions()
        if self.scaler is not None and "scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["scaler"])
        self._tell_scale()

    def _tell_scale(self) -> None:
        if self.scaler is not None:
            self.model.loss_scale = self.scaler.factor()


Mode = Literal["parameters", "autocast"]
"""What is in 16 bits: the parameters, with float32 masters that the optimizer steps; or the computations under
torch.autocast, with float32 parameters.
"""


@dataclass(frozen=True, slots=True)
class HalfPrecision:
    """A 16-bit dtype and how it is used.

    Args:
        mode: which numbers are in 16 bits; see `Mode`.
        dtype: torch.float16 or torch.bfloat16.
        scaling: options of the LossScaler that float16 needs.

    Raises UsageError for another mode or dtype, and for invalid options of the LossScaler.
    """

    mode: Mode
    dtype: torch.dtype = torch.float16
    scaling: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            modes = " or ".join(map(repr, get_args(Mode)))
            raise UsageError(f"the mode of 16-bit training must be {modes}, got {self.mode!r}")
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise UsageError(f"the dtype of 16-bit training must be torch.float16 or torch.bfloat16, got {self.dtype}")
        self.scaler()  # checks its options

    @property
    def parameters(self) -> torch.dtype:
        """The dtype of the model's parameters."""
        return self.dtype if self.mode == "parameters" else torch.float32

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype to pass as `Pipeline(autocast=)`; None without autocast."""
        return self.dtype if self.mode == "autocast" else None

    def scaler(self) -> LossScaler | None:
        """Returns a new LossScaler for float16; None for bfloat16, which has float32's range and needs none."""
        return LossScaler(**self.scaling) if self.dtype == torch.float16 else None  # type: ignore[arg-type]  # it checks them

    def optimizer(self, model: Pipeline, optimizer: Optimizer) -> MasterWeights:
        """Wraps `optimizer` to step `model` in this precision. Raises UsageError if the device cannot compute in the
        dtype, or if the model's parameters have another dtype.
        """
        require_dtype(self.dtype, model.context.device)
        dtypes = {parameter.dtype for parameter in model.parameters()}
        if dtypes and self.parameters not in dtypes:
            raise UsageError(
                f"mode {self.mode!s} needs parameters in {self.parameters}, but the model's are in "
                f"{', '.join(sorted(map(str, dtypes)))}: convert the model before making its Pipeline"
            )
        return MasterWeights(model, optimizer, scaler=self.scaler())


def require_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raises UsageError if `device` cannot compute in `dtype`; tries a matrix product and a normalization."""
    try:
        with torch.no_grad():
            probe = torch.ones(2, 2, dtype=dtype, device=device)
            functional.layer_norm(functional.linear(probe, probe), (2,))
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device {str(device)!r} cannot compute in {dtype} ({error}): use another dtype") from None
