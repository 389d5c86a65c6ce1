"""The command `pipeflow`: one file per subcommand, and the parts they share. Whatever draws or searches is imported
where it is used, so that the command starts fast. Must not contain: torch.
"""

from pipeflow.cli.command import main

__all__ = ["main"]
