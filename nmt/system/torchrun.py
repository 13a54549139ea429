"""Environment variables that torchrun sets for each process it starts."""

import os

from nmt.errors import UserError

SINGLE_PROCESS = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0, "TORCHELASTIC_RESTART_COUNT": 0}
# Number of processes of the job and of this machine, rank among each of them, and number of restarts.
LAUNCH_ENV = {name: int(os.environ.get(name, default)) for name, default in SINGLE_PROCESS.items()}


def check_single_process(command: str) -> None:
    """Raise a `UserError` if torchrun started several processes of a command that cannot share its work."""
    if LAUNCH_ENV["WORLD_SIZE"] > 1:
        raise UserError(f"{command} runs in one process; start it without torchrun")
