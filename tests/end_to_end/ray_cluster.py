"""A Ray cluster of one node, in processes of its own, for the application in deploy/ray_serve/."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import httpx
import yaml

from benchmarks.ports import free_ports

from .server import HTTP

RAY = Path(sys.prefix) / "ray" / "bin"
"""Ray is large, and wants a newer protobuf than our tests: `make ray` gives it an environment that
sees ours too."""

CONFIG = Path(__file__).parents[2] / "deploy" / "ray_serve" / "config.yaml"
STARTED = "Ray runtime started"
START_ATTEMPTS = 10
START_SECONDS = 300  # on a machine with other work


def until(ask, what, seconds=START_SECONDS):
    """Waits until `ask` returns something, and returns it."""
    end = time.monotonic() + seconds
    while not (result := ask()):
        assert time.monotonic() < end, what()
        time.sleep(0.1)
    return result


class RayCluster:
    """Use as a context manager. `url` is Serve's address."""

    def __init__(self, environment=None):
        # Not below pytest's directories: sockets are in it, and their paths must be short.
        self._home = Path(tempfile.mkdtemp(prefix="pensieve-ray-"))
        gcs, dashboard, self._clients, self._port = free_ports(4)
        self.url = f"http://127.0.0.1:{self._port}"
        self._address = f"http://127.0.0.1:{dashboard}"
        # Without a setting, Ray asks for a token if its user has one.
        settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        # A replica that says later how long its queue is (by default 0.1 s) loses the turn to
        # another one.
        settings["RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S"] = "10"
        self._environment = os.environ | settings | (environment or {})
        ports = [
            "--port",
            gcs,
            "--dashboard-port",
            dashboard,
            "--ray-client-server-port",
            self._clients,
        ]
        # any: those above may be in the usual range, and another cluster has the usual port
        ports += ["--min-worker-port", 0, "--max-worker-port", 0]
        ports += ["--dashboard-agent-listen-port", 0]
        places = [
            "--node-ip-address",
            "127.0.0.1",
            "--dashboard-host",
            "127.0.0.1",
            "--temp-dir",
            self._home / "ray",
        ]
        sizes = ["--num-cpus", 4, "--object-store-memory", 100_000_000]
        self._command = [
            RAY / "ray",
            "start",
            "--head",
            "--block",
            "--include-dashboard",
            "true",
            *ports,
            *places,
            *sizes,
        ]

    def __enter__(self):
        """On a machine with much other work Ray gives up after 30 seconds: then it is started
        again."""
        for _ in range(START_ATTEMPTS):
            with (self._home / "log").open("w") as log:
                words = [str(word) for word in self._command]
                options = dict(
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                )
                self._process = subprocess.Popen(words, **options)
            until(lambda: self._process.poll() is not None or self._serves(), self.log)
            if self._process.poll() is None:
                return self
            self._kill()
        raise RuntimeError(f"Ray did not start:\n{self.log()}")

    def _serves(self):
        """The server for Ray's clients, which no test uses, listens last. If it is late, the
        cluster ends, even after STARTED."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._clients), timeout=20):
            return STARTED in self.log()
        return False

    def _kill(self):
        """All that the cluster has started is of one session. On a signal `ray start` may wait for
        long."""
        for process in of_session(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()
        until(lambda: not of_session(self._process.pid), self.log)

    def __exit__(self, *_):
        self._kill()
        shutil.rmtree(self._home, ignore_errors=True)

    def log(self):
        return (self._home / "log").read_text()[-5000:]

    def _get(self, path):
        try:
            answer = HTTP.get(f"{self._address}{path}", timeout=20)
        except httpx.TransportError:
            return None
        return answer.json() if answer.status_code == 200 else None

    def deploy(self, options, replicas):
        """Gives Serve the configuration of deploy/ray_serve/ with these values. Does not wait."""
        config = yaml.safe_load(CONFIG.read_text())
        config["proxy_location"] = "HeadOnly"
        config["http_options"] |= {"host": "127.0.0.1", "port": self._port}
        (application,) = config["applications"]
        application["args"] = {"options": options, "state_dir": str(self._home / "states")}
        (deployment,) = application["deployments"]
        deployment["ray_actor_options"] = {"num_cpus": 0.1}
        deployment["autoscaling_config"] |= {"min_replicas": replicas, "max_replicas": replicas}
        file = self._home / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        command = [RAY / "serve", "deploy", "--address", self._address, file]
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=START_SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.log()

    def status(self):
        answer = self._get("/api/serve/applications/") or {"applications": {}}
        application = answer["applications"].get("pensieve", {})
        assert application.get("status") != "DEPLOY_FAILED", application
        return application

    def replicas(self):
        """The process ids of replicas that serve, by name; None while there are others, or changes
        under way."""
        application = self.status()
        replicas = application.get("deployments", {}).get("Pensieve", {}).get("replicas", [])
        if application.get("status") != "RUNNING" or any(
            replica["state"] != "RUNNING" for replica in replicas
        ):
            return None
        return {replica["replica_id"]: replica["pid"] for replica in replicas}

    def until_replicas(self, number, but=()):
        """Waits for so many replicas, none of them in `but`, and returns them."""

        def served():
            replicas = self.replicas()
            return (
                replicas
                if replicas and len(replicas) == number and not replicas.keys() & set(but)
                else None
            )

        return until(served, lambda: f"{self.status()}\n{self.log()}")


def of_session(leader):
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getsid(int(process.name)) == leader:
                processes.append(int(process.name))
    return processes


def descendants(pid):
    """The processes that its threads have started, with theirs."""
    direct = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            direct += map(int, task.read_text().split())
    return [*direct, *(further for child in direct for further in descendants(child))]
