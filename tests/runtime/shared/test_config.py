"""`--kv-shared-config` is read strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from pensieve.runtime.shared.config import DirectoryOptions, SharedConfig, read_config
from pensieve.scheduler.types import SettingError

DIRECTORY = '"engine": "directory", "path": "/kv", "max_bytes": 1000'


def test_defaults() -> None:
    assert read_config(f"{{{DIRECTORY}}}") == SharedConfig(DirectoryOptions(Path("/kv"), 1000))


def test_all_fields() -> None:
    config = read_config(f'{{{DIRECTORY}, "namespace": "blue-1", "min_tokens": 64}}')
    assert (config.namespace, config.min_tokens) == ("blue-1", 64)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "must be an object"),
        ("{}", '"engine" must be one of directory'),
        ('{"engine": "redis"}', "not 'redis'"),
        ('{"engine": "directory"}', 'needs the field "path"'),
        ('{"engine": "directory", "path": "/kv"}', 'needs the field "max_bytes"'),
        (f'{{{DIRECTORY}, "master": "x"}}', 'the engine directory has no field "master"'),
        (f'{{{DIRECTORY}, "options": 1}}', 'has no field "options"'),
        (f'{{{DIRECTORY}, "min_tokens": 0}}', '"min_tokens" must be a whole number from 1'),
        (f'{{{DIRECTORY}, "min_tokens": true}}', '"min_tokens" must be a whole number from 1'),
        (f'{{{DIRECTORY}, "namespace": "a/b"}}', '"namespace" must have at most 64 letters'),
        ('{"engine": "directory", "path": 1, "max_bytes": 9}', '"path" must be a folder'),
        ('{"engine": "directory", "path": "a", "max_bytes": "9"}', '"max_bytes" must be a whole'),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(SettingError) as caught:
        read_config(text)
    assert caught.value.setting == "kv_shared_config"
    assert words in caught.value.message
