"""check.cluster: servers and the simulation of them get the same conversations; sessions stay with
their server."""

import json
from dataclasses import asdict

import pytest

from benchmarks.check import cluster
from benchmarks.check.cluster import main
from pensieve.scheduler.cost_estimate import analytic_profile
from tests.benchmarks.fake_completions import CompletionsServer

SMALL = ["--rate", "4", "--seconds", "3", "--warm-up-s", "0.5"]


@pytest.fixture
def profile(tmp_path):
    cost = analytic_profile(
        chunk_tokens=32,
        parameters=10**9,
        layers=4,
        attention_width=512,
        chunk_bytes=2**16,
        max_context=2048,
        flops_per_s=1e12,
        link_bytes_per_s=1e10,
        step_base_seconds=1e-3,
    )
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"cost": asdict(cost), "hardware": "a test", "date": "today"}))
    return path


@pytest.mark.slow
def test_each_routing_has_a_measured_and_a_simulated_line(profile, capsys, monkeypatch):
    monkeypatch.setattr(cluster, "THINK_S", 0.01)
    with CompletionsServer() as one, CompletionsServer() as two:
        assert (
            main([*SMALL, "--url", one.url, "--url", f"{two.url}/", "--profile", str(profile)]) == 0
        )
        conversations = [[body["conversation"] for body in server.bodies] for server in (one, two)]
    _, *lines = capsys.readouterr().out.splitlines()
    names = [line.split()[:2] for line in lines]
    assert names == [
        [routing, which] for routing in ("session", "random") for which in ("measured", "simulated")
    ]
    assert all(int(line.split()[2]) > 0 for line in lines)
    first = conversations[0][0].partition("-")[0]  # the run that came first
    here, there = ({name for name in names if name.startswith(first)} for names in conversations)
    assert here and there and not here & there, "sessions stay with their server"
    assert set(conversations[0]) & set(conversations[1]), "at random they do not"


def test_a_profile_that_is_missing_is_named(tmp_path, capsys):
    assert main(["--url", "http://127.0.0.1:1", "--profile", str(tmp_path / "none")]) == 2
    assert "--profile" in capsys.readouterr().err
