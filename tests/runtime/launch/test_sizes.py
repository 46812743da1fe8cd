"""Sizes as people write them."""

import pytest

from pensieve.runtime.launch.options import parse_bytes, parse_options
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


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("32768", 32768),
        ("32k", 32_000),
        ("32K", 32_768),
        ("25.6k", 25_600),
        ("1M", 2**20),
        ("-1", -1),
    ],
)
def test_a_number_of_tokens_may_be_in_thousands(text, count):
    assert parse_options(["demo", "--max-model-len", text]).max_model_len == count


@pytest.mark.parametrize("text", ["", "k", "1.5", "2,048", "32 tokens", "٣"])
def test_other_numbers_of_tokens_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        parse_options(["demo", f"--max-num-batched-tokens={text}"])
    assert (
        "is not a number of tokens; write 32768, 32K (the same) or 32k (32,000)"
        in capsys.readouterr().err
    )
