"""`--kv-cache-dtype fp8`: with KV from any tier, or computed again, replies are those of a cold run
in eight bits."""

from __future__ import annotations

import pytest

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.plugins.attention.fp8_pool import DTYPE
from pensieve.runtime.disk.store import DiskSettings
from pensieve.runtime.llm import LLM, SamplingParams
from pensieve.scheduler.types import SettingError
from tests.runtime.tiny_engine import Reference, TinyEngine

from .chatter import TIGHT, Chatter
from .server import Server
from .test_lower_tier import SumsEngine, every_next_token_of
from .test_server import wait_for

EVENTS = (
    "gpu",
    "host",
    "recomputed",
    "new",
    "disjoint",
    "dropped",
    "aborted",
    "branched",
    "forked",
)

# A number halfway between two codes gets one or the other, by the last bit of float32 sums, which
# depends on the sizes of the step. Logits then differ by up to 0.24 (measured; 7,200 contexts).
# They spread by 2.2.
ONE_CODE = 0.3

DISK = dict(gpu_kv_chunks=27, host_kv_chunks=14, disk_kv_chunks=80)


@pytest.mark.parametrize("disturbed", [False, True], ids=["", "disturbed"])
def test_replies_are_right_where_codes_are_exact(disturbed):
    engine = SumsEngine(16, kv_dtype=DTYPE)
    cold = every_next_token_of(16)
    chatter = Chatter(engine, cold, 22, disturbed=disturbed, gpu_kv_chunks=27)
    chatter.run(60, events=("gpu", "host", "recomputed", "dropped"))


def test_replies_are_right_from_the_disk(tmp_path):
    disk = DiskSettings(tmp_path, 80, "ab")
    chatter = Chatter(SumsEngine(16, kv_dtype=DTYPE), every_next_token_of(16), 3, disk=disk, **DISK)
    assert chatter.run(60, restarts=2, events=["disk"])["restarted"] == 2


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_replies_are_those_of_a_cold_run(kind, tmp_path):
    """The cold run computes each context at once, in its own pool in eight bits."""
    engine = TinyEngine(kind, kv_dtype=DTYPE)
    cold = Reference(kind, DTYPE)
    sizes = dict(undecided=ONE_CODE)
    Chatter(engine, cold, 1, disturbed=True, gpu_kv_chunks=29, **sizes).run(50, events=EVENTS)
    Chatter(engine, cold, 2, gpu_kv_chunks=29, **sizes, **TIGHT).run(20, events=["suspended"])
    disk = DiskSettings(tmp_path, 80, "ab")
    Chatter(engine, cold, 3, disk=disk, **sizes, **DISK).run(50, restarts=2, events=["disk"])


def test_the_cold_run_is_not_that_of_the_engine_s_dtype():
    with pytest.raises(AssertionError, match="is off by"):
        engine = TinyEngine("llama", kv_dtype=DTYPE)
        Chatter(engine, Reference("llama"), 1, gpu_kv_chunks=29, undecided=ONE_CODE).run(600)


def test_the_offline_api_takes_it(tmp_path):
    params = SamplingParams(temperature=0, max_tokens=8)
    sizes = dict(gpu_kv_bytes="16MiB", host_kv_bytes="16MiB")
    with LLM("demo", kv_cache_dtype="fp8", **sizes) as llm:
        first, again = (
            llm.generate("hello " * 40, params)[0].outputs[0].token_ids for _ in range(2)
        )
    assert len(first) == 8 and first == again
    with pytest.raises(SettingError, match="--lower-tier-kv: cannot be given beside"):
        LLM("demo", kv_cache_dtype="fp8", lower_tier_kv="fp8", **sizes)


OPTIONS = (
    "--gpu-kv-chunks",
    20,
    "--host-kv-bytes",
    "16MiB",
    "--max-model-len",
    400,
    "--disk-kv-bytes",
    "40MB",
)
BODY = dict(temperature=0, ignore_eos=True, return_token_ids=True, return_sources=True)


def turn(server, prompt, tokens=40):
    """The reply, and the sources of its prompt."""
    answer = server.post("/v1/completions", prompt=prompt, max_tokens=tokens, **BODY).json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_s_replies_are_equal_from_every_tier(tmp_path, ranks):
    """Cold, from the GPU, twice from the host, and from the disk after a restart; with another type
    there is no KV."""
    engine = tmp_path / "demo"
    build_engine(DEMO_CHECKPOINT, engine, "reference", dtype="float32", tensor_parallel=ranks)
    state = tmp_path / "state"
    prompt = list(range(40, 140))
    with Server(state, *OPTIONS, "--kv-cache-dtype", "fp8", engine=engine) as server:
        cold, sources = turn(server, prompt)
        assert sources["cached_tokens"] == 0
        assert turn(server, prompt)[0] == cold
        for _ in range(2):
            for number in range(4):
                turn(server, [50 + number, *range(60, 400)], 2)
            reply, sources = turn(server, prompt)
            assert reply == cold and sources["host"] == 96
        assert server.stop() == 0
    with Server(state, *OPTIONS, "--kv-cache-dtype", "fp8_e4m3", engine=engine) as server:
        reply, sources = turn(server, prompt)
        assert reply == cold and sources["disk"] == 96
        assert server.stop() == 0
    with Server(state, *OPTIONS, engine=engine) as server:
        wait_for(lambda: any("dropped 1 files of KV" in line for line in server.log))
        _, sources = turn(server, prompt)
        assert sources["cached_tokens"] == 0
