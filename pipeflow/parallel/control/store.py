"""A torch store on top of the monitor, through which the channels of a generation find each other. No call outlasts a
failure.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from pipeflow.parallel.control.monitor import Monitor
from pipeflow.parallel.transport.work import LinkError


class MonitorStore(dist.Store):
    """Stores values under `prefix` in the monitor's generation. Has only the methods that backends need to connect."""

    def __init__(self, monitor: Monitor, prefix: str) -> None:
        super().__init__()
        self._monitor = monitor
        self._prefix = prefix

    def set(self, key: str, value: str | bytes) -> None:
        self._monitor.set(f"{self._prefix}/{key}", value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        try:
            return self._monitor.get(f"{self._prefix}/{key}")
        except LinkError as error:
            raise RuntimeError(str(error)) from None

    def check(self, keys: list[str]) -> bool:
        """Returns False: torch's threads ask for signals between its own groups, which pipeflow does not send."""
        return False

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)
