"""`pipeflow explore`: schedules in the browser, computed by a server on this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

from pipeflow.cli.options import schedule_name, schedule_options
from pipeflow.core.errors import UsageError
from pipeflow.schedules import SCHEDULES
from pipeflow.schedules.options import family_options

if TYPE_CHECKING:
    from pipeflow.cli.options import Commands


def add_to(commands: Commands) -> None:
    """Adds the command and its options."""
    help_ = "explore schedules in the browser: a local page, computed by this machine"
    command = commands.add_parser("explore", help=help_, parents=[schedule_options()])
    help_ = "names from `pipeflow list` (default: 1f1b)"
    command.add_argument("schedules", type=schedule_name, metavar="SCHEDULE", nargs="*", help=help_)
    help_ = "open the state of a link to the page, whose part from # on is enough"
    command.add_argument("--link", default="", metavar="'#...'", help=help_)
    command.add_argument("--tour", action="store_true", help="start the guided tour")
    group = command.add_argument_group("server")
    group.add_argument(
        "--port", type=int, default=0, metavar="N", help="port of the server (default: any that is free)"
    )
    group.add_argument("--no-browser", action="store_true", help="print the address and open no browser")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serves the page until it is interrupted."""
    import webbrowser

    from pipeflow.explore import Server

    opened = fields(arguments)
    with Server(arguments.port) as server:
        url = server.url + (f"#{urlencode(opened)}" if opened else "")
        print(f"{url}\npress Ctrl-C to stop", flush=True)
        if not arguments.no_browser:
            webbrowser.open(url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def fields(arguments: argparse.Namespace) -> dict[str, str]:
    """The fields of the link that opens. Raises UsageError for what a link cannot have."""
    from pipeflow.explore.state import State
    from pipeflow.explore.tour import STEPS

    for name in arguments.schedules:
        if name not in SCHEDULES:
            raise UsageError(f"{name!r} is not the name of a schedule; open a file by dropping it onto the page")
    found = {"tour": "1", **STEPS[0].start} if arguments.tour else {}
    found |= parse_qsl(arguments.link.rpartition("#")[2])
    given = {name: getattr(arguments, name) for name in ("ranks", "microbatches", *family_options())}
    found |= {name: str(value) for name, value in given.items() if value is not None}
    if arguments.schedules:
        found["schedule"] = ",".join(arguments.schedules)
    State.of(found)
    return found
