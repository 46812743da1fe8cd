"""The device reads the packed batch, padded to a size of the list. On the CPU, with the same
code."""

import random
from array import array as packed
from dataclasses import replace

import numpy as np
import pytest
import torch

from pensieve.builder.forward_batch import NOT_WRITTEN, PACKED
from pensieve.plugins.torch_ops import register_pool, release_pool
from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.step.buffers import (
    STAGED_INPUTS,
    Shape,
    Shapes,
    StepBuffers,
    forward_batch,
    place_arrays,
    sampling_arrays,
)
from pensieve.runtime.step.inputs import LAST_SAMPLE, StepPacker
from pensieve.runtime.step.sampler import Sampler
from pensieve.runtime.step.sampling_inputs import Mask
from pensieve.scheduler.types import Sampling, Tier

from ...scheduler.harness import Harness
from ..fake_engine import VOCAB, FakeEngine, join, plan, span

SEATS, BLOCKS, CHUNK = 6, 4, 8

WISHES = (
    Sampling(),
    Sampling(temperature=0.8, seed=7, top_k=5),
    Sampling(temperature=1.5, seed=3, top_p=0.7, repetition_penalty=1.3, presence_penalty=0.5),
    Sampling(logit_bias=((3, 5.0), (90, -2.0)), logprobs=2),
    Sampling(temperature=1.0, seed=1, min_p=0.01, frequency_penalty=0.3, logprobs=4),
)


def mixed_plan(step: int = 1):
    """Five requests, each with other wishes: the first two generate, the others come with
    prompts."""
    prompts = [(3, 1, 4), (1, 5, 9, 2, 6), (5, 3, 5)]
    joins = [
        join(seat, wish)._replace(prompt=(1, 2, 3), reply=(2, 9))
        if wish.penalised
        else join(seat, wish)
        for seat, wish in enumerate(WISHES)
    ]
    return plan(
        step,
        joins=joins,
        blocks=[(seat, 0, (2 * seat, 2 * seat + 1)) for seat in range(5)],
        generate={0: 9, 1: 4},
        spans=[span(seat, 0, len(prompt)) for seat, prompt in enumerate(prompts, start=2)],
        token_ids=[token for prompt in prompts for token in prompt],
    )


def test_sizes_grow_in_steps_and_waste_little():
    shapes = Shapes(1024, 64, 32)
    assert 30 <= sum(not shape.generation for shape in shapes.captured) <= 40
    assert all(shapes.of(rows, rows, generation=True) in shapes.captured for rows in range(1, 65))
    for tokens in range(1, 1025):
        shape = shapes.of(tokens, 1)
        assert tokens <= shape.tokens and shape in shapes.captured
        if tokens >= 256:
            assert shape.tokens <= tokens * 1.25
    assert shapes.of(1024, 64) == Shape(1024, 288, 64) == shapes.captured[-1]
    assert shapes.of(1, 1) == Shape(1, 1, 1)
    assert shapes.of(0, 0) == Shape(1, 1, 1), "a plan without tokens is uploaded too"


