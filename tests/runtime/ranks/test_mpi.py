"""Ranks over a real MPI: agreeing, computing together, refusing together."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.mpi import command, run_ranks, variables

PROGRAM = "tests.runtime.ranks_program"


@pytest.mark.slow
def test_three_ranks_agree_and_add_up():
    assert run_ranks(3, PROGRAM) == "all well\n"


@pytest.mark.slow
def test_a_plan_that_was_sent_is_received_while_rank_0_is_busy(tmp_path):
    assert run_ranks(3, PROGRAM, "messages", tmp_path, seconds=300) == "all well\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, message",
    [
        ("setting", "--device: there is none on this one (rank 1)"),
        ("value", "--engine: rank 1 has another fingerprint than rank 0: b, not a"),
    ],
)
def test_a_fault_of_one_rank_is_printed_once_and_ends_all(what, message):
    ended = subprocess.run(
        command(3, PROGRAM, what), env=variables(3), capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 2
    assert ended.stdout == message + "\n"


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_not_sent_to_for_ever():
    ended = subprocess.run(
        command(3, PROGRAM, "stopped"),
        env=variables(3),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 1
    assert ended.stdout == "ranks [1] have not received their messages after 3 s: a rank hangs\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, message",
    [
        ("absent 1", "ranks [1] have not come to the others after 3 s: a rank hangs"),
        (
            "absent 0",
            "rank 0, or one that it waits for, has not come to the others after 9 s: a rank hangs",
        ),
        ("middle", "rank 1 has not sent all of a message after 3 s: a rank hangs"),
        ("alone", "rank 1: ValueError: no room"),
    ],
)
def test_ranks_that_meet_do_not_wait_for_ever(what, message):
    """Not for a rank that is stopped, before it comes or while it sends, and not at all for one
    that has failed."""
    # as if on hosts of their own
    apart = variables(3) | {"OMPI_MCA_btl": "tcp,self"}
    ended = subprocess.run(
        command(3, PROGRAM, what), env=apart, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 1
    assert message in ended.stdout.splitlines()


def watched(program):
    """Two ranks of it as `pensieve serve` starts them: with an eye on mpirun."""
    start = (
        "import sys; from pensieve.runtime.ranks.launch import run_ranks; sys.exit(run_ranks(2, "
        "sys.argv[1:]))"
    )
    words = [sys.executable, "-c", start, sys.executable, "-c", program]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_mpi_itself_does_not_wait_for_ever_for_a_rank_that_is_stopped():
    """Nor does mpirun for one that has given up in the middle of MPI's own start."""
    program = """
import os, signal
from pensieve.runtime import system
system.MEETING_SECONDS = 2.0
from pensieve.runtime.launch.ranks import run_rank
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
run_rank("program", 2, lambda ranks: 0)
"""
    ended = watched(program)
    assert ended.returncode == 1
    assert "Timeout (0:00:02)!" in ended.stderr and "in open_ranks" in ended.stderr


@pytest.mark.slow
def test_a_rank_that_fails_does_not_wait_for_ever_for_an_mpirun_that_is_stopped():
    program = """
import os, signal, time
from pensieve.runtime.ranks import mpi as ranks
from pensieve.runtime.launch.ranks import run_rank
ranks.FAREWELL_SECONDS = 2.0
def work(ranks):
    ranks.gather(None)
    if ranks.rank:
        time.sleep(300)
    os.kill(os.getppid(), signal.SIGSTOP)
    raise ValueError("no room")
run_rank("program", 2, work)
"""
    ended = watched(program)
    assert ended.returncode == 1 and "ranks of it had: it was killed" in ended.stderr


@pytest.mark.slow
def test_every_kind_of_failure_of_a_rank_reaches_rank_0():
    ended = subprocess.run(
        command(3, PROGRAM, "fails"), env=variables(3), capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 1
    assert ended.stdout == "rank 1 failed, at length\n"


@pytest.mark.slow
def test_a_rank_that_others_wait_for_too_long_ends_all_and_says_where():
    ended = subprocess.run(
        command(3, PROGRAM, "late"), env=variables(3), capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 1
    assert "Timeout (0:00:01)!" in ended.stderr and "in wait_for_ever" in ended.stderr
