"""`nmt.train` for torchrun, of which a rank sends a signal in its sixth update, wherever the machine is by then.

A test that looked for a checkpoint and then sent the signal itself would now and then come after the end of the run.
"""

import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from nmt import train
from nmt.training import loop


def send_signal_in_sixth_update() -> None:
    """Let the rank for which the file `signal.RANK` has been written send that signal, once.

    SIGKILL goes to the rank itself. Others go to torchrun; the rank waits until torchrun has passed them on.
    """
    order = Path(f"signal.{os.environ['RANK']}")
    train_step, updates = loop.train_step, count(1)

    def train_and_send(*arguments: Any) -> Any:
        if next(updates) == 6 and order.exists():
            number = int(order.read_text())
            order.unlink()
            os.kill(os.getpid() if number == signal.SIGKILL else os.getppid(), number)
            while signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # as the handler of a first signal leaves it
                time.sleep(0.01)
        return train_step(*arguments)

    loop.train_step = train_and_send


if __name__ == "__main__":
    send_signal_in_sixth_update()
    sys.argv[0] = "train"
    train.train()
