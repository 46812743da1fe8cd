"""Sizes as people write them."""

import pytest

from pensieve.runtime.launch.options import parse_bytes
from pensieve.scheduler.types import SettingError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("0", 0),
        ("7B", 7),
        ("40GiB", 40 * 2**30),
        (" 1.5 mb ", 1_500_000),
        ("0.1KB", 100),
        ("2TiB", 2**41),
    ],
)
def test_a_size_is_a_number_of_bytes(text, count):
    assert parse_bytes(text, "--gpu-kv-bytes") == count


@pytest.mark.parametrize("text", ["", "-1", "1e3", "GiB", "4 parsecs", "1,5GB", "٣GB"])
def test_anything_else_is_refused_by_its_setting(text):
    with pytest.raises(SettingError, match=r"^--gpu-kv-bytes: .* is not a size"):
        parse_bytes(text, "--gpu-kv-bytes")
