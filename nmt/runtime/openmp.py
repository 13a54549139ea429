"""How long OpenMP's threads spin while they wait for each other; imported before torch, whose library reads it once.

GNU's OpenMP lets a thread that waits at a barrier spin for some milliseconds before it sleeps. Where each thread has a
core, that is the fastest. Where another process has one of the cores, the thread that would end the wait is not
running, and all that time is lost at each of the thousands of barriers of an update: training was 30 times slower. So
they spin for some microseconds only, which covers the usual gap between two operations (experiments/cpu_speed.md has
figures). No number depends on it. Settings of the user's own stay.
"""

import os
import sys

SPIN_COUNT = "2000"
SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # environment variables that set the spin time

if "torch" not in sys.modules and not any(name in os.environ for name in SPIN_VARIABLES):
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
