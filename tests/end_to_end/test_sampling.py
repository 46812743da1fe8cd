"""Penalties, log probabilities, grammars and choices: equal results with any state of the cache and
the batch."""

from __future__ import annotations

import json
import random
from array import array

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pensieve.builder.build import build_engine
from pensieve.runtime.engine import open_engine
from pensieve.runtime.step.grammar import Grammars, json_grammar
from pensieve.scheduler.types import FinishReason, Sampling
from tests.models import SHAPE, tiny_checkpoint

from .player import Player

VOCAB, EOS = SHAPE["vocab_size"], SHAPE["eos_token_id"]
SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": -50, "maximum": 1000},
        "kind": {"enum": ["cat", "dog", None, 3]},
        "size": {"type": "number", "minimum": 0, "maximum": 9.5, "multipleOf": 0.5},
        "tags": {
            "type": "array",
            "items": {"type": "string", "maxLength": 4},
            "minItems": 1,
            "maxItems": 3,
        },
        "owner": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
                "old": {"type": "boolean"},
            },
            "required": ["name", "old"],
            "additionalProperties": False,
        },
    },
    "required": ["count", "kind", "size", "tags", "owner"],
    "additionalProperties": False,
}
TINY_POOL = dict(gpu_kv_chunks=28, host_kv_chunks=16, disturbed=True)


def check_animal(text: str) -> None:
    """Checks by hand that the text follows SCHEMA."""
    animal = json.loads(text)
    assert list(animal) == ["count", "kind", "size", "tags", "owner"]
    assert type(animal["count"]) is int and -50 <= animal["count"] <= 1000
    assert animal["kind"] in ("cat", "dog", None, 3)
    assert 0 <= animal["size"] <= 9.5 and float(2 * animal["size"]).is_integer()
    assert 1 <= len(animal["tags"]) <= 3 and all(
        type(tag) is str and len(tag) <= 4 for tag in animal["tags"]
    )
    assert list(animal["owner"]) == ["name", "old"] and type(animal["owner"]["old"]) is bool
    name = animal["owner"]["name"]
    assert 1 <= len(name) <= 6 and name.isascii() and name.islower()


