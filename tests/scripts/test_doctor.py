"""`pensieve doctor`: it reports missing parts with advice, and no finding makes it fail."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve.runtime.device.protocol import Memory
from pensieve.runtime.disk.speed import DiskSpeed
from pensieve.runtime.shared.config import read_config
from pensieve.scripts import doctor
from pensieve.scripts.doctor import Finding, Level, look, main
from pensieve.scripts.simulation.models import ModelShape, read_shape

from .fake_server import FakeServer, Handler

GOOD = "#!/bin/sh\necho 'NVIDIA H200, 580.1, 143771 MiB, 9.0'\n"


def program(directory: Path, name: str, text: str) -> None:
    path = directory / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all there is of programs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def findings_of(device: str, state: Path, model: ModelShape | None = None) -> dict[str, Finding]:
    return {finding.name: finding for finding in look(device, state, model=model)}


def test_a_machine_without_anything_is_told_everything(bare: Path) -> None:
    """Without a GPU, problems are reported only where one is required."""
    findings = findings_of("cuda", bare)
    assert (
        findings["driver"].level is Level.PROBLEM
        and "nvidia-smi is not there" in findings["driver"].state
    )
    assert findings["compiler"].level is findings["mpi"].level is Level.OPTIONAL
    assert all(finding.advice for finding in findings.values() if finding.level is not Level.OK)
    assert findings_of("cpu", bare)["driver"].level is Level.OPTIONAL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "#!/bin/sh\necho 'no devices were found' >&2\nexit 6\n",
            "nvidia-smi fails: no devices were found",
        ),
        ("#!/bin/sh\nexit 9\n", "nvidia-smi fails: exit status 9"),
        ("no program at all", "nvidia-smi cannot be run"),
        ("#!/bin/sh\nwhile :; do :; done\n", "nvidia-smi does not answer"),
    ],
)
def test_a_driver_that_fails_is_a_finding(
    bare: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    program(bare, "nvidia-smi", text)
    if "while" in text:  # the others answer, if it takes them a second to start
        monkeypatch.setattr(doctor, "PROGRAM_S", 1)
    driver = findings_of("cuda", bare)["driver"]
    assert driver.level is Level.PROBLEM and message in driver.state


def test_gpus_are_looked_at_one_by_one(bare: Path) -> None:
    program(
        bare, "nvidia-smi", GOOD + "echo 'Tesla V100, 580.1, 32768 MiB, 7.0'\necho 'odd line'\n"
    )
    findings = findings_of("cuda", bare)
    assert [findings[f"gpu {at}"].level for at in range(3)] == [
        Level.OK,
        Level.PROBLEM,
        Level.PROBLEM,
    ]
    assert "8.0" in findings["gpu 1"].advice


def test_the_compiler_is_the_one_that_builds_use(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bare, "my-cc", "#!/bin/sh\necho 'my compiler 1.0'\n")
    monkeypatch.setenv("CXX", "my-cc")
    compiler = findings_of("cpu", bare)["compiler"]
    assert compiler.level is Level.OK and "my compiler 1.0" in compiler.state


def test_what_is_too_small_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("LEAST_MEMORY", "LEAST_DISK", "LEAST_SHARED"):
        monkeypatch.setattr(doctor, limit, 1 << 60)
    findings = findings_of("cpu", tmp_path / "not" / "made" / "yet")
    assert findings["memory"].level is findings["disk"].level is Level.PROBLEM
    assert findings["/dev/shm"].level is Level.OPTIONAL


def test_a_fast_disk_is_proposed_for_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = "pensieve.runtime.disk.speed.measure_disk"
    for speed, advice in (
        (DiskSpeed(3e9, 2e9), "--disk-kv-bytes 50GiB"),
        (DiskSpeed(3e8, 2e8), ""),
        (None, "refuses writes"),
    ):
        monkeypatch.setattr(speeds, lambda directory, chunk_bytes, speed=speed: speed)
        finding = doctor._disk_speed(tmp_path, 100 * 2**30)
        assert finding.advice.endswith(advice) and bool(finding.advice) == bool(advice)
        assert (finding.level is Level.OK) == (speed is not None)


def test_the_speed_of_a_disk_is_measured_without_traces(tmp_path: Path) -> None:
    (tmp_path / "speed").mkdir()
    finding = doctor._disk_speed(tmp_path, 100 * 2**30)
    assert finding.level is Level.OK and "GB/s" in finding.state
    assert [path.name for path in tmp_path.iterdir()] == ["speed"]


@pytest.mark.parametrize(
    ("status", "healthy", "level", "message"),
    [
        (200, True, Level.OK, "one-1 at http://127.0.0.1:PORT is ready, histories in PostgreSQL"),
        (200, False, Level.PROBLEM, "histories in PostgreSQL, which has a fault"),
        (503, True, Level.PROBLEM, "http://127.0.0.1:PORT"),
    ],
)
def test_a_server_that_runs_says_which_it_is(
    status: int, healthy: bool, level: Level, message: str
) -> None:
    histories = {"store": "PostgreSQL", "healthy": healthy, "reason": "make room"}
    health = {"replica": "one-1", "histories": histories}

    class Health(Handler):
        def do_GET(self) -> None:
            self._answer(health, status)

    with FakeServer(Health) as server:
        finding = doctor._replica(server.url)
    assert finding.level is level and finding.state.replace(
        server.url.rpartition(":")[2], "PORT"
    ).endswith(message)
    assert (status == 503) == ("not ready" in finding.advice)
    assert healthy == ("make room" not in finding.advice)
    gone = doctor._replica(server.url)
    assert gone.level is Level.PROBLEM and "refused" in gone.advice


@pytest.mark.parametrize(
    ("level", "status"), [(Level.OK, 0), (Level.OPTIONAL, 0), (Level.PROBLEM, 1)]
)
def test_the_exit_status_counts_problems_only(
    level: Level, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def examine(
        device: str,
        state_dir: Path,
        history_url: str | None,
        urls: list[str],
        shared: None,
        model: None,
    ) -> list[Finding]:
        return [Finding("thing", level, "is so", "do this")]

    monkeypatch.setattr(doctor, "look", examine)
    assert main(["--device", "cpu"]) == status
    assert "do this" in capsys.readouterr().out
    assert main(["--device", "cpu", "--json"]) == status
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] == ["thing"] * status and told["findings"][0]["advice"] == "do this"


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pensieve.scripts.pensieve",
        "doctor",
        "--device",
        "cpu",
        "--json",
    ]
    ran = subprocess.run(
        [*command, "--state-dir", tmp_path], capture_output=True, text=True, timeout=300
    )
    names = {finding["name"] for finding in json.loads(ran.stdout)["findings"]}
    assert {"torch", "compiler", "mpi", "tensorrt", "memory", "disk", "/dev/shm"} <= names
    assert ran.returncode in (0, 1) and not ran.stderr


def test_a_shared_store_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(
        json.dumps({"engine": "directory", "path": str(tmp_path / "kv"), "max_bytes": 2**30})
    )
    finding = doctor._shared_store(config)
    assert finding.level is Level.OK and finding.state.startswith("reads ")
    assert not [file for file in (tmp_path / "kv").rglob("*") if file.is_file()]
    full = replace(config, options=replace(config.options, max_bytes=1))
    assert doctor._shared_store(full).state == "it is full"
    (tmp_path / "file").write_text("")
    wrong = replace(config, options=replace(config.options, path=tmp_path / "file"))
    assert doctor._shared_store(wrong).level is Level.PROBLEM


def test_the_sizes_of_a_model_are_told(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its states too: whether host memory holds two for each running request."""
    memory = Memory(40 * 2**30, 100 * 2**30)
    monkeypatch.setattr("pensieve.runtime.device.memory.host_memory", lambda: memory)
    shapes = Path(__file__).parents[2] / "benchmarks" / "shapes"
    hybrid = read_shape(shapes / "qwen3.5-9b.json", ranks=1)
    findings = findings_of("cuda", bare, hybrid)
    assert "KV 32 KiB a token, a state 49.1 MiB" in findings["model"].state
    assert findings["states"].state == "204 states in 10 GiB of host memory"
    assert findings["states"].level is Level.OK
    findings = findings_of("cpu", bare, hybrid)
    assert (
        findings["states"].level is Level.OPTIONAL
        and "--host-kv-bytes" in findings["states"].advice
    )
    plain = read_shape(shapes / "llama-3-8b.json", ranks=1)
    findings = findings_of("cpu", bare, plain)
    assert "a state" not in findings["model"].state and "states" not in findings
