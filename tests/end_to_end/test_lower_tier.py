"""`--lower-tier-kv`: with fp8 the KV from HOST is rounded, with packed it is exact; all other
behaviour is unchanged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.builder.parity import SeatSpan, batch_of
from pensieve.plugins.kv_forms.forms import FP8, record_bytes
from pensieve.plugins.kv_forms.fp8_reference import decode, encode
from pensieve.plugins.torch_ops import register_pool, release_pool
from pensieve.runtime.disk.store import DiskSettings
from pensieve.scheduler.config import SAVE_MODES
from pensieve.scheduler.types import Tier
from tests.runtime.fake_engine import VOCAB, FakeEngine
from tests.runtime.tiny_engine import TinyEngine

from .chatter import Chatter
from .failing_form import FAILING_FORM
from .player import Player
from .server import Server

# Whole conversations, when codes are exact.


class SumsEngine(FakeEngine):
    """Its KV are integers below `largest`; with 16, KV in eight bits is exact."""

    manifest = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self, largest, form=None, kv_dtype=torch.float32):
        super().__init__(layers=3, largest=largest, kv_dtype=kv_dtype)
        self._form = form

    def chunk_bytes(self, chunk_tokens):
        return record_bytes(self.kv_shape(1, chunk_tokens), self.kv_dtype, self._form)


def every_next_token_of(largest):
    def every_next_token(tokens):
        """Computes `fake_engine.next_token` for every beginning of the context at once: tokens [1,
        n]."""
        at = torch.arange(tokens.shape[1])
        sums = sum(
            ((tokens[0] * 31 + at * 17 + layer * 7) % largest).cumsum(0) for layer in range(3)
        )
        return SimpleNamespace(
            logits=torch.nn.functional.one_hot(sums % VOCAB, VOCAB).float().unsqueeze(0)
        )

    return every_next_token


@pytest.mark.parametrize("disturbed", [False, True], ids=["", "disturbed"])
def test_replies_are_right_where_codes_are_exact(disturbed):
    """Every reply is that of its whole context, also with swaps and late copies."""
    chatter = Chatter(
        SumsEngine(16, FP8),
        every_next_token_of(16),
        22,
        disturbed=disturbed,
        host_form=FP8,
        gpu_kv_chunks=27,
    )
    chatter.run(60, events=("gpu", "host", "recomputed", "dropped"))


def test_replies_are_right_from_a_disk_of_codes(tmp_path):
    """Records go to the disk as HOST has them, and outlive the process."""
    disk = DiskSettings(tmp_path, 80, "ab")
    pools = dict(gpu_kv_chunks=27, host_kv_chunks=14, disk_kv_chunks=80)
    chatter = Chatter(
        SumsEngine(16, FP8), every_next_token_of(16), 3, host_form=FP8, disk=disk, **pools
    )
    assert chatter.run(60, restarts=2, events=["disk"])["restarted"] == 2


# Whole conversations with a form whose copies sometimes fail.


def failing_form_chatter(seed, **settings):
    settings = dict(host_form=FAILING_FORM, copies_may_fail=True, gpu_kv_chunks=27) | settings
    return Chatter(SumsEngine(61, FAILING_FORM), every_next_token_of(61), seed, **settings)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("disturbed", [False, True], ids=["", "disturbed"])
def test_no_reply_is_from_a_copy_that_is_none(disturbed, seed):
    chatter = failing_form_chatter(seed, disturbed=disturbed)
    chatter.run(60, events=["host"], also=lambda: chatter.scheduler.stats().bad_copies > 20)
    assert chatter.scheduler.stats().bad_copies > 20


@pytest.mark.parametrize("save", SAVE_MODES)
def test_a_failed_copy_is_not_used_from_its_record_on_disk(tmp_path, save):
    disk = DiskSettings(tmp_path, 80, "ab")
    pools = dict(gpu_kv_chunks=27, host_kv_chunks=14, disk_kv_chunks=80)
    chatter = failing_form_chatter(5, disk=disk, save=save, **pools)
    assert chatter.run(60, restarts=2, events=["disk"])["restarted"] == 2


# One conversation, when they are not.

CHUNK = 8
HISTORY = [(31 * at + 7) % 160 for at in range(6 * CHUNK)]
QUESTION = [5, 60, 110]


def displace(player: Player) -> None:
    """Other contexts take the whole GPU."""
    for number in range(3):
        player.play(player.request([(number * 53 + 3 * at) % 160 for at in range(100)], 2))


def greedy(
    engine: TinyEngine, pool: torch.Tensor, start: int, history: list[int], count: int
) -> list[int]:
    """Generates `count` tokens after the known ones; those from `start` on are computed into the
    pool."""
    handle = register_pool(pool)
    table = torch.arange(len(pool)).view(1, -1)
    context = start
    tokens = list(history)
    for _ in range(count):
        new = torch.tensor(tokens[context:])
        piece = SeatSpan(0, context, len(tokens))
        batch = batch_of([piece], new, table, torch.tensor([len(new) - 1]), CHUNK)
        logits = engine.forward(batch, handle)
        context = len(tokens)
        tokens.append(int(logits.argmax()))
    release_pool(handle)
    return tokens[len(history) :]


def test_a_reloaded_conversation_goes_on_from_its_codes():
    """A GPU hit is exact. A reload gives the results of computing with coded chunks, and so does
    the next reload."""
    engine = TinyEngine("llama")
    prompt = [*HISTORY, *QUESTION]
    pool = torch.zeros(engine.kv_shape(12, CHUNK))
    exact = greedy(engine, pool, 0, prompt, 20)
    chunks = len(HISTORY) // CHUNK
    pool[:chunks] = decode(encode(pool[:chunks]), pool.shape, pool.dtype)
    from_codes = greedy(engine, pool, len(HISTORY), prompt, 20)
    assert from_codes != exact

    with Player(
        engine,
        host_form=FP8,
        gpu_kv_chunks=16,
        max_model_len=110,
        max_num_seqs=1,
        generation_reserve=0.0,
    ) as player:
        player.play(player.request(HISTORY, 2))
        (hit,) = player.play(player.request(prompt, 20))
        assert hit.tokens == exact and hit.usage.gpu == len(HISTORY)
        for _ in range(2):
            displace(player)
            (reloaded,) = player.play(player.request(prompt, 20))
            assert reloaded.usage.host == len(HISTORY) and reloaded.tokens == from_codes
        assert player.executor._device._pools[Tier.HOST].dtype == torch.uint8


def from_gpu_and_host(tmp_path, engine, form):
    """HOST chunks, as a multiple, and replies of a server that keeps KV there as it is, and in that
    form: computed, from the GPU, and twice from HOST."""
    options = ("--gpu-kv-chunks", 20, "--host-kv-bytes", "32MiB", "--max-model-len", 400)
    body = dict(
        prompt=list(range(40, 140)),
        max_tokens=40,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )

    def reply(server):
        return server.post("/v1/completions", **body).json()["choices"][0]["token_ids"]

    slots, replies = {}, {}
    for mode in ("same", form):
        with Server(tmp_path, *options, "--lower-tier-kv", mode, engine=engine) as server:
            replies[mode] = [reply(server), reply(server)]
            for _ in range(2):
                for number in range(4):
                    other = [50 + number, *range(60, 400)]
                    server.post("/v1/completions", prompt=other, max_tokens=2, ignore_eos=True)
                before = server.metric('pensieve:prompt_tokens_total{source="host"}')
                replies[mode].append(reply(server))
                assert server.metric('pensieve:prompt_tokens_total{source="host"}') - before == 96
            states = (
                f'pensieve:kv_slots{{state="{state}",tier="host"}}'
                for state in ("free", "copy", "idle")
            )
            slots[mode] = sum(server.metrics(*states))
            assert server.metric("pensieve:kv_failed_copies_total") == 0
    return {mode: slots[mode] / slots["same"] for mode in slots}, replies


@pytest.mark.slow
def test_a_server_with_half_the_bytes(tmp_path):
    """Twice the chunks and more in as many bytes; a reply from the GPU's cache is exact, reloaded
    ones are equal."""
    slots, replies = from_gpu_and_host(tmp_path, "demo", "fp8")
    assert slots["fp8"] >= 3.9, "the demo engine's own are of 32 bits"
    exact = replies["same"][0]
    assert all(one == exact for one in (*replies["same"], *replies["fp8"][:2]))
    assert replies["fp8"][2] == replies["fp8"][3]


@pytest.mark.slow
def test_a_server_that_packs_is_exact(tmp_path):
    """More chunks in as many bytes, and every reply is that of a server that does not pack."""
    build_engine(DEMO_CHECKPOINT, tmp_path / "demo", dtype="bfloat16")
    slots, replies = from_gpu_and_host(tmp_path, tmp_path / "demo", "packed")
    assert 1.2 < slots["packed"] < 1.3
    assert all(one == replies["same"][0] for one in (*replies["same"], *replies["packed"]))