def ascii_tokenizer() -> Tokenizer:
    """A token for each printable character and the newline, for the vocabulary of tests.models."""
    signs = ["<s>", "<pad>", "</s>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ"]
    tokenizer = Tokenizer(models.BPE({sign: at for at, sign in enumerate(signs)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>"])
    return tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(engine, reference)."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("llama")
    reference = tiny_checkpoint("llama", directory / "checkpoint")
    build_engine(directory / "checkpoint", directory / "engine")
    return open_engine(directory / "engine"), reference


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    ascii_tokenizer().save(str(directory / "tokenizer.json"))
    return Grammars(directory, VOCAB, (EOS,))


def prompt(seed: int, count: int) -> list[int]:
    return [random.Random(seed * 1000 + at).randrange(VOCAB) for at in range(count)]


@torch.inference_mode()
def reference_logits(reference, tokens) -> np.ndarray:
    return reference(torch.tensor([list(tokens)])).logits[0].double().numpy()


def reference_logprobs(reference, tokens) -> np.ndarray:
    """[position, vocab]: of the next token at each position."""
    logits = reference_logits(reference, tokens)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def check_entries(entries, tokens, logprobs, top):
    """Entries of tokens against the reference's logprobs [token, vocab] at their places."""
    assert len(entries) == len(tokens) == len(logprobs)
    for entry, token, row in zip(entries, tokens, logprobs, strict=True):
        assert entry.logprob == pytest.approx(row[token], abs=2e-4)
        assert (
            abs(entry.rank - 1 - (row > row[token]).sum())
            <= (np.abs(row - row[token]) < 2e-4).sum() - 1
        )
        assert len(entry.top_ids) == len(entry.top_logprobs) == top
        assert np.allclose(entry.top_logprobs, np.sort(row)[::-1][:top], atol=2e-4)
        assert np.allclose(row[list(entry.top_ids)], entry.top_logprobs, atol=2e-4)


# Penalties


def penalised_twin(reference, tokens, count, sampling):
    """Greedy tokens under penalties and bias, as they are defined, one by one."""
    sequence = list(tokens)
    prompt_tokens = set(tokens)
    for _ in range(count):
        logits = reference_logits(reference, sequence)[-1]
        for token, bias in sampling.logit_bias:
            logits[token] += bias
        reply = sequence[len(tokens) :]
        for token in range(VOCAB):
            if token in prompt_tokens or token in reply:
                factor = sampling.repetition_penalty
                logits[token] = (
                    logits[token] / factor if logits[token] > 0 else logits[token] * factor
                )
            logits[token] -= sampling.frequency_penalty * reply.count(token)
            logits[token] -= sampling.presence_penalty * (token in reply)
        sequence.append(int(logits.argmax()))
    return sequence[len(tokens) :]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.5),
        Sampling(presence_penalty=-2.0),
        Sampling(frequency_penalty=-2.0, presence_penalty=-0.5),
        Sampling(repetition_penalty=0.7, frequency_penalty=2.0),
        Sampling(logit_bias=((7, 6.0), (90, -100.0))),
        Sampling(repetition_penalty=1.2, logit_bias=((7, 8.0),), frequency_penalty=0.5),
    ],
)
def test_penalties_are_what_they_are_defined_as(model, sampling):
    engine, reference = model
    tokens = prompt(1, 21)
    with Player(engine) as player:
        (heard,) = player.play(player.request(tokens, 20, sampling=sampling))
        (plain,) = player.play(player.request(tokens, 20))
    assert heard.tokens == penalised_twin(reference, tokens, 20, sampling) != plain.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_are_not_drawn_among_the_first_min_tokens(model, grammars, temperature):
    """Even if the client favours one. A complete grammar still allows only its end."""
    eager = Sampling(
        temperature, seed=1, logit_bias=((EOS, 100.0), (7, 90.0), (9, 60.0)), frequency_penalty=0.1
    )
    done = Sampling(temperature, seed=1, grammar=json_grammar({"enum": [7]}))
    stops = frozenset({EOS, 7})
    with Player(model[0], grammars) as player:
        settings = [(3, eager), (0, eager), (12, eager), (4, done)]
        requests = [
            player.request(prompt(1, 9), 12, sampling=how, stop_ids=stops, min_tokens=least)
            for least, how in settings
        ]
        third, none, never, complete = player.play(*requests)
    assert (third.tokens, third.finish) == ([9, 9, 9, EOS], FinishReason.STOP)
    assert (none.tokens, none.finish) == ([EOS], FinishReason.STOP)
    assert (never.tokens, never.finish) == ([9] * 12, FinishReason.LENGTH)
    assert complete.tokens == [*ascii_tokenizer().encode("7").ids, EOS, EOS, EOS]


# -- equal results in every case


def mixture(player, grammar):
    """Requests of every kind, together more than a small pool holds."""
    kinds = [
        Sampling(),
        Sampling(temperature=1.0, seed=3, repetition_penalty=1.3, logprobs=3),
        Sampling(temperature=0.8, seed=4, frequency_penalty=1.0, min_p=0.02),
        Sampling(temperature=1.0, seed=5, grammar=grammar, logprobs=0),
        Sampling(presence_penalty=1.0, logit_bias=((9, 3.0),), logprobs=1),
        Sampling(temperature=1.0, seed=6, grammar=grammar, frequency_penalty=0.3),
        Sampling(temperature=1.2, top_p=0.9, seed=7),
        Sampling(grammar=grammar),
    ]
    return [
        player.request(
            prompt(at, 20 + 3 * at),
            60,
            sampling=sampling,
            stop_ids=frozenset({EOS}) if sampling.grammar else frozenset(),
            prompt_logprobs=at if at in (2, 3) else None,
        )
        for at, sampling in enumerate(kinds * 2)
    ]


@pytest.fixture(scope="module")
def alone(model, grammars):
    """The outputs of each request of the mixture without other requests."""
    with Player(model[0], grammars) as player:
        return [player.play(request)[0] for request in mixture(player, json_grammar(SCHEMA))]


