"""The soak: what its watch excuses, what /health must say, and a short run with conversations that
expire."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
import torch

from benchmarks.check import soak, soak_faults
from benchmarks.check.soak import Reference, Soak, histories_of, server_options
from benchmarks.check.soak_faults import limit_files
from benchmarks.check.soak_watch import (
    CUT_OFF,
    DISK_TIER,
    FAULTS,
    HISTORIES,
    LONGEST_GAP,
    Watch,
    failing_parts,
    table,
)
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.scripts.chat import ServerError

HEALTHY = {"histories": {"store": "SQLite", "healthy": True}, "kv_disk_full": False}
FULL = {
    "histories": {"store": "SQLite", "healthy": False, "reason": "the disk is full"},
    "kv_disk_full": False,
}


def failed(watch, status, named):
    """Whether this failure of a request that was sent just now counts as wrong."""
    before = len(watch.wrong)
    watch.status(ServerError("refused", status), time.monotonic(), named, "a request")
    return len(watch.wrong) > before


@pytest.mark.parametrize(
    ("fault", "status", "named", "wrong"),
    [
        ("database", 503, True, False),
        ("database", CUT_OFF, True, False),
        ("database", 503, False, True),  # requests without a conversation do not need it
        ("database", 500, True, True),
        ("full histories", 507, True, False),
        ("full histories", 503, True, True),
        ("full disk tier", 500, True, False),
        ("full disk tier", 507, True, True),
        ("leases", 409, True, False),
        ("kills", CUT_OFF, False, False),
        ("expiry", 503, True, True),
        ("readers", 503, False, True),
    ],
)
def test_a_fault_excuses_what_its_entry_says(fault, status, named, wrong):
    watch = Watch()
    with watch.fault(fault):
        assert failed(watch, status, named) == wrong
    assert watch.excused.total() == (not wrong)


def test_a_fault_that_is_over_excuses_only_requests_that_began_before():
    watch = Watch()
    with watch.fault("database"):
        since = time.monotonic()
    watch.status(ServerError("refused", 503), since, True, "a turn")
    assert watch.wrong == []
    assert failed(watch, 503, named=True)


def test_a_wait_is_excused_by_the_faults_that_make_such_requests_wait():
    watch = Watch()
    long = LONGEST_GAP + 1
    with watch.fault("database"):
        assert not watch.wait(time.monotonic(), long, LONGEST_GAP, True, "a turn's stream")
        assert watch.wrong == []
        assert watch.wait(time.monotonic(), long, LONGEST_GAP, False, "a stream")
    assert watch.wrong == ["a stream took 2.00 s, with database"]


def look(watch, body):
    now = time.monotonic()
    watch.look(body, now, now)
    return watch.wrong


def test_health_must_tell_of_a_fault_from_the_time_when_it_has_until_its_cause_is_gone():
    watch = Watch()
    assert look(watch, HEALTHY) == []
    with watch.fault("full histories") as window:
        assert look(watch, HEALTHY) == look(watch, FULL) == []  # it may not know yet
        window.told = time.monotonic()
        assert look(watch, FULL) == []
        assert len(look(watch, HEALTHY)) == 1
        window.lifted = time.monotonic()
        assert len(look(watch, HEALTHY)) == len(look(watch, FULL)) == 1
    assert len(look(watch, HEALTHY)) == 1
    assert len(look(watch, FULL)) == 2
    assert watch.looks == {"healthy": 5, HISTORIES: 4}


def test_an_unhealthy_store_without_a_reason_is_wrong():
    watch = Watch()
    with watch.fault("database"):
        assert len(look(watch, {"histories": {"healthy": False}})) == 1


def test_the_parts_of_which_health_tells():
    assert failing_parts(HEALTHY) == set()
    assert failing_parts(FULL | {"kv_disk_full": True}) == {HISTORIES, DISK_TIER}


def test_the_table_has_the_faults_that_occurred():
    watch = Watch()
    with watch.fault("database"):
        failed(watch, 503, named=True)
    (row,) = [
        line for line in table({"postgres": watch}).splitlines() if line.startswith("| postgres ")
    ]
    assert row.startswith(f"| postgres | database | {FAULTS['database'].begins} |")
    assert row.endswith("| 1 | 0 | 1 status 503 |")


WRITER = """
import sys
for line in sys.stdin:
    try:
        with open(sys.argv[1], "w") as file:
            file.write(line)
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


def test_a_process_may_write_no_file_for_a_while(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "file")]
    answers = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        for size in (0, None):
            limit_files([child.pid], size)
            child.stdin.write("something\n")
            child.stdin.flush()
            answers.append(child.stdout.readline())
        child.stdin.close()
    assert answers == ["File too large\n", "written\n"]


def test_an_unknown_fault_is_refused(capsys):
    for faults in ("expiry,earthquakes", "workers"):  # of one process, none can end alone
        assert soak.main(["--faults", faults]) == 2
        assert "--faults" in capsys.readouterr().err


def test_without_postgres_only_its_half_is_left_out(monkeypatch, capsys):
    def missing():
        raise soak.NotInstalled("PostgreSQL is not installed")

    monkeypatch.setattr(soak, "PrivatePostgres", missing)
    with ExitStack() as temporary:
        assert list(histories_of(["expiry", "database"], temporary)) == ["file"]
    assert "PostgreSQL is not installed" in capsys.readouterr().err
    assert soak.main(["--faults", "database"]) == 2


@pytest.mark.slow
def test_a_worker_is_killed_beside_the_load(tmp_path, monkeypatch):
    """Until one is killed, of `--faults workers --api-server-count 2`."""
    monkeypatch.setattr(soak_faults, "FAULT_PAUSE", (0.5, 0.5))
    monkeypatch.setattr(soak_faults, "HANGING", 0.0)
    for limit in ("LONGEST_GAP", "LONGEST_WAIT"):  # the machine may have other work
        monkeypatch.setattr(soak_faults, limit, 60.0)
    torch.set_num_threads(1)
    options = server_options(["--api-server-count=2"])
    counts = Soak(Reference(DEMO_CHECKPOINT), 3, ["workers"]).run(tmp_path, 6.0, 1, "demo", options)
    assert counts["workers killed"] > 0 and counts["probe streams"] > 0


@pytest.mark.slow
def test_conversations_expire_beside_the_load(tmp_path, monkeypatch):
    """Seconds of `--faults expiry`, whose command runs for as long as one likes."""
    monkeypatch.setattr(soak_faults, "EXPIRED", 300)
    monkeypatch.setattr(soak_faults, "SHORT_TTL", 0.5)
    for limit in ("LONGEST_GAP", "LONGEST_WAIT"):  # the machine may have other work
        monkeypatch.setattr(soak_faults, limit, 60.0)
    torch.set_num_threads(1)
    counts = Soak(Reference(DEMO_CHECKPOINT), 3, ["expiry"]).run(
        tmp_path, 4.0, 1, "demo", server_options([])
    )
    assert counts["expired"] > 0 and counts["probe streams"] > 0
