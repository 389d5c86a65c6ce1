"""`python -m pipeflow` runs the command `pipeflow`."""

import sys

from pipeflow.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
