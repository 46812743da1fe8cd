"""HOST in another form on the CPU device: copies equal the reference's, whole or layer by layer."""

import random

import numpy as np
import pytest
import torch

from pensieve.plugins.kv_forms.forms import FP8, PACKED, record_bytes
from pensieve.plugins.kv_forms.fp8_reference import decode, encode
from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.executor import MAX_IN_FLIGHT
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.types import Tier

from .device.test_cuda import delay, executor_on, run, save_three, three_gated
from .tiny_engine import TinyEngine

SHAPE = (20, 3, 2, 2, 4, 16)
HOST_SLOTS = 15
FORMS = [
    *(
        pytest.param(FP8, dtype, id=f"fp8, {dtype}")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ),
    pytest.param(PACKED, torch.bfloat16, id="packed"),
]


@pytest.fixture
def closing():
    """Closes the objects passed to it, at the end."""
    opened = []
    yield lambda one: opened.append(one) or one
    for one in opened:
        one.close()


def settle(device):
    for lane in (Lane.IN, Lane.OUT):
        device.synchronize(device.mark(lane))


@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_random_copies_are_coded(closing, form, dtype):
    device = closing(CpuDevice(shuffle=random.Random(0)))
    device.allocate_pool(Tier.GPU, SHAPE, dtype)
    device.allocate_pool(Tier.HOST, (HOST_SLOTS, *SHAPE[1:]), dtype, form)
    pools = device._pools
    pools[Tier.GPU].copy_(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)))
    on_gpu = pools[Tier.GPU].clone()
    on_host = pools[Tier.HOST].clone()
    assert on_host.shape == (HOST_SLOTS, 3, form.layer_bytes(SHAPE)) and not on_host.any()
    dice = np.random.default_rng(1)
    for _ in range(20):
        count, first = int(dice.integers(0, 10)), int(dice.integers(3))
        layers = range(first, int(dice.integers(first + 1, 4)))
        gpu_slots, host_slots = (
            dice.permutation(most)[:count].astype(np.int32) for most in (20, HOST_SLOTS)
        )
        chosen = slice(layers.start, layers.stop)
        if not count:
            device.copy(Lane.OUT, gpu_slots, host_slots, layers)
        elif dice.random() < 0.5:
            device.copy(Lane.OUT, gpu_slots, host_slots, layers)
            on_host[host_slots, chosen] = form.encode(on_gpu[gpu_slots, chosen])
        else:
            device.copy(Lane.IN, host_slots, gpu_slots, layers)
            on_gpu[gpu_slots, chosen] = form.decode(on_host[host_slots, chosen], SHAPE, dtype)
        settle(device)
    assert torch.equal(pools[Tier.GPU], on_gpu) and torch.equal(pools[Tier.HOST], on_host)


def three_reloaded_from_codes(kind: str) -> list[tuple[int, ...]]:
    """The tokens if HOST is as the GPU, and its records are coded and decoded by hand."""
    device = CpuDevice()
    executor = executor_on(device, TinyEngine(kind))
    run(executor, save_three())
    host = device._pools[Tier.HOST]
    exact = host.clone()
    host.copy_(decode(encode(host), host.shape, host.dtype))
    assert not torch.equal(host, exact)
    tokens = run(executor, three_gated())
    executor.close()
    return tokens


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_gated_groups_of_layers_bring_what_the_codes_say(closing, kind):
    """Every group of layers is late, for three steps in flight."""
    device = CpuDevice()
    executor = closing(executor_on(device, TinyEngine(kind), FP8))
    run(executor, save_three())
    device._disturb = delay(Lane.IN, seconds=0.01)
    assert run(executor, three_gated(), in_flight=MAX_IN_FLIGHT) == three_reloaded_from_codes(kind)


def test_what_goes_over_the_link_is_counted_as_it_goes(closing):
    engine = TinyEngine("llama")
    executor = closing(executor_on(CpuDevice(), engine, FP8))
    run(executor, save_three())
    record = record_bytes(engine.kv_shape(1, 8), engine.dtype, FP8)
    assert executor.copied_bytes.swap_out == 6 * record < 6 * engine.chunk_bytes(8)
