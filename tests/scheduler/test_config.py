from __future__ import annotations

import pickle

import pytest

from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.types import ErrorKind, Request, RequestError, Sampling, SettingError

from .harness import SMALL, Harness


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(
            (name, 0)
            for name in (
                "gpu_kv_chunks",
                "max_model_len",
                "max_num_seqs",
                "chunk_tokens",
                "max_queue",
            )
        ),
        *(("queue_timeout", 0.0), ("queue_timeout", float("inf"))),
        *(("max_num_batched_tokens", 0), ("max_num_batched_tokens", 5), ("host_kv_chunks", -1)),
        *(("target_ms_per_token", value) for value in (0.0, -1.0, float("inf"), float("nan"))),
        *(
            ("swap_out_below", -0.1),
            ("swap_out_below", 1.1),
            ("generation_reserve", -0.1),
            ("generation_reserve", 2.0),
        ),
        *(("eviction", "random"), ("batching", "both"), ("queue_order", "lifo")),
        *(("host_kv_growth", -1), ("max_model_len", 89)),
        *(("overflow", "never"), ("overflow_ratio", 0.0), ("overflow_ratio", 1.0)),
    ],
)
def test_a_wrong_setting_names_itself_and_its_value(setting, value):
    with pytest.raises(SettingError) as error:
        SchedulerConfig(**(SMALL | {setting: value}))
    assert error.value.setting == setting
    assert str(value) in str(error.value)


def test_a_target_without_prompts_beside_generation_is_refused():
    with pytest.raises(SettingError, match="target_ms_per_token: needs `batching` unified"):
        SchedulerConfig(**SMALL, target_ms_per_token=9.0, batching="separate")


def test_the_largest_context_fits_and_leaves_the_reserve():
    config = SchedulerConfig(24, 0, max_model_len=88, chunk_tokens=4, generation_reserve=0.1)
    assert (config.reserved_chunks, config.largest_context) == (2, 88)
    with pytest.raises(SettingError, match="enough for 88 tokens"):
        SchedulerConfig(24, 0, max_model_len=89, chunk_tokens=4, generation_reserve=0.1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(
            ({"prompt": []}, "prompt"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"min_tokens": 5}, "min_tokens"),
        ),
        ({"min_tokens": -1}, "min_tokens"),
    ],
)
def test_a_bad_request_names_its_field(fields, param):
    with pytest.raises(RequestError) as error:
        Request(
            **{"id": 1, "prompt": Harness.tokens([1]), "max_tokens": 4} | {"prompt": [1]} | fields
        )
    assert (error.value.kind, error.value.subject) == (ErrorKind.INVALID, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"seed": -1},
    ],
)
def test_bad_sampling_names_its_field(fields):
    with pytest.raises(RequestError) as error:
        Sampling(**fields)
    assert error.value.subject in fields


def test_what_cannot_fit_is_refused_with_both_numbers():
    harness = Harness()
    with pytest.raises(RequestError, match=r"64 tokens; .* 64 tokens") as error:
        harness.submit(range(64))
    assert (error.value.kind, error.value.subject) == (ErrorKind.INVALID, "prompt")
    with pytest.raises(RequestError, match="60 tokens and max_tokens is 5") as error:
        harness.submit(range(60), 5)
    assert (error.value.kind, error.value.subject) == (ErrorKind.INVALID, "max_tokens")
    harness.submit(range(60), 4)
    harness.drain()


def test_a_full_queue_is_said():
    harness = Harness()
    for _ in range(8):
        harness.submit([1])
    with pytest.raises(RequestError) as error:
        harness.submit([1])
    assert error.value.kind == ErrorKind.TOO_MANY
    harness.drain()


def test_an_error_of_a_setting_comes_back_from_another_process():
    error = pickle.loads(pickle.dumps(SettingError("--load", "must be above 0")))
    assert (str(error), error.setting) == ("--load: must be above 0", "--load")
