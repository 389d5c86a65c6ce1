"""Logging for many ranks: who says it, and who keeps it. What must not live here: what is said."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from threading import Lock

from pipeflow.parallel.context import context_if_launched

_SETTING_UP = Lock()  # ranks may be threads
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class DistributedLogger:
    """A logger of which each rank is told who is to speak. Made by `get_dist_logger`."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger

    def debug(self, message: str, *, ranks: Collection[int] | None = None) -> None:
        """Says it on those `ranks` of the world, by default on all."""
        self._say(logging.DEBUG, message, ranks)

    def info(self, message: str, *, ranks: Collection[int] | None = None) -> None:
        """As `debug`."""
        self._say(logging.INFO, message, ranks)

    def warning(self, message: str, *, ranks: Collection[int] | None = None) -> None:
        """As `debug`."""
        self._say(logging.WARNING, message, ranks)

    def error(self, message: str, *, ranks: Collection[int] | None = None) -> None:
        """As `debug`."""
        self._say(logging.ERROR, message, ranks)

    def _say(self, level: int, message: str, ranks: Collection[int] | None) -> None:
        if ranks is None or _rank() in ranks:
            self.logger.log(level, "%s", message, stacklevel=3)

    def set_level(self, level: str) -> None:
        """The least that is said, such as "INFO"."""
        self.logger.setLevel(level)

    def log_to_file(self, folder: str | Path) -> Path:
        """Keeps what this rank says in `folder`/rank_<rank>.log, which it returns, after what is there already. Makes
        the folder, whichever rank comes first. Called again for the same folder, it changes nothing.
        """
        rank = _rank()
        file = Path(folder, f"rank_{rank}.log")
        with _SETTING_UP:
            if not self._keeps(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                handler = logging.FileHandler(file)
                handler.setFormatter(logging.Formatter(_FORMAT))
                handler.addFilter(lambda _: _rank() == rank)  # other ranks may be threads of this process
                self.logger.addHandler(handler)
        return file

    def _keeps(self, file: Path) -> bool:
        handlers = [each for each in self.logger.handlers if isinstance(each, logging.FileHandler)]
        return str(file.absolute()) in [each.baseFilename for each in handlers]


def get_dist_logger(name: str = "pipeflow") -> DistributedLogger:
    """The logger of that name, shown in the terminal from INFO on; the first call sets that up, unless the logger has
    a handler already.
    """
    from rich.logging import RichHandler

    logger = logging.getLogger(name)
    with _SETTING_UP:
        if not logger.handlers:
            handler = RichHandler(log_time_format="[%X]", show_path=False)
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
            logger.propagate = False  # else a handler of the root would say it again
    return DistributedLogger(logger)


def disable_existing_loggers(include: Sequence[str] | None = None, exclude: Sequence[str] = ("pipeflow",)) -> None:
    """Lets the loggers that exist by now say warnings only: those of `include`, by default all, without those of
    `exclude` and what is below them.
    """
    for name in list(logging.root.manager.loggerDict) if include is None else include:
        if not any(name == kept or name.startswith(f"{kept}.") for kept in exclude):
            logging.getLogger(name).setLevel(logging.WARNING)


def _rank() -> int:
    context = context_if_launched()
    return 0 if context is None else context.rank
