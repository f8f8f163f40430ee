"""Python imports this when it starts with this folder on its path: `support.forks.commands_as_forks`."""

import sys

words = sys.orig_argv[1:4]
if [word for word in words if word != "-u"][:2] in (["-m", "unbroken"], ["-m", "torch.distributed.run"]):
    from support.forks import run_command_in_fork

    run_command_in_fork()
