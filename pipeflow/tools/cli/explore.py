"""`pipeflow explore`: schedules in the browser, computed by a server on this machine."""

from __future__ import annotations

import argparse
from contextlib import suppress
from threading import Thread
from urllib.parse import parse_qsl, urlencode

from pipeflow.core.cost import EVEN_COSTS, EVEN_NAMES
from pipeflow.core.errors import UsageError, unknown
from pipeflow.schedules import SCHEDULES
from pipeflow.schedules.orders.additions import STAGE_OPTIONS
from pipeflow.schedules.registry import OTHER_NAMES, family_options
from pipeflow.tools.cli.options import Commands, add_costs, add_sizes, schedule_name, values_of

EXAMPLES = """\
examples:
  pipeflow explore zb-v --ranks 8 --microbatches 32 --transfer 0.1
  pipeflow explore 1f1b zb-h1 --no-browser --port 8000
  pipeflow explore --link 'http://127.0.0.1:43210/Jx2k9/#schedule=zb-v&ranks=8'
  pipeflow explore --tour
"""


def add_explore(commands: Commands) -> None:
    """Adds the command and its options."""
    command = commands.add_parser(
        "explore",
        help="explore schedules in the browser: a local page, computed by this machine",
        epilog=EXAMPLES,
    )
    add_sizes(command, has_files=False)
    add_costs(command, has_file=False)
    help_ = "names from `pipeflow list` (default: 1f1b)"
    command.add_argument("schedules", type=schedule_name, metavar="SCHEDULE", nargs="*", help=help_)
    help_ = "show what the page at this address shows, or what its part from # on says; other options change it"
    command.add_argument("--link", metavar="ADDRESS", help=help_)
    help_ = "start the guided tour, or open this step of it"
    command.add_argument("--tour", type=int, nargs="?", const=1, metavar="STEP", help=help_)
    group = command.add_argument_group("server", "answers this machine alone, until Ctrl-C")
    group.add_argument(
        "--port", type=int, default=0, metavar="N", help="port of the server (default: any that is free)"
    )
    group.add_argument("--no-browser", action="store_true", help="print the address and open no browser")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serves the page until it is interrupted."""
    from pipeflow.tools.explore.server import Server

    opened = fields(arguments)
    try:
        with Server(arguments.port) as server:
            url = server.url + (f"#{urlencode(opened)}" if opened else "")
            print(f"{url}\npress Ctrl-C to stop", flush=True)
            if not arguments.no_browser:
                Thread(target=_open, args=(url,), daemon=True).start()  # some browsers return only when they end
            server.serve_forever()
    except KeyboardInterrupt:
        pass  # this is how it ends
    return 0


def fields(arguments: argparse.Namespace) -> dict[str, str]:
    """The fields of the link that opens. Raises UsageError for what a link cannot have."""
    from pipeflow.tools.explore.fields import option_text
    from pipeflow.tools.explore.state import State

    for name in arguments.schedules:
        if name.endswith((".csv", ".json")):
            raise UsageError(f"{name!r} is not the name of a schedule; open a file by dropping it onto the page")
        if name not in SCHEDULES:
            raise unknown("schedule", name, SCHEDULES, OTHER_NAMES)
    found = {} if arguments.tour is None else _step(arguments.tour)
    if arguments.link is not None:
        found |= _linked(arguments.link)
    if arguments.schedules:
        found["schedule"] = ",".join(arguments.schedules)
    options = values_of(arguments, ("ranks", "microbatches", *family_options(), *STAGE_OPTIONS, *EVEN_COSTS))
    named = {option: field for field, option in EVEN_NAMES.items()}
    found |= {named.get(option, option): option_text(value) for option, value in options.items()}
    State.of(found)
    return found


def _linked(link: str) -> dict[str, str]:
    """The fields of the address of a page, or of its part from # on."""
    try:
        return dict(parse_qsl(link[link.find("#") + 1 :], keep_blank_values=True, strict_parsing=True, errors="strict"))
    except ValueError:
        need = "the address of a page, or its part from # on, like '#schedule=zb-v&ranks=8'"
        raise UsageError(f"--link needs {need}, got {link[:80]!r}") from None


def _open(url: str) -> None:
    """Opens a browser, if there is one; the address is on the terminal in any case."""
    import webbrowser  # slow to load

    with suppress(webbrowser.Error, OSError):
        webbrowser.open(url)


def _step(number: int) -> dict[str, str]:
    """The fields of a step of the tour. Raises UsageError if there is none with this number."""
    from pipeflow.tools.explore.tour import STEPS

    if not 1 <= number <= len(STEPS):
        raise UsageError(f"the tour has steps 1 to {len(STEPS)}, got {number}")
    return {"tour": str(number), **STEPS[number - 1].start}
