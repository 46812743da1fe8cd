"""The target of compiled code, and the reasons why it cannot run elsewhere."""

import platform

import pytest
import torch

from pensieve.builder.inductor import host_target as target
from pensieve.builder.inductor.host_target import this_target, why_not_here


def test_code_compiled_here_runs_here():
    here = this_target("cpu")
    assert here.split()[0] == platform.machine() and why_not_here(here, "cpu") is None


@pytest.mark.parametrize(
    "built, named",
    [
        ("x86_64 avx", None),
        ("x86_64 avx avx2", None),
        ("x86_64 avx avx2 avx512f avx512_bf16", "avx512f, avx512_bf16"),
        ("aarch64 asimd", "aarch64"),
    ],
)
def test_a_processor_may_have_more_and_not_less(built, named, monkeypatch):
    monkeypatch.setattr(target, "this_target", lambda *_: "x86_64 avx avx2 fma")
    reason = why_not_here(built, "cpu")
    assert reason is None if named is None else named in reason


def test_a_gpu_is_the_same_or_another(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert this_target("cuda") == "compute capability 9.0"
    assert why_not_here("compute capability 9.0", "cuda") is None
    reason = why_not_here("compute capability 8.0", "cuda")
    assert "8.0" in reason and "9.0" in reason
