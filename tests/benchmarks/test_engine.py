"""Batches of the engine benchmarks, and on a GPU that neither weights nor pool are ever there
twice."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import engine as bench_engine
from benchmarks.engine import (
    CHUNK,
    GpuRates,
    RequestPart,
    batch_for,
    batch_of_parts,
    chat_steps,
    slots_of,
)
from pensieve.builder.build import build_random_engine
from pensieve.plugins.attention import cpu as cpu_attention
from pensieve.runtime.engine import open_engine
from pensieve.scheduler.types import SettingError
from tests.models import GEMMA3_SHAPE, QWEN3_MOE_SHAPE, tiny_checkpoint

RATES = GpuRates(bytes_s=4e12, flop_s=1e15)
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 16384,
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 8192,
}


@pytest.mark.parametrize("requests, new, context", [(3, 1, 100), (1, 70, 0), (2, 5, 64)])
def test_each_request_computes_the_end_of_its_context(requests, new, context):
    batch = batch_for(requests, new, 50, context)
    ids, slots, segments, table = batch.token_ids, batch.slots, batch.segments, batch.block_table
    assert len(ids) == len(batch.positions) == len(slots) == requests * new and ids.max() < 50
    assert segments[:, 1].eq(new).all() and segments[:, 3].eq(max(context, new)).all()
    assert table.numel() == table.unique().numel() and table.shape == (
        requests,
        -(-max(context, new) // CHUNK),
    )
    assert slots.unique().numel() == requests * new
    assert batch.sample_rows.tolist() == [new * (i + 1) - 1 for i in range(requests)]


def test_requests_of_different_lengths():
    parts = [RequestPart(1, 40), RequestPart(5, 70, samples=False), RequestPart(3, 3)]
    batch = batch_of_parts(parts, 50)
    assert len(batch.token_ids) == 9 and batch.sample_rows.tolist() == [0, 8]
    assert batch.positions.tolist() == [39, *range(65, 70), *range(3)]
    assert batch.segments.tolist() == [[0, 1, 0, 40, 0], [1, 5, 0, 70, 1], [6, 3, 0, 3, 2]]
    assert slots_of(parts) == 2 + 3 + 1 and batch.block_table.tolist() == [
        [0, 1, 0],
        [2, 3, 4],
        [5, 0, 0],
    ]
    assert batch.slots.tolist() == [
        CHUNK + 7,
        *range(4 * CHUNK + 1, 4 * CHUNK + 6),
        *range(5 * CHUNK, 5 * CHUNK + 3),
    ]


def test_steps_of_chats():
    steps = chat_steps(users=3, turns=2)
    assert steps == chat_steps(users=3, turns=2) != chat_steps(users=3, turns=2, seed=1)
    prompts = [part for step in steps for part in step if part.new > 1]
    assert len(prompts) >= 5 and 1 < max(map(len, steps)) <= 3
    # Each user's text is computed once: a first turn is computed whole, the next one computes its
    # input and one token.
    assert sum(part.new == part.context for part in prompts) == 3
    assert all(part.new < 500 for part in prompts) and any(
        part.context > part.new + 100 for part in prompts
    )


def test_both_engines_run_every_batch_and_the_chats(tmp_path, monkeypatch, capsys):
    """Compiling takes half a minute: here both are the reference's."""
    build = bench_engine.build_engine

    def build_reference(checkpoint, output, backend, dtype):
        build(checkpoint, output, "reference", dtype)

    tiny_checkpoint("llama", tmp_path)
    for name in ("write_kv", "multi_token_attention"):  # put back at the end: their time is taken
        monkeypatch.setattr(cpu_attention, name, getattr(cpu_attention, name))
    monkeypatch.setattr(bench_engine, "build_engine", build_reference)
    monkeypatch.setattr(bench_engine, "BATCHES", {"3 rows": [RequestPart(1, 40)] * 3})
    monkeypatch.setattr(bench_engine, "chat_steps", lambda: chat_steps(users=2, turns=1)[:20])
    assert bench_engine.main(["compare", "--checkpoint", str(tmp_path), "--seconds", "0"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["rows"]
    assert [row["batch"] for row in rows] == ["3 rows", "20 steps of chats"]
    for row in rows:
        assert (
            0 < row["reference"] < row["reference_total"]
            and 0 < row["inductor"] < row["inductor_total"]
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "backend, weights", [("reference", "same"), ("inductor", "same"), ("inductor", "fp8")]
)
def test_weights_and_pool_are_there_once(backend, weights, tmp_path, monkeypatch):
    config = tmp_path / "small.json"
    config.write_text(json.dumps(SHAPE))
    monkeypatch.setattr(bench_engine, "POOL_BYTES", 2**31)
    row = bench_engine.bench_on_gpu(
        config, backend, "bfloat16", weights, [(4, 64)], tmp_path, RATES
    )
    assert row.weight_bytes > 2**28 and row.pool_bytes > 2**30
    assert row.loading_beyond < row.weight_bytes / 2
    assert row.running_beyond < row.pool_bytes / 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "small.json").write_text(json.dumps(SHAPE))
    monkeypatch.setattr(bench_engine, "SHAPES", tmp_path)
    assert bench_engine.main(["gpu", "--shapes", "small", "--backends", "reference"]) == 0
    *_, row, last = capsys.readouterr().out.splitlines()
    assert (
        row.startswith("| small | reference, bfloat16, same |")
        and json.loads(last)["rows"][0]["shape"] == "small"
    )


def test_a_generation_beyond_the_pool_is_refused():
    engine = SimpleNamespace(chunk_bytes=lambda tokens: 2**20 * tokens)  # 640 chunks in the pool
    with pytest.raises(
        SettingError, match=r"^--generation: 640x33 has more KV than the pool of 20 GiB holds"
    ):
        bench_engine.run(engine, [(640, 32), (640, 33)], 0, [])


def test_the_floor_has_the_experts_that_rows_choose(tmp_path):
    """Of 8 experts a row reads 3, and two rows 3 + 3 * 5 / 8."""
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3MoeForCausalLM"]} | QWEN3_MOE_SHAPE)
    )
    build_random_engine(tmp_path / "config.json", tmp_path / "engine")
    engine = open_engine(tmp_path / "engine")
    embedding = 160 * 64  # only rows of it are read
    experts = engine.manifest.layers * 8 * 3 * 64 * 32
    for rows, read in ((1, 3), (2, 3 + 3 * 5 / 8), (1000, 8)):
        size = (
            4 * (engine.parameters - embedding - experts + experts * read / 8)
            + rows * 10 * engine.chunk_bytes(32) // 32
        )
        floor = bench_engine.floor_ms(engine, rows, 10, RATES)
        assert floor == pytest.approx(1e3 * size / RATES.bytes_s)


