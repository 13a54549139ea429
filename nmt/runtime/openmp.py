"""How long OpenMP's threads spin while they wait for each other; imported before torch, whose library reads it once.

GNU's OpenMP lets a thread that waits at a barrier spin for some milliseconds before it sleeps. Where each thread has a
core, that is the fastest. Where another process has one of the cores, the thread that would end the wait is not
running, and all that time is lost at each of the thousands of barriers of an update: training was 30 times slower. So
they spin for some microseconds only, which covers the usual gap between two operations (docs/benchmarks.md has
figures). No number depends on it. Settings of the user's own stay.
"""

import os
import sys

SPINS = "2000"
OWN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # variables of the environment that say it

if "torch" not in sys.modules and not any(name in os.environ for name in OWN):
    os.environ["GOMP_SPINCOUNT"] = SPINS
