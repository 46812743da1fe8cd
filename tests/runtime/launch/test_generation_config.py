"""The sampling defaults of a checkpoint's generation_config.json."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from pensieve.runtime.launch.generation_config import sampling_defaults
from pensieve.runtime.messages import SamplingDefaults
from pensieve.scheduler.types import SettingError

QWEN = {
    "do_sample": True,
    "eos_token_id": [2, 0],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": None,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
}


def write(folder: Path, **fields: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_the_engines_file_gives_the_defaults(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = write(tmp_path / "engine", **QWEN)
    with caplog.at_level(logging.INFO):
        defaults = sampling_defaults("auto", engine)
    assert defaults == SamplingDefaults(0.6, 0.95, 20, 0.0, 1.05, 2048)
    (line,) = caplog.messages
    assert "temperature 0.6" in line and "max_new_tokens 2048" in line and "min_p" not in line
    assert sampling_defaults("vllm", engine) == SamplingDefaults()


def test_a_folder_replaces_the_engines_file(tmp_path: Path) -> None:
    engine = write(tmp_path / "engine", **QWEN)
    other = write(tmp_path / "other", top_k=-1, temperature=0)
    assert sampling_defaults(str(other), engine) == SamplingDefaults(temperature=0)


def test_a_file_without_sampling_and_no_file_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert sampling_defaults("auto", tmp_path) == SamplingDefaults()
        assert sampling_defaults("auto", write(tmp_path, eos_token_id=2)) == SamplingDefaults()
    assert not caplog.messages


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": True}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_a_wrong_value_stops_the_start(
    tmp_path: Path, fields: dict[str, object], word: str
) -> None:
    with pytest.raises(SettingError, match=f"--generation-config: .*{word}"):
        sampling_defaults("auto", write(tmp_path, **fields))


def test_a_folder_without_the_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--generation-config: cannot read"):
        sampling_defaults(str(tmp_path), tmp_path)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\udcff"])
def test_a_file_that_is_no_json_stops_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SettingError, match="--generation-config: cannot read"):
        sampling_defaults("auto", tmp_path)
