"""How long OpenMP's threads, which compute a layer together on a CPU, spin while they wait for each other.

A spinning thread answers at once, but keeps a processor that others may need: on a busy machine perhaps the thread that
it waits for. libgomp, the library of torch's wheels, spins for some milliseconds. This is as long as a busy process
keeps a processor, and each token has hundreds of waits. libgomp reads its settings when it is loaded, so the package
makes them when it is imported, in every process: of the server, of ranks, of `LLM` and of `build_engine`.
"""

from __future__ import annotations

import logging
import os
import sys

VARIABLE = "GOMP_SPINCOUNT"
SPINS = 10_000
"""Turns of the loop in which a thread spins before it sleeps; 0: it sleeps at once. A turn takes 25 to 50 ns. A thread
that slept needs some 30 us to wake up, so most waits of a quiet machine should be shorter."""
WAITING = ("OMP_WAIT_POLICY", VARIABLE)
"""Variables that tell threads how to wait. If one is set, it stays alone."""

log = logging.getLogger("pensieve")
_late = False


def limit_spinning() -> None:
    """Called before anything of this package imports torch."""
    global _late
    if any(name in os.environ for name in WAITING):
        return
    _late = "torch" in sys.modules
    if not _late:
        os.environ[VARIABLE] = str(SPINS)


def warn_if_late() -> None:
    """Logs one warning if `limit_spinning` came too late for this process."""
    global _late
    if _late:
        log.warning(
            "torch was imported before pensieve, so its threads do not share a busy machine well: "
            "import pensieve first, or set the environment variable %s=%d",
            VARIABLE,
            SPINS,
        )
    _late = False
