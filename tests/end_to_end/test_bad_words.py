"""Words that a reply must not contain: equal to a slow twin with any state of the cache and the
batch."""

from __future__ import annotations

import json
import random

import pytest
import torch

from pensieve.builder.build import build_engine
from pensieve.runtime.engine import open_engine
from pensieve.runtime.step.grammar import Grammars, json_grammar
from pensieve.scheduler.types import Sampling
from tests.models import SHAPE, tiny_checkpoint
from tests.scheduler.draft_policy import always_draft

from .player import Player
from .test_drafts import WEAKENED, WEAKER, prompts
from .test_sampling import TINY_POOL, ascii_tokenizer

VOCAB, EOS = SHAPE["vocab_size"], SHAPE["eos_token_id"]
WORDS = ["aa", "ab", "abc", "ba", "q", "{", "xy", "yx", "zz"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(engine, reference). Its replies repeat themselves, so drafts of them come true."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("llama")
    reference = tiny_checkpoint("llama", directory / "checkpoint")
    for name, parameter in reference.named_parameters():
        if name.endswith(WEAKENED):
            parameter.mul_(WEAKER["llama"])
    reference.save_pretrained(directory / "checkpoint")
    build_engine(directory / "checkpoint", directory / "engine")
    return open_engine(directory / "engine"), reference


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    ascii_tokenizer().save(str(directory / "tokenizer.json"))
    return Grammars(directory, VOCAB, (EOS,))


@torch.inference_mode()
def twin(reference, tokens, count, bad_words, logit_bias=()):
    """Greedy tokens, one by one; a word's last token is masked behind the others."""
    reply = []
    for _ in range(count):
        logits = reference(torch.tensor([[*tokens, *reply]])).logits[0, -1]
        for token, bias in logit_bias:
            logits[token] += bias
        for *before, last in bad_words:
            if reply[len(reply) - len(before) :] == before:
                logits[last] = -torch.inf
        reply.append(int(logits.argmax()))
    return reply


def forbidden_in(reply, bad_words):
    """The words that the reply contains."""
    return [
        word
        for word in bad_words
        if any(tuple(reply[at : at + len(word)]) == word for at in range(len(reply)))
    ]


def words_of(reply, seed):
    """Words of one, two, three and five tokens that this reply contains, and one that it does
    not."""
    chosen = random.Random(seed)
    starts = [chosen.randrange(len(reply) - 5) for _ in range(3)]
    words = [tuple(reply[at : at + size]) for at, size in zip(starts, (2, 3, 5), strict=True)]
    return (*words, (reply[7],), (VOCAB - 1, VOCAB - 2))


@pytest.fixture(scope="module")
def cases(model):
    """(prompt, sampling, the twin's reply)."""
    engine, reference = model
    triples = []
    with Player(engine) as player:
        for at, tokens in enumerate(prompts() * 2):
            (plain,) = player.play(player.request(tokens, 60))
            bias = ((plain.tokens[8], 2.0), (9, -5.0))
            words = words_of(plain.tokens, at)
            if at % 4 == 3:
                words = words[3:4]  # one token: forbidden at any place
            wanted = twin(reference, tokens, 60, words, bias)
            assert forbidden_in(plain.tokens, words) and wanted != plain.tokens
            assert not forbidden_in(wanted, words)
            triples.append((tokens, Sampling(bad_words=words, logit_bias=bias), wanted))
    return triples


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(max_num_seqs=16),
        TINY_POOL,
        dict(TINY_POOL, host_kv_chunks=0),
        dict(speculate="lookup", max_num_seqs=40),
        dict(TINY_POOL, speculate="lookup", max_num_seqs=40),
    ],
    ids=["plain", "together", "swapped", "recomputed", "drafts", "drafts and swapped"],
)
def test_replies_are_those_of_the_twin(model, cases, settings, monkeypatch):
    always_draft(monkeypatch)
    with Player(model[0], **settings) as player:
        requests = [player.request(tokens, 60, sampling=sampling) for tokens, sampling, _ in cases]
        heard = player.play(*requests)
        stats = player.scheduler.stats()
    assert [one.tokens for one in heard] == [wanted for _, _, wanted in cases]
    assert (stats.suspensions > 0) == (settings.get("gpu_kv_chunks", 200) < 100)
    assert (stats.drafted > 0) == ("speculate" in settings), "words of one token are drafted"


def test_words_count_at_any_temperature_and_beside_min_tokens(model):
    words = ((7,), (8, 8), (9, 9), (8, 9, 8))
    likely = ((7, 60.0), (8, 50.0), (9, 50.0), (EOS, 70.0))
    with Player(model[0]) as player:
        requests = [
            player.request(
                [1, 2, 3],
                40,
                sampling=Sampling(1.0, seed=seed, logit_bias=likely, bad_words=words),
                stop_ids=frozenset({EOS}),
                min_tokens=39,
            )
            for seed in range(6)
        ]
        heard = player.play(*requests)
    assert all(len(one.tokens) == 40 and one.tokens[-1] == EOS for one in heard)
    assert not any(forbidden_in(one.tokens, words) for one in heard)
    assert all({8, 9} < set(one.tokens) for one in heard)


@pytest.mark.parametrize("settings", [dict(), TINY_POOL], ids=["plain", "swapped"])
def test_a_reply_has_neither_bad_words_nor_breaks_its_grammar(model, grammars, settings):
    """A word that the grammar demands is written."""
    tokenizer = ascii_tokenizer()
    ids = {word: tuple(tokenizer.encode(word).ids) for word in WORDS}
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string", "pattern": "^[abcqxyz]{30}$"}},
        "required": ["text"],
        "additionalProperties": False,
    }
    sampling = [
        Sampling(1.5, seed=seed, grammar=json_grammar(schema), bad_words=tuple(ids.values()))
        for seed in range(6)
    ]
    with Player(model[0], grammars, **settings) as player:
        heard = player.play(
            *(
                player.request([5, 6, seed], 80, sampling=how, stop_ids=frozenset({EOS}))
                for seed, how in enumerate(sampling)
            )
        )
    for one in heard:
        text = json.loads(tokenizer.decode(one.tokens))["text"]
        assert len(text) == 30 and not [word for word in WORDS if word in text]
