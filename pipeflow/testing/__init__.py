"""Tools for tests of pipelines: ranks as threads or processes, tiny models, and a conformance suite for transports."""

from __future__ import annotations

from pipeflow.engine.parallel.transport.local import Hub, LocalTransport
from pipeflow.testing.ranks import RankError, die, run_processes, run_threads

__all__ = ["Hub", "LocalTransport", "RankError", "die", "run_processes", "run_threads"]
