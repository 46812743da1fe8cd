"""Ports for programs that cannot bind any free one and say which."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from benchmarks import ports

SOME = 3


def none_left(monkeypatch, numbers):
    monkeypatch.setattr(ports, "_OURS", numbers)
    with pytest.raises(RuntimeError, match="0 ports are free, 1 were wanted"):
        ports.free_ports(1)


def test_a_port_is_free_and_given_once(monkeypatch):
    given = ports.free_ports(SOME)
    assert len(set(given)) == SOME
    for port in given:
        socket.create_server(("127.0.0.1", port)).close()
    none_left(monkeypatch, given)


def test_no_other_process_gets_it():
    given = ports.free_ports(SOME)
    code = f"from benchmarks import ports; ports._OURS = {given}; ports.free_ports(1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "RuntimeError: 0 ports are free" in done.stderr


def test_a_port_in_use_is_left_out(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        none_left(monkeypatch, [server.getsockname()[1]])


def test_the_range_of_the_system_is_left_out(monkeypatch, tmp_path):
    file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "_SYSTEM", file)
    file.write_text("20000\t31899\n")
    assert all(port >= 31_900 for port in ports.free_ports(SOME))
    file.write_text("1024\t65535\n")
    assert len(ports.free_ports(SOME)) == SOME
