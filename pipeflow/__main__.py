"""`python -m pipeflow` runs the command `pipeflow`."""

import sys

from pipeflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