@pytest.mark.parametrize(
    "settings", [TINY_POOL, dict(TINY_POOL, host_kv_chunks=0), dict(max_num_seqs=16)]
)
def test_suspended_rows_get_the_same_tokens_as_undisturbed_ones(model, grammars, alone, settings):
    with Player(model[0], grammars, **settings) as player:
        together = player.play(*mixture(player, json_grammar(SCHEMA)))
        assert (player.scheduler.stats().suspensions > 3) == (
            settings.get("gpu_kv_chunks", 200) < 100
        )
    for other, own in zip(together, alone, strict=True):
        assert (other.tokens, other.finish) == (own.tokens, own.finish)
        for entries, own_entries in (
            (other.logprobs, own.logprobs),
            (other.prompt_logprobs, own.prompt_logprobs),
        ):
            assert len(entries) == len(own_entries)
            for entry, own_entry in zip(entries, own_entries, strict=True):
                assert entry.logprob == pytest.approx(own_entry.logprob, abs=1e-4)
                assert entry.top_logprobs == pytest.approx(own_entry.top_logprobs, abs=1e-4)


def test_the_mixture_follows_its_grammars(alone):
    tokenizer = ascii_tokenizer()
    for at in (3, 5, 7, 11, 13, 15):
        heard = alone[at]
        if heard.finish is FinishReason.STOP:
            assert heard.tokens[-1] == EOS
            check_animal(tokenizer.decode(heard.tokens))


# Grammars


def test_json_always_validates(model, grammars):
    """From random weights, at every temperature, some with penalties and stop tokens in the way."""
    tokenizer = ascii_tokenizer()
    settings = dict(grammar=json_grammar(SCHEMA))
    with Player(model[0], grammars, max_num_seqs=16, max_num_batched_tokens=64) as player:
        requests = [
            player.request(
                prompt(seed, 10),
                180,
                stop_ids=frozenset({EOS}),
                sampling=Sampling(
                    temperature=seed / 6, seed=seed, frequency_penalty=0.1 * (seed % 3), **settings
                ),
            )
            for seed in range(16)
        ]
        texts = [(heard.finish, tokenizer.decode(heard.tokens)) for heard in player.play(*requests)]
    for finish, text in texts:
        assert finish is FinishReason.STOP
        check_animal(text)
    assert len({text for _, text in texts}) > 10


def test_a_complete_reply_goes_on_with_nothing_but_its_end(model, grammars):
    """If the end is ignored (ignore_eos, min_tokens), it repeats."""
    sampling = Sampling(temperature=1.0, grammar=json_grammar({"enum": [7]}))
    with Player(model[0], grammars) as player:
        (heard,) = player.play(player.request(prompt(1, 9), 6, sampling=sampling))
    assert heard.tokens == [*ascii_tokenizer().encode("7").ids, *[EOS] * 5]


# Log probabilities


def test_logprobs_are_those_of_the_model_itself(model):
    """They are those of the raw distribution: temperature, penalties and bias do not change
    them."""
    engine, reference = model
    tokens = prompt(2, 30)
    samplings = [
        Sampling(logprobs=5),
        Sampling(temperature=1.5, seed=2, logprobs=20),
        Sampling(
            temperature=0.5,
            seed=3,
            top_k=5,
            repetition_penalty=1.4,
            logit_bias=((3, 50.0),),
            logprobs=0,
        ),
    ]
    with Player(engine) as player:
        results = player.play(
            *(player.request(tokens, 12, sampling=sampling) for sampling in samplings)
        )
    for sampling, heard in zip(samplings, results, strict=True):
        logprobs = reference_logprobs(reference, [*tokens, *heard.tokens])[len(tokens) - 1 : -1]
        check_entries(heard.logprobs, heard.tokens, logprobs, sampling.logprobs)


