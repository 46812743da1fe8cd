"""How the engine's process behind Triton's model comes by its ranks, without Triton and without MPI."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading

import pytest

from pensieve.runtime.ranks import launch as ranks_launch
from pensieve.scripts import triton_engine
from pensieve.scripts.triton_engine import hand_over
from pensieve.scripts.triton_rank import take_over


def test_the_pipe_is_rank_0_s_alone_once_it_is_handed_over(tmp_path):
    ours, theirs = multiprocessing.Pipe()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "door"))
        door.listen()
        thread = threading.Thread(target=hand_over, args=(theirs, door))
        thread.start()
        taken = take_over(str(tmp_path / "door"))
        thread.join(60)
    assert theirs.closed
    taken.send("ready")
    assert ours.recv() == "ready"
    taken.close()
    with pytest.raises(EOFError):
        ours.recv()


def test_ranks_without_an_mpirun_are_told_to_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(triton_engine, "engine_ranks", lambda args: 2)
    monkeypatch.setattr(ranks_launch, "find_spec", lambda name: None)
    ours, theirs = multiprocessing.Pipe()
    options = ["--engine", "demo", "--state-dir", str(tmp_path)]
    assert triton_engine.main([*options, str(os.dup(theirs.fileno()))]) == 2
    assert "there is no mpi4py" in ours.recv()
    assert not any(thread.name == "hand-over" for thread in threading.enumerate())
