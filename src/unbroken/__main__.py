"""`python -m unbroken`: the `unbroken` command."""

import sys

from unbroken.cli import main

if __name__ == "__main__":  # vLLM's worker processes import this module too
    sys.exit(main())