def test_batches_beyond_the_list_have_sizes_of_their_own():
    shapes = Shapes(5000, 8, 32)
    assert shapes.most_tokens == 5056 and shapes.captured[-1].tokens == 1024
    assert shapes.of(1025, 3).tokens == 1088
    many_rows = shapes.of(100, 90)
    assert many_rows == Shape(112, 35, 90) and many_rows not in shapes.captured
    few = Shapes(10, 8, 32).captured
    assert [shape.tokens for shape in few if not shape.generation] == [1, 2, 4, 8, 16]
    assert [shape for shape in few if shape.generation] == [
        Shape(n, n, n, True) for n in (1, 2, 4, 8)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_no_step_has_more_segments_than_its_shape(seed):
    """Seats with holes in their history: spans of whole chunks, except the remainder of the
    previous step, a tail's rest, a span that is scored in part, and the last."""
    dice = random.Random(seed)
    seats = 5
    chunk = 8
    segments = tokens = 0
    for _ in range(seats):
        spans = [
            dice.randint(1, 3),
            dice.randint(1, 3),
            *([chunk] * dice.randrange(4)),
            3,
            chunk - 3,
        ]
        spans += [dice.randint(1, 40)] * dice.randrange(2)
        segments = segments + len(spans)
        tokens = tokens + sum(spans)
    assert segments <= Shapes(tokens, seats, chunk).of(tokens, seats).segments


def test_a_step_of_three_holes_in_parts_has_room():
    """The remainder of the previous step, a tail's rest before chunks that another request left,
    and the sample."""
    harness = Harness(
        chunk_tokens=CHUNK, max_num_seqs=1, max_num_batched_tokens=7, max_model_len=96
    )
    harness.turn(range(31), 1, "a")
    longer = [*harness.logs["a"], *range(100, 117)]
    harness.turn(longer, 1)
    chunks = [
        harness.scheduler._store.find(key)
        for key in harness.scheduler.lower.keys(packed("i", longer), b"")
    ]
    harness.place(chunks[1], "dropped")
    harness.place(chunks[3], "dropped")
    harness.submit(longer[:48], 1, "a")
    packer = StepPacker(1, 12, CHUNK)
    buffers = StepBuffers(Shapes(7, 1, CHUNK), "cpu")
    spans = []
    while len(spans) < 4:
        step = harness.launch()
        spans += [(span.start, span.end) for span in step.spans]
        shape = buffers.upload(packer.pack(step))
        harness.apply()
    assert spans == [(8, 15), (15, 16), (31, 32), (47, 48)] and shape == Shape(4, 4, 1)


def test_a_batch_arrives_padded():
    packer = StepPacker(SEATS, BLOCKS, CHUNK)
    shapes = Shapes(64, SEATS, CHUNK)
    buffers = StepBuffers(shapes, "cpu")
    inputs = packer.pack(mixed_plan())
    shape = buffers.upload(inputs)
    assert shape == Shape(16, 16, 6) and len(inputs.token_ids) == 13
    batch = buffers.batch(shape)
    for name in PACKED:
        wanted, got = getattr(inputs, name), getattr(batch, name)
        assert got.dtype == torch.int32 and got[: len(wanted)].tolist() == wanted.tolist(), name
    assert batch.token_ids[:2].tolist() == [LAST_SAMPLE] * 2 and batch.feeds[:3].tolist() == [
        0,
        1,
        0,
    ]
    assert batch.slots[13:].tolist() == [NOT_WRITTEN] * 3
    assert not batch.segments[5:].any() and not batch.token_ids[13:].any()
    assert batch.sharing.tolist() == [[i, 0] for i in range(16)]
    buffers.upload(replace(inputs, sharing=np.array([[1, 0], [0, 1024]], np.int32)))
    assert batch.sharing.tolist() == [[1, 0], [0, 1024]] + [[i, 0] for i in range(2, 16)]
    assert buffers.block_cells.tolist() == inputs.block_cells.tolist()
    assert buffers.block_slots.tolist() == inputs.block_slots.tolist()
    assert buffers.sample_seats.tolist() == inputs.sample_seats.tolist()
    for array in sampling_arrays(inputs.sampling):
        tensor = buffers.place(array)
        assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype

    addresses = [getattr(batch, name).data_ptr() for name in STAGED_INPUTS]
    assert all(address % 16 == 0 for address in addresses)
    buffers.upload(packer.pack(plan(2, generate={0: 10})))
    again = buffers.batch(shape)
    assert [getattr(again, name).data_ptr() for name in STAGED_INPUTS] == addresses, (
        "graphs read where captured"
    )
    assert not buffers.batch(Shape(1, 1, 1)).segments[:, 0].any()


def test_the_forward_pass_gets_last_samples_and_ignores_padding():
    """The same tokens and KV from a padded batch, as a GPU reads it, as from the CPU device."""
    device = CpuDevice()
    other = StepPacker(SEATS, BLOCKS, CHUNK)
    engine = FakeEngine()
    packer = StepPacker(SEATS, BLOCKS, CHUNK)
    shapes = Shapes(64, SEATS, CHUNK)
    buffers = StepBuffers(shapes, "cpu")
    shape = engine.kv_shape(SEATS * BLOCKS, CHUNK)
    device.allocate_pool(Tier.GPU, shape, torch.float32)
    device.allocate_pool(Tier.HOST, (1, *shape[1:]), torch.float32)
    device.load(engine, SEATS, BLOCKS, (), 64)
    pool = torch.zeros(shape)
    handle = register_pool(pool)
    table = torch.zeros(SEATS, BLOCKS, dtype=torch.int32)
    last = torch.zeros(SEATS, dtype=torch.int32)
    prompts = {0: (5, 3, 5, 8, 9, 7, 9), 3: (1, 5, 9)}
    first = plan(
        1,
        joins=[join(seat) for seat in prompts],
        blocks=[(seat, 0, (2 * seat, 2 * seat + 1)) for seat in prompts],
        spans=[span(seat, 0, len(prompt)) for seat, prompt in prompts.items()],
        token_ids=[token for prompt in prompts.values() for token in prompt],
    )
    for step in (first, plan(2, generate={3: 3, 0: 7}), plan(3, generate={0: 8})):
        device.upload(other.pack(step))
        device.run()
        ticket, tokens, _ = device.sample()
        device.synchronize(ticket)
        inputs = packer.pack(step)
        padded = buffers.upload(inputs)
        table.view(-1)[buffers.block_cells] = buffers.block_slots
        batch = forward_batch(buffers.batch(padded), last, table)
        logits = engine.forward(batch, handle)[: len(inputs.sample_rows)]
        last[buffers.sample_seats] = logits.argmax(1).int()
        assert logits.argmax(1).tolist() == tokens.tolist()
    assert torch.equal(pool, device._pools[Tier.GPU]) and pool.any()
    release_pool(handle)
    device.close()


def test_an_idle_batch_writes_and_attends_to_nothing():
    packer = StepPacker(SEATS, BLOCKS, CHUNK)
    buffers = StepBuffers(Shapes(64, SEATS, CHUNK), "cpu")
    buffers.upload(packer.pack(mixed_plan()))
    batch = buffers.idle(Shape(8, 8, 6))
    assert (
        batch.slots.tolist() == [NOT_WRITTEN] * 8
        and not batch.segments.any()
        and not batch.token_ids.any()
    )


def test_the_sampler_reads_from_the_uploaded_buffer():
    """Every wish, and a grammar's mask: the same tokens and scores as from the arrays
    themselves."""
    bits = np.full((1, -(-VOCAB // 32)), 0x0F0F0F0F, np.int32)
    plain, placed = StepPacker(SEATS, BLOCKS, CHUNK), StepPacker(SEATS, BLOCKS, CHUNK)
    buffers = StepBuffers(Shapes(64, SEATS, CHUNK), "cpu")
    samplers = Sampler(VOCAB), Sampler(VOCAB, place=buffers.place)
    for step in range(1, 4):
        batch = (
            mixed_plan() if step == 1 else plan(step, generate=dict.fromkeys(range(5), 10 + step))
        )
        mask = Mask(np.array([1]), bits) if step == 2 else None
        inputs = [packer.pack(batch, mask) for packer in (plain, placed)]
        buffers.upload(inputs[1])
        logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(step)) * 3
        outcomes = []
        for sampler, one in zip(samplers, inputs, strict=True):
            sampler.start(one.sampling.starts)
            outcomes.append(sampler.sample(logits.clone(), one.sampling))
        (tokens, scores), (other_tokens, other_scores) = outcomes
        assert tokens.tolist() == other_tokens.tolist()
        assert all(torch.equal(*pair) for pair in zip(scores, other_scores, strict=True))


def test_arrays_are_aligned_and_do_not_overlap():
    arrays = [
        np.zeros(3, np.int32),
        np.zeros(0),
        np.zeros(5, np.int64),
        np.zeros((2, 3), np.float32),
    ]
    begins, end = place_arrays(arrays, 100)
    assert begins == [112, 128, 128, 176] and end == 200
