"""Functions shared by commands: exit statuses, bounds and tables."""

from __future__ import annotations

from argparse import Namespace

import pytest

from pensieve.scheduler.types import SettingError
from pensieve.scripts.command import (
    check_above_0,
    check_least,
    exit_status,
    numbers,
    result_line,
    title_line,
)


def test_a_wrong_option_is_one_line_and_status_2(capsys):
    def fail():
        raise SettingError("--rate", "must be above 0, not 0")

    assert exit_status("bench", fail) == 2
    assert capsys.readouterr().err == "bench: --rate: must be above 0, not 0\n"
    assert exit_status("bench", lambda: None) == 0 and exit_status("bench", lambda: 1) == 1


def test_another_error_of_the_user_is_told_in_the_same_way(capsys):
    def fail():
        raise FileNotFoundError("no such file")

    assert exit_status("check", fail, (SettingError, OSError)) == 2
    assert capsys.readouterr().err == "check: no such file\n"
    with pytest.raises(FileNotFoundError):
        exit_status("check", fail)


def test_a_list_of_numbers():
    assert numbers("4,5.5", "--rate", float) == [4.0, 5.5] and numbers("3", "--seeds", int) == [3]
    with pytest.raises(SettingError, match="--seeds: '1,x' is not a list of numbers"):
        numbers("1,x", "--seeds", int)


def test_numbers_have_bounds():
    args = Namespace(think_s=0.0, seed=0, ramp_s=float("nan"), gone=None)
    check_above_0(args, ("gone", "of_another_command"))
    with pytest.raises(SettingError, match=r"--think-s: must be above 0, not 0\.0"):
        check_above_0(args, ("think_s",))
    check_least(args, seed=0, gone=3)
    with pytest.raises(SettingError, match="--seed: must be at least 1, not 0"):
        check_least(args, seed=1)
    with pytest.raises(SettingError, match="--ramp-s: must be at least 0, not nan"):
        check_least(args, ramp_s=0)


def test_lines_stand_below_their_titles():
    columns = {"name": ("name", "<6"), "rate": ("requests/s", "6.2f"), "tokens": ("tokens", "9,")}
    titles = title_line(columns)
    rows = [
        {"name": "a", "rate": 1.5, "tokens": 12345},
        {"name": "longer", "rate": None, "tokens": 7},
    ]
    assert titles == "name    requests/s     tokens"
    assert [result_line(columns, row) for row in rows] == [
        "a             1.50     12,345",
        "longer           -          7",
    ]
