"""One thread a process: tests and the servers they start share few cores, and OpenMP's threads wait for each other."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