@pytest.mark.parametrize("length", [1, 2, 8, 33, 64, 150])
def test_prompt_logprobs_cached_and_not_are_those_of_the_model(model, length):
    engine, reference = model
    tokens = prompt(3, length)
    with Player(engine) as player:
        ask = dict(prompt_logprobs=2, sampling=Sampling(logprobs=2))
        (cold,) = player.play(player.request(tokens, 5, conversation="c", **ask))
        (cached,) = player.play(player.request(tokens, 5, conversation="c", **ask))
        (plain,) = player.play(player.request(tokens, 5, conversation="c"))
        (longer,) = player.play(
            player.request([*tokens, *cold.tokens, 5], 5, conversation="c", **ask)
        )
    logprobs = reference_logprobs(reference, tokens)[:-1]
    for heard in (cold, cached):
        check_entries(heard.prompt_logprobs, tokens[1:], logprobs, 2)
        assert heard.usage.cached == 0
    assert cached.tokens == cold.tokens == plain.tokens
    assert (
        cached.usage.recomputed >= length // 8 * 8
        and plain.usage.cached >= length - 1 - (length - 1) % 8
    )
    longer_tokens = [*tokens, *cold.tokens, 5]
    check_entries(
        longer.prompt_logprobs,
        longer_tokens[1:],
        reference_logprobs(reference, longer_tokens)[:-1],
        2,
    )


def test_prompt_logprobs_of_a_prompt_whose_last_piece_is_one_token(model):
    """Nothing is scored in the last step of the prompt, which has a sample."""
    engine, reference = model
    tokens = prompt(3, 33)
    with Player(engine, max_num_batched_tokens=32) as player:
        ask = dict(prompt_logprobs=2, sampling=Sampling(logprobs=2))
        (heard,) = player.play(player.request(tokens, 5, **ask))
    logprobs = reference_logprobs(reference, [*tokens, *heard.tokens])[:-1]
    check_entries(heard.prompt_logprobs, tokens[1:], logprobs[:32], 2)
    check_entries(heard.logprobs, heard.tokens, logprobs[32:], 2)


def test_prompt_logprobs_over_holes_and_suspensions(model):
    """Histories in a pool that holds two of them: parts are cached, on the host, dropped; pieces
    are computed again."""
    engine, reference = model
    with Player(engine, **TINY_POOL, max_num_seqs=4) as player:
        histories = [prompt(10 + at, 90) for at in range(4)]
        for turn in range(3):
            requests = [
                player.request(
                    history, 9, conversation=str(at), prompt_logprobs=1 if (turn + at) % 2 else None
                )
                for at, history in enumerate(histories)
            ]
            for request, heard in zip(requests, player.play(*requests), strict=True):
                if request.prompt_logprobs:
                    tokens = request.prompt.tolist()
                    logprobs = reference_logprobs(reference, tokens)[:-1]
                    check_entries(heard.prompt_logprobs, tokens[1:], logprobs, 1)
                history = histories[int(request.conversation)]
                history += [*heard.tokens, 1, 2, 3]
        stats = player.scheduler.stats()
        assert stats.swapped_in and stats.dropped


# Choices


def test_choices_share_the_prompt(model):
    """The prompt is computed once; the others find it. Greedy ones are equal, seeded ones
    differ."""
    tokens = prompt(4, 80)
    with Player(model[0]) as player:
        requests = [player.request(tokens, 10, choice=choice) for choice in range(4)]
        greedy = player.play(*requests)
        assert len({tuple(heard.tokens) for heard in greedy}) == 1
        assert greedy[0].usage.new == 80
        assert [heard.usage.cached for heard in greedy[1:]] == [79] * 3
        seeded = [
            player.request(
                tokens, 10, choice=choice, sampling=Sampling(temperature=1.0, seed=choice)
            )
            for choice in range(4)
        ]
        assert len({tuple(heard.tokens) for heard in player.play(*seeded)}) == 4


def test_choices_of_a_conversation_are_branches(model):
    with Player(model[0]) as player:
        names = ["c", None, None]
        requests = [
            player.request(
                prompt(5, 40),
                9,
                conversation=name,
                choice=at,
                sampling=Sampling(temperature=1.0, seed=at),
            )
            for at, name in enumerate(names)
        ]
        first, *_ = player.play(*requests)
        assert player.scheduler.conversations.tokens("c") == array(
            "i", [*prompt(5, 40), *first.tokens]
        )
