"""Parity: the contents of the batches, and that an engine with wrong results is refused."""

import pytest
import torch

from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.model import Decoder
from pensieve.builder.parity import LEAST_BOUND, SEATS, check_parity, random_batches
from pensieve.builder.random_weights import random_weights
from pensieve.scheduler.types import SettingError

from .checkpoints.test_architectures import LLAMA

CONFIG = decoder_config(LLAMA | {"num_key_value_heads": 2})


def decoder(dtype):
    weights = random_weights(CONFIG, dtype, "cpu", 0)
    return Decoder.from_weights(CONFIG, weights), weights


def test_the_batches_hold_all_that_serving_brings():
    batches = random_batches(CONFIG, "cpu")
    seen = set()
    for batch in batches:
        assert (
            len(batch.token_ids)
            == len(batch.positions)
            == len(batch.slots)
            == int(batch.segments[:, 1].sum())
        )
        written = batch.slots[batch.slots >= 0]
        assert len(set(written.tolist())) == len(written)
        seats = batch.segments[:, 4].tolist()
        first = (batch.segments[:, 3] == batch.segments[:, 1]).any()
        facts = {
            "one token alone": len(batch.token_ids) == 1,
            "generation": (batch.segments[:, 1] == 1).any(),
            "a prompt": first,
            "a new turn": (
                (batch.segments[:, 1] > 1) & (batch.segments[:, 3] > batch.segments[:, 1])
            ).any(),
            "several segments of a seat": len(set(seats)) < len(seats),
            "all seats": len(set(seats)) == SEATS,
            "suppressed writes": (batch.slots < 0).any(),
            "nothing sampled": not len(batch.sample_rows),
        }
        seen |= {fact for fact, true in facts.items() if true}
    assert len(seen) == 8


def test_the_reference_is_as_good_as_itself():
    forward, weights = decoder(torch.bfloat16)
    parity = check_parity(forward, CONFIG, weights)
    assert parity.logits == parity.logits_eager and parity.kv == parity.kv_eager
    assert 1e-3 < parity.logits < 0.1
    forward, weights = decoder(torch.float32)
    assert check_parity(forward, CONFIG, weights).logits == 0.0


def wrong_logits(forward, by):
    return lambda *arguments: by(forward(*arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "by",
    [
        lambda logits: logits * 1.1,
        lambda logits: logits + 0.1 * torch.randn_like(logits),
        lambda logits: logits.roll(1, 0) if len(logits) > 50 else logits,  # of some batches only
        lambda logits: logits * float("nan"),
    ],
    ids=["scaled", "noise", "rows", "nan"],
)
def test_wrong_logits_are_refused(dtype, by):
    forward, weights = decoder(dtype)
    with pytest.raises(
        SettingError, match=r"--backend.*logits are off by .* use --backend reference"
    ):
        check_parity(wrong_logits(forward, by), CONFIG, weights)


def test_wrong_kv_is_refused_though_the_logits_are_right():
    """Keys and values of positions that no later step reads."""
    forward, weights = decoder(torch.float32)
    other = Decoder.from_weights(CONFIG, {name: tensor * 1.01 for name, tensor in weights.items()})

    def wrong(*arguments):
        logits = forward(*arguments)
        if not len(arguments[0].sample_rows):
            other(*arguments)
        return logits

    with pytest.raises(SettingError, match="are off by"):
        check_parity(wrong, CONFIG, weights)


def test_twice_the_error_of_the_reference_is_allowed_and_no_more():
    forward, weights = decoder(torch.bfloat16)
    exact = Decoder.from_weights(CONFIG, {name: tensor.float() for name, tensor in weights.items()})
    own = check_parity(forward, CONFIG, weights).logits_eager
    assert own > 10 * LEAST_BOUND
    assert exact is not forward
    with pytest.raises(SettingError, match=f"{own:.1e}"):
        check_parity(wrong_logits(forward, lambda logits: logits * (1 + 3 * own)), CONFIG, weights)
