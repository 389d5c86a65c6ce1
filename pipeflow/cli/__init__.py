"""The command `pipeflow`: one file a command, and what they share. Whatever draws or searches is imported where it
is used, so that the command starts fast; torch is never needed.
"""

from pipeflow.cli.command import main

__all__ = ["main"]
