"""Spin time of OpenMP threads. To be imported before torch, because OpenMP reads the setting only once.

With GNU OpenMP a thread that waits at a barrier spins for a few milliseconds before it sleeps. This is fastest if every
thread has a core. If another process occupies one of the cores, the thread that all others wait for is not running, and
the spin time is lost at each of the thousands of barriers of an update. Threads therefore spin for a few microseconds
only, which covers the usual gap between two operations (see experiments/cpu_speed.md). Results do not depend on it.
Settings of the user take precedence.
"""

import os
import sys

SPIN_COUNT = "2000"
SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # environment variables that set the spin time

if "torch" not in sys.modules and not any(name in os.environ for name in SPIN_VARIABLES):
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
