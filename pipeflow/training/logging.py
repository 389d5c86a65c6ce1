"""Logging on many ranks: which ranks log a message, and to which files. Must not contain: the messages."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from threading import Lock

from pipeflow.core.errors import names_of, numbers_of
from pipeflow.engine.parallel.context import context_if_launched

_SETTING_UP = Lock()  # ranks may be threads
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class DistributedLogger:
    """A logger whose methods can be restricted to some ranks; `get_dist_logger` makes it.

    Args:
        logger: Python's logger that gets the messages.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger

    def debug(self, message: str, *, ranks: Collection[int] | None = None) -> None:
        """Logs `message` at level DEBUG on the given ranks of the world, or on all if `ranks` is None."""
        self._say(logging.DEBUG, message, ranks)

    def info(self, message: str, *, ranks: Collection[int] | None = None) -> None:
        """Logs `message` at level INFO on the given ranks of the world, or on all if `ranks` is None."""
        self._say(logging.INFO, message, ranks)

    def warning(self, message: str, *, ranks: Collection[int] | None = None) -> None:
        """Logs `message` at level WARNING on the given ranks of the world, or on all if `ranks` is None."""
        self._say(logging.WARNING, message, ranks)

    def error(self, message: str, *, ranks: Collection[int] | None = None) -> None:
        """Logs `message` at level ERROR on the given ranks of the world, or on all if `ranks` is None."""
        self._say(logging.ERROR, message, ranks)

    def _say(self, level: int, message: str, ranks: Collection[int] | None) -> None:
        if ranks is None or _rank() in numbers_of("ranks", ranks):
            self.logger.log(level, "%s", message, stacklevel=3)

    def set_level(self, level: str) -> None:
        """Sets the lowest level that is logged, such as "INFO"."""
        self.logger.setLevel(level)

    def log_to_file(self, folder: str | Path) -> Path:
        """Appends this rank's messages to `folder`/rank_<rank>.log and returns that path. Creates the folder if it is
        missing. A second call with the same folder changes nothing.
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
    """Returns the logger `name`. The first call makes it print messages from INFO on to the terminal, unless it already
    has a handler.
    """
    from rich.logging import RichHandler

    logger = logging.getLogger(name)
    with _SETTING_UP:
        if not logger.handlers:
            handler = RichHandler(log_time_format="[%X]", show_path=False)
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
            logger.propagate = False  # a handler of the root logger would repeat the message
    return DistributedLogger(logger)


def disable_existing_loggers(include: Sequence[str] | None = None, exclude: Sequence[str] = ("pipeflow",)) -> None:
    """Sets existing loggers to log only warnings and errors.

    Args:
        include: names of the loggers; by default all that exist.
        exclude: names of loggers to leave as they are, together with the loggers below them.
    """
    kept_names = names_of("exclude", exclude)
    for name in list(logging.root.manager.loggerDict) if include is None else names_of("include", include):
        if not any(name == kept or name.startswith(f"{kept}.") for kept in kept_names):
            logging.getLogger(name).setLevel(logging.WARNING)


def _rank() -> int:
    context = context_if_launched()
    return 0 if context is None else context.rank
