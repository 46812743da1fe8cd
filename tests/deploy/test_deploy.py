"""Files for operators name things of this program: metrics, options, paths. They are still
there."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pensieve.runtime.launch.options import parser
from pensieve.runtime.observe.metrics import Metrics
from pensieve.runtime.observe.vllm_metrics import COPIED, VllmMetrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
NAME = re.compile(r"pensieve:\w+")


def metric_names() -> set[str]:
    """Every sample's name, as /metrics has them."""
    kinds = re.findall(r"^# TYPE (\S+) (\w+)$", Metrics().text().decode(), re.MULTILINE)
    parts = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
    return {name + suffix for name, kind in kinds for suffix in parts.get(kind, ("",))}


def expressions() -> list[tuple[str, str]]:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    panels = [
        (panel["title"], target["expr"])
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    return [*panels, *((rule["alert"], rule["expr"]) for rule in rules)]


@pytest.mark.parametrize(("place", "expression"), expressions())
def test_every_metric_that_is_asked_for_exists(place: str, expression: str) -> None:
    names = NAME.findall(expression)
    assert (names or "up{" in expression) and set(names) <= metric_names()
    for left, right in ("()", "{}", "[]"):
        assert expression.count(left) == expression.count(right)


def test_the_dashboard_shows_most_of_what_there_is() -> None:
    """Metrics that it leaves out are part of shown ones, or are for closer inspection."""
    shown = {name for _, expression in expressions() for name in NAME.findall(expression)}
    names = metric_names()
    histograms = {name.removesuffix("_bucket") for name in names if name.endswith("_bucket")}
    beside = {name + part for name in histograms for part in ("_sum", "_count", "_created")}
    assert names - shown - beside <= {
        "pensieve:e2e_request_latency_seconds_bucket",
        "pensieve:kv_cache_usage_perc",
    }


def test_the_metrics_of_the_documentation_exist() -> None:
    _, _, table = (
        (ROOT / "docs" / "use" / "operations.md").read_text().partition("### What the metrics say")
    )
    rows = [line for line in table.partition("###")[0].splitlines() if line.startswith("|")]
    names = {"pensieve:" + name for row in rows[2:] for name in re.findall(r"`(\w+)[`{]", row)}
    families = metric_names() | {name.removesuffix("_bucket") for name in metric_names()}
    assert len(names) > 20 and names <= families


def test_the_documentation_lists_vllms_names() -> None:
    _, _, section = (
        (ROOT / "docs" / "use" / "operations.md").read_text().partition("### Under vLLM's names")
    )
    table, _, _ = section.partition("###")
    other_names = dict(re.findall(r"`(\w+)`\s+copies\s+`(\w+)`", table))
    documented = re.findall(r"^\| `vllm:(\w+)", table, re.MULTILINE)
    copied = {
        f"vllm:{name}".removesuffix("_total"): (
            f"pensieve:{other_names.get(name, name)}".removesuffix("_total")
        )
        for name in documented
    }
    names = {family.name for family in VllmMetrics(Metrics(), "tea", 32, 200).collect()}
    assert copied.keys() == names and COPIED.items() <= copied.items()


def test_panels_do_not_overlap() -> None:
    places = [
        panel["gridPos"]
        for panel in json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]
    ]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_every_alert_says_what_is_wrong_and_where() -> None:
    for rule in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["for"]
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]


def test_the_unit_starts_what_there_is() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "pensieve.service")
    program, command, *options = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, command) == ("pensieve", "serve")
    args = parser().parse_args([*options, "--engine", "from the file"])
    assert args.shutdown_timeout < int(unit["Service"]["TimeoutStopSec"])
    assert args.state_dir == Path("/var/lib") / unit["Service"]["StateDirectory"]
    assert unit["Service"]["Environment"] == f"HOME={args.state_dir}"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_the_makefile_refuses_an_old_python(tmp_path: Path) -> None:
    """Otherwise pip would try one old release of every package after another."""
    old = tmp_path / "python3.10"
    code = "import sys; sys.version_info = (3, 10, 4); exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$2"\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "setup", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (
        done.returncode != 0
        and "Python 3.11 or newer" in done.stdout
        and "PYTHON=python3.12" in done.stdout
    )
    assert not (tmp_path / "venv").exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """All but the program's path, where nothing is installed here."""
    unit = tmp_path / "pensieve.service"
    text = (DEPLOY / "pensieve.service").read_text()
    unit.write_text(
        text.replace("ExecStart=/opt/pensieve/.venv/bin/pensieve", f"ExecStart={sys.executable}")
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_container_copies_what_there_is_and_starts_it() -> None:
    lines = (ROOT / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    copied = [
        line.split()[1:-1] for line in lines if line.startswith("COPY") and "--from" not in line
    ]
    assert all((ROOT / name).exists() for names in copied for name in names)
    linked = {
        path.resolve().relative_to(ROOT).as_posix()
        for path in (ROOT / "src" / "pensieve").iterdir()
        if path.is_symlink()
    }
    assert linked | {"src"} <= {name for names in copied for name in names}
    start = [
        json.loads(line.split(None, 1)[1])
        for line in lines
        if line.startswith(("ENTRYPOINT", "CMD"))
    ]
    (program, command, *options), defaults = start
    assert (program, command) == ("pensieve", "serve")
    assert parser().parse_args([*options, *defaults]).host == "0.0.0.0"
