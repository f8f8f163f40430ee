"""`python` whose lines are run by forks, as by a worker of xdist: `python forked_python.py ADDRESS -c LINE`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # in our own folder are names of libraries
    from support.forks import run_line_in_fork

    sys.exit(run_line_in_fork(sys.argv[1], sys.argv[-1]))
