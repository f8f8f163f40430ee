"""Python imports this when it starts with this folder on its path: `support.forks.commands_as_forks`."""

import sys

words = [*(word for word in sys.orig_argv[1:4] if word != "-u"), "", ""]
if words[0] == "-m" and words[1] in ("unbroken", "torch.distributed.run", "support.parallel_process"):
    from support.forks import run_command_in_fork

    run_command_in_fork()
