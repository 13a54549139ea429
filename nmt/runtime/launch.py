"""What torchrun tells each process that it starts, in environment variables."""

import os

ALONE = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0, "TORCHELASTIC_RESTART_COUNT": 0}
LAUNCHED = {  # by torchrun: processes of the job, and of this machine; the number of this one among either; restarts
    name: int(os.environ.get(name, default)) for name, default in ALONE.items()
}
