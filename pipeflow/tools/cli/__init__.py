"""The command `pipeflow`: the subcommands, and the parts they share. Whatever draws or searches is imported
where it is used, so that the command starts fast. Must not contain: torch.
"""

from pipeflow.tools.cli.command import main

__all__ = ["main"]
