"""The start of `pensieve serve`: refusals before anything is built, and `--attach`'s connection to
Triton's model."""

from __future__ import annotations

import socket
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.runtime.launch.attached import telling_model
from pensieve.runtime.launch.http_options import http_settings, server_name
from pensieve.runtime.launch.serving import check_histories
from pensieve.runtime.launch.settings import ServeSettings
from pensieve.runtime.ranks import launch as ranks_launch
from pensieve.scheduler.types import SettingError
from pensieve.scripts import serve as serve_module
from tests.models import tiny_checkpoint


@pytest.fixture
def model(tmp_path):
    with Listener(str(tmp_path / "socket"), "AF_UNIX") as listener:
        yield listener


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            ("--max-connections", "9"),
            "--max-connections: has no meaning here: Triton serves the clients",
        ),
        (("--config", "nowhere.toml"), "--config: cannot read nowhere.toml"),
        (("--history-ttl", "0"), "--history-ttl: must be more than 0 seconds"),
    ],
)
def test_a_wrong_setting_is_told_to_the_model(model, tmp_path, capsys, flags, error):
    options = ["--engine", "demo", "--state-dir", str(tmp_path), "--attach", model.address]
    assert serve_module.main([*options, *flags]) == 2
    assert error in model.accept().recv() and error in capsys.readouterr().err


def test_ranks_without_an_mpirun_are_told_to_the_model(model, tmp_path, monkeypatch):
    build_engine(DEMO_CHECKPOINT, tmp_path / "engine", tensor_parallel=2)
    monkeypatch.setattr(ranks_launch, "find_spec", lambda name: None)
    assert (
        serve_module.main(
            [str(tmp_path / "engine"), "--state-dir", str(tmp_path), "--attach", model.address]
        )
        == 2
    )
    assert "there is no mpi4py" in model.accept().recv()


def test_a_socket_at_which_nothing_listens_is_a_wrong_setting(tmp_path, capsys):
    options = ["--engine", "demo", "--state-dir", str(tmp_path), "--attach", str(tmp_path / "none")]
    assert serve_module.main(options) == 2
    assert (
        f"--attach: cannot connect to {tmp_path / 'none'}: No such file" in capsys.readouterr().err
    )


def test_a_setting_that_cannot_be_told_is_raised_all_the_same(tmp_path, caplog):
    with (
        pytest.raises(SettingError, match=r"^--engine: is wrong"),
        telling_model(tmp_path / "none"),
    ):
        raise SettingError("--engine", "is wrong")
    assert "cannot connect to" in caplog.text


@pytest.mark.parametrize("engine", ["checkpoint", "demo"])
def test_a_taken_port_is_noticed_before_anything_is_built(engine, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if engine == "checkpoint":
        engine = tmp_path / "my-llama"
        tiny_checkpoint("llama", engine)
        capsys.readouterr()  # how far that is
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve_module.main([str(engine), "--port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--port: cannot listen on 127.0.0.1:{port}: Address already in use" in line
    assert "take another port, or 0 for any free one" in line
    assert not (tmp_path / "state").exists() and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("demo", "--gpu-kv-bytes", "abc"), "--gpu-kv-bytes: 'abc' is not a size"),
        (("demo", "--gpu-kv-chunks", "0"), "--gpu-kv-chunks: must be at least one chunk"),
        (
            ("demo", "--owner-kv-bytes", "abc", "--api-key", "k"),
            "--owner-kv-bytes: 'abc' is not a size",
        ),
        (("demo", "--max-body-bytes", "abc"), "--max-body-bytes: 'abc' is not a size"),
        (("demo", "--max-num-seqs", "0"), "--max-num-seqs: must be at least 1"),
        (("demo", "--generation-reserve", "3"), "--generation-reserve: must be between 0 and 1"),
        (
            ("demo", "--max-model-len", "4000", "--gpu-kv-chunks", "9"),
            "--max-model-len: a context of 4000 tokens needs",
        ),
        (
            ("demo", "--disk-kv-bytes", "1GiB", "--host-kv-bytes", "0"),
            "--disk-kv-bytes: needs --host-kv-bytes above 0",
        ),
        (("demo", "--chat-template", "nowhere"), "--chat-template: cannot read nowhere"),
        (("demo", "--dtype", "float16"), "--dtype: is for a checkpoint"),
        (("./nowhere",), "PATH: ./nowhere does not exist"),
    ],
)
def test_a_wrong_value_is_noticed_before_a_taken_port(flags, error, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert serve_module.main([*flags, "--port", str(taken.getsockname()[1])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pensieve serve: {error}")
    assert not (tmp_path / "state").exists()


def test_kv_that_was_written_apart_from_the_other_servers_is_dropped(tmp_path, postgres):
    """Once: this server is told of deletions from then on."""
    settings = ServeSettings("demo", state_dir=tmp_path, history_url=postgres)
    record = tmp_path / "kv" / "rank-0" / "1.kv"
    record.parent.mkdir(parents=True)
    for there in (False, True):
        record.touch()
        check_histories(settings, http_settings(settings))
        assert record.exists() is there


def test_kv_that_must_go_goes_at_the_next_start_if_this_one_ends_too_soon(
    tmp_path, postgres, monkeypatch
):
    """Removing a terabyte takes seconds."""
    settings = ServeSettings("demo", state_dir=tmp_path, history_url=postgres)
    record = tmp_path / "kv" / "rank-0" / "1.kv"
    record.parent.mkdir(parents=True)
    record.touch()

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        with pytest.raises(SettingError, match=r"--disk-dir: cannot use .*1\.kv"):
            check_histories(settings, http_settings(settings))
    check_histories(settings, http_settings(settings))
    assert not record.exists()


def test_a_server_that_met_a_full_disk_gets_its_name_at_the_next_start(tmp_path):
    """Without a name it would be a new server of the shared histories at each start, and lose its
    KV on disk."""
    (tmp_path / "server").write_text("")
    name = server_name(tmp_path)
    assert name and server_name(tmp_path) == name
