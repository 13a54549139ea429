"""Environment variables that torchrun sets for each process it starts."""

import os

SINGLE_PROCESS = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0, "TORCHELASTIC_RESTART_COUNT": 0}
# Number of processes of the job and of this machine, rank among each of them, and number of restarts.
LAUNCH_ENV = {name: int(os.environ.get(name, default)) for name, default in SINGLE_PROCESS.items()}
