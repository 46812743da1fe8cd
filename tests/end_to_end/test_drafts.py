"""Replies with drafts equal replies without, while KV is swapped, dropped and reloaded; a step
gives several tokens."""

from __future__ import annotations

import random

import pytest
import torch

from pensieve.builder.build import build_engine
from pensieve.runtime.disk.store import DiskSettings
from pensieve.runtime.engine import open_engine
from pensieve.runtime.llm import LLM, SamplingParams
from pensieve.scheduler.types import FinishReason, Sampling
from tests.models import SHAPE, tiny_checkpoint
from tests.scheduler.draft_policy import always_draft, decide_by_chance

from .chatter import TIGHT, Chatter
from .player import Player

DRAFTS = dict(speculate="lookup", max_num_seqs=40)  # seats beyond the rows leave room for drafts
WEAKER = {"llama": 0.004, "qwen3-windows": 0.02, "opt": 0.15}
WEAKENED = (
    "o_proj.weight",
    "down_proj.weight",
    "out_proj.weight",
    "fc2.weight",
    "embed_positions.weight",
)
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CHECKED = ("drafted", "accepted")
SAMPLED = Sampling(temperature=0.4, top_p=0.9, seed=11)
BIASED = Sampling(temperature=0.4, seed=5, logit_bias=((7, 3.0), (9, -5.0)))


@pytest.fixture(scope="module", params=list(WEAKER))
def model(request, tmp_path_factory):
    """(engine, reference). The next token depends mostly on the last one, so replies repeat
    themselves."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp(request.param)
    reference = tiny_checkpoint(request.param, directory / "checkpoint")
    for name, parameter in reference.named_parameters():
        if name.endswith(WEAKENED):
            parameter.mul_(WEAKER[request.param])
    reference.save_pretrained(directory / "checkpoint")
    build_engine(directory / "checkpoint", directory / "engine")
    return open_engine(directory / "engine"), reference


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Drafts are checked however long a step takes here."""
    always_draft(monkeypatch)


@pytest.mark.parametrize("disturbed", [False, True], ids=["", "disturbed"])
@pytest.mark.parametrize("batching", ["unified", "separate"])
def test_replies_are_those_of_transformers(model, batching, disturbed):
    chatter = Chatter(
        *model,
        3 + disturbed,
        batching=batching,
        disturbed=disturbed,
        gpu_kv_chunks=29,
        **TIGHT,
        **DRAFTS,
    )
    chatter.run(
        24,
        events=(
            "gpu",
            "host",
            "recomputed",
            "suspended",
            "dropped",
            "branched",
            "forked",
            *CHECKED,
        ),
    )


@pytest.mark.parametrize("overflow", ["keep", "recompute"])
def test_replies_of_contexts_that_overflow(model, overflow):
    if model[0].manifest.decoder.rotary is None and overflow == "keep":
        pytest.skip("needs rotary positions")
    sizes = dict(
        max_model_len=64, longest=260, gpu_kv_chunks=17, host_kv_chunks=24, openings=(40, 55, 60)
    )
    chatter = Chatter(*model, 1, overflow=overflow, longest_reply=40, **sizes, **DRAFTS)
    chatter.run(16, events=("overflowed", *CHECKED))


def test_replies_with_a_disk_and_restarts(model, tmp_path):
    disk = DiskSettings(tmp_path, 60, "ab")
    sizes = dict(gpu_kv_chunks=29, host_kv_chunks=10, disk_kv_chunks=60, longest_reply=40)
    Chatter(*model, 4, disk=disk, **sizes, **DRAFTS).run(24, restarts=2, events=("disk", *CHECKED))


def prompts():
    chosen = random.Random(2)
    phrase = [chosen.randrange(SHAPE["vocab_size"]) for _ in range(9)]
    return [
        [chosen.randrange(SHAPE["vocab_size"]) for _ in range(6)] + phrase * times
        for times in (3, 4, 2, 5)
    ]


@pytest.mark.parametrize(
    "sampling", [Sampling(), SAMPLED, BIASED], ids=["greedy", "sampled", "biased"]
)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("seed", [None, 1, 2], ids=["always", "by chance 1", "by chance 2"])
def test_tokens_are_those_without_drafts(model, sampling, together, seed, monkeypatch):
    """Stop ids, the least and the largest number of tokens count as ever. Which steps wait, draft
    and leave rows out does not matter."""
    if seed is not None:
        decide_by_chance(monkeypatch, seed)
    heard = {}
    for speculate in ("off", "lookup"):
        with Player(model[0], speculate=speculate, max_num_seqs=40) as player:
            stops = frozenset({SHAPE["eos_token_id"], 17, 40, 80})
            requests = [
                player.request(
                    prompt, 60 + number, sampling=sampling, min_tokens=25, stop_ids=stops
                )
                for number, prompt in enumerate(prompts())
            ]
            plays = (
                [player.play(*requests)]
                if together
                else [player.play(request) for request in requests]
            )
            heard[speculate] = [
                (one.tokens, one.finish, one.usage) for play in plays for one in play
            ]
            stats = player.scheduler.stats()
            assert (
                bool(stats.drafted) == (speculate == "lookup") and stats.accepted <= stats.drafted
            )
    assert heard["lookup"] == heard["off"]


def test_a_repeated_text_has_several_tokens_a_step(model):
    steps = {}
    for speculate in ("off", "lookup"):
        with Player(model[0], speculate=speculate) as player:
            (heard,) = player.play(player.request(prompts()[0], 100))
            assert len(heard.tokens) == 100 and heard.finish is FinishReason.LENGTH
            stats, steps[speculate] = player.scheduler.stats(), player.steps
    assert stats.accepted > stats.drafts, "more than one draft a check comes true"
    assert steps["lookup"] < 0.8 * steps["off"]


@pytest.mark.parametrize("kind", ["logprobs", "penalty"])
def test_replies_that_are_not_drafted(model, kind):
    sampling = Sampling(logprobs=2) if kind == "logprobs" else Sampling(frequency_penalty=0.1)
    with Player(model[0], speculate="lookup") as player:
        player.play(player.request(prompts()[0], 60, sampling=sampling))
        assert not player.scheduler.stats().drafted


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_the_offline_api_streams_several_tokens_and_ends_at_stop_strings(
    tmp_path_factory, monkeypatch, device
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    prompt = "one two three four five six seven eight " * 4
    replies = {}
    for speculate in ("off", "lookup"):
        with LLM(
            "demo", device=device, speculate=speculate, gpu_kv_bytes="64MiB", host_kv_bytes="64MiB"
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
            lengths = [len(output.outputs[0].token_ids) for output in llm.stream(prompt, params)]
            (whole,) = llm.generate(prompt, params)
            text = whole.outputs[0].text
            (cut,) = llm.generate(
                prompt, SamplingParams(temperature=0, max_tokens=80, stop=[text[30:36]])
            )
            replies[speculate] = (
                text,
                cut.outputs[0].text,
                cut.outputs[0].token_ids,
                cut.outputs[0].finish_reason,
            )
            grown = max(b - a for a, b in zip([0, *lengths], lengths, strict=False))
            assert lengths[-1] == 80 and (grown > 1) == (speculate == "lookup")
    assert replies["off"] == replies["lookup"]