def test_the_floor_has_the_kv_that_windows_reach(tmp_path):
    """One of two layers has a window of 13 tokens."""
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Gemma3ForCausalLM"]} | GEMMA3_SHAPE)
    )
    build_random_engine(tmp_path / "config.json", tmp_path / "engine")
    engine = open_engine(tmp_path / "engine")
    for context, keys in ((10, 20), (100, 113)):
        size = engine.weight_bytes + 3 * keys * engine.chunk_bytes(32) // 32 // 2
        floor = bench_engine.floor_ms(engine, 3, context, RATES)
        assert floor == pytest.approx(1e3 * size / RATES.bytes_s)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("hybrid")
    tiny_checkpoint("qwen3-5", directory)
    build_random_engine(directory / "config.json", directory / "engine", dtype="float32")
    return open_engine(directory / "engine")


def test_the_floor_has_the_states_of_rows(hybrid):
    """All of them read and written, of a prompt one written. One of four layers has KV."""
    weights = hybrid.weight_bytes - 4 * 160 * 64
    state = hybrid.state_shape.nbytes
    size = weights + 3 * (10 * hybrid.chunk_bytes(32) // 32 + 2 * state)
    assert bench_engine.floor_ms(hybrid, 3, 10, RATES) == pytest.approx(1e3 * size / RATES.bytes_s)
    prompt = 1e3 * (weights + state) / RATES.bytes_s
    fast_products = RATES._replace(flop_s=1e18)
    assert bench_engine.prompt_floor_ms(hybrid, fast_products) == pytest.approx(prompt)
    slow_products = RATES._replace(flop_s=1e3)
    products = 2 * bench_engine.PROMPT * (hybrid.parameters - 2 * 160 * 64)
    assert bench_engine.prompt_floor_ms(hybrid, slow_products) == pytest.approx(products)


def test_steps_change_the_states_of_their_rows(hybrid):
    """A prompt begins at the zero state whenever it runs; a row that generates goes on."""
    pool = torch.zeros(hybrid.kv_shape(6, CHUNK))
    records = bench_engine.state_records(hybrid, 4, "cpu")

    def twice(step):
        return step().clone(), records.clone(), step(), records.clone()

    prompt = bench_engine.step_of(hybrid, pool, 1, 70, records=records)
    logits, state, again, state_again = prompt(twice)
    assert torch.equal(logits, again) and torch.equal(state, state_again)
    assert state[0].any() and not state[1:].any()
    generation = bench_engine.step_of(hybrid, pool, 3, 1, 40, records)
    logits, state, again, state_again = generation(twice)
    assert all(not torch.equal(*pair) for pair in zip(logits, again, strict=True))
    changed = [not torch.equal(*pair) for pair in zip(state, state_again, strict=True)]
    assert changed == [True, True, True, False] and not state[3].any()


@pytest.mark.parametrize("text", ["64", "x32", "0x32", "64x", "axb"])
def test_a_generation_that_is_no_pair_of_numbers_is_refused(text):
    with pytest.raises(
        SettingError, match=r"^--generation: .* is not ROWSxCONTEXT, such as 64x1024"
    ):
        bench_engine.batch(text)
