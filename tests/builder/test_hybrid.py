"""Qwen3.5: log probabilities of transformers' models for any division into pieces, with states
carried through slots."""

import json
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5TextConfig,
)

from pensieve.builder.build import build_engine, build_random_engine
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.config import FULL, LINEAR, DecoderConfig, Shard
from pensieve.builder.checkpoints.hugging_face import parameter_shapes, read_json
from pensieve.builder.manifest import Manifest
from pensieve.builder.parity import SeatSpan, whole_weights
from pensieve.builder.random_weights import random_weights
from pensieve.builder.states import state_shape
from pensieve.plugins.collectives.protocol import (
    TENSOR_PARALLEL,
    ThreadRanks,
    register_group,
    release_group,
)
from pensieve.plugins.state.pool import StatePool
from pensieve.runtime.engine import Engine, open_engine
from pensieve.scheduler.types import SettingError
from tests.compiled import needs_compiler
from tests.models import (
    QWEN3_5_MOE_SHAPE,
    QWEN3_5_SHAPE,
    ScatteredRunner,
    save_random,
    tiny_config,
)

ZERO = NOT_KEPT = -1
SLOTS = 8  # of states
LENGTHS = (190, 131)
OF_IMAGES_SHAPE = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


class Served:
    """A tiny model of transformers, its engine, two prompts, and their log probabilities."""

    def __init__(self, directory, config):
        self.model = save_random(config, directory / "checkpoint", gain=1.0)
        build_engine(directory / "checkpoint", directory / "engine")
        self.engine = open_engine(directory / "engine")
        torch.manual_seed(2)
        self.prompts = [torch.randint(3, config.vocab_size, (length,)) for length in LENGTHS]
        self.expected = [self.of_transformers(prompt) for prompt in self.prompts]

    def of_transformers(self, prompt: Tensor) -> Tensor:
        return log_probabilities(self.model(prompt.unsqueeze(0)).logits[0])

    def runner(self) -> ScatteredRunner:
        """All slots of KV and states are full of NaN."""
        states = new_states(self.engine)
        runner = ScatteredRunner(
            self.engine.forward, self.engine.kv_shape(128, 4), self.prompts, torch.float32, states
        )
        runner.states = states
        return runner


def new_states(engine: Engine) -> StatePool:
    assert engine.state_shape is not None
    records = torch.full((SLOTS, engine.state_shape.nbytes), 0xFF, dtype=torch.uint8)
    return StatePool(records, engine.state_shape)


def log_probabilities(logits: Tensor) -> Tensor:
    return logits.log_softmax(dim=-1)


def span(seat: int, start: int, end: int, before: int, behind: int) -> SeatSpan:
    return SeatSpan(seat, start, end, start, before, behind)


def check(served: Served, runner: ScatteredRunner, seat: int = 0, first: int = 0) -> None:
    """Compares a seat's positions from `first` on that were computed."""
    positions = [position for position in sorted(runner.logits[seat]) if position >= first]
    ours = log_probabilities(torch.stack([runner.logits[seat][p] for p in positions]))
    torch.testing.assert_close(ours, served.expected[seat][positions], atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return Served(tmp_path_factory.mktemp("hybrid"), Qwen3_5TextConfig(**QWEN3_5_SHAPE))


@pytest.fixture(scope="module", params=["qwen3-5-moe", "qwen3-next"])
def mixture(request, tmp_path_factory):
    """A model with experts, a shared one among them. Qwen3-Next's projections are fused by head."""
    return Served(tmp_path_factory.mktemp(request.param), tiny_config(request.param))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 190])
def test_a_whole_prompt(served, length):
    runner = served.runner()
    runner.step(span(0, 0, length, ZERO, NOT_KEPT))
    check(served, runner)


@pytest.mark.parametrize("cuts", [[1], [63], [64], [65], [100], [1, 63, 64, 65, 100]])
def test_a_prompt_in_pieces(served, cuts):
    runner = served.runner()
    before = ZERO
    for start, end in pairwise([0, *cuts, 190]):
        runner.step(span(0, start, end, before, 3))
        before = 3
    check(served, runner)


def test_a_mixture_of_experts(mixture):
    decoder = mixture.engine.manifest.decoder
    assert (decoder.experts, decoder.shared_expert_size) == (8, 48)
    runner = mixture.runner()
    runner.step(span(0, 0, 120, ZERO, 0))
    runner.step(span(1, 0, 50, ZERO, 1), span(0, 120, 121, 0, 0))
    runner.step(span(0, 121, 122, 0, 6), span(1, 50, 131, 1, 1))
    runner.step(span(0, 122, 190, 6, NOT_KEPT))
    check(mixture, runner, 0)
    check(mixture, runner, 1)


def test_generation_step_by_step_in_its_own_slot(served):
    runner = served.runner()
    runner.step(span(0, 0, 60, ZERO, 5))
    for position in range(60, 190):
        runner.step(span(0, position, position + 1, 5, 5))
    check(served, runner)


def test_generation_from_the_first_token_on_in_changing_slots(served):
    runner = served.runner()
    before = ZERO
    for position in range(70):
        behind = position % SLOTS
        runner.step(span(0, position, position + 1, before, behind))
        before = behind
    check(served, runner)


def test_two_rows_of_unlike_lengths_in_one_step(served):
    runner = served.runner()
    runner.step(span(0, 0, 120, ZERO, 0))
    runner.step(span(1, 0, 50, ZERO, 1), span(0, 120, 121, 0, 0))
    runner.step(span(0, 121, 122, 0, 6), span(1, 50, 131, 1, 1))
    runner.step(span(0, 122, 190, 6, NOT_KEPT))
    check(served, runner, 0)
    check(served, runner, 1)


def test_a_kept_state_is_not_changed_by_the_row_that_goes_on(served):
    """A checkpoint is written to a fresh slot, and read again later."""
    runner = served.runner()
    runner.step(span(0, 0, 64, ZERO, 7))
    kept = [part[7].clone() for part in (*runner.states.matrices, *runner.states.columns)]
    runner.step(span(0, 64, 101, 7, 2))
    runner.step(span(0, 101, 102, 2, 2))
    now = [part[7] for part in (*runner.states.matrices, *runner.states.columns)]
    assert all(map(torch.equal, kept, now))
    runner.logits[0].clear()
    runner.step(span(0, 64, 190, 7, 2))
    check(served, runner)


def test_a_moved_record_goes_on_with_the_same_bits(served):
    runner = served.runner()
    runner.step(span(0, 0, 100, ZERO, 1))
    records = [(part[4], part[1]) for part in (*runner.states.matrices, *runner.states.columns)]
    for target, source in records:
        target.copy_(source)
    runner.step(span(0, 100, 190, 1, NOT_KEPT))
    stayed = dict(runner.logits[0])
    runner.step(span(0, 100, 190, 4, NOT_KEPT))
    assert all(torch.equal(stayed[p], runner.logits[0][p]) for p in range(100, 190))


def test_a_leading_hole_is_recomputed_from_zeros_and_the_context_goes_on_from_its_end(served):
    """The positions between the hole and the kept state are not computed again."""
    runner = served.runner()
    runner.step(span(0, 0, 128, ZERO, 1))
    for block in range(10):
        runner.drop(0, block)
    runner.logits[0].clear()
    runner.step(span(0, 0, 40, ZERO, NOT_KEPT), span(0, 128, 190, 1, 1))
    check(served, runner)


def test_random_divisions(served):
    dice = random.Random(3)
    for _ in range(4):
        runner = served.runner()
        done, slots = [0, 0], [ZERO, ZERO]
        free = list(range(SLOTS))
        while done != list(LENGTHS):
            pieces = []
            for seat in dice.sample((0, 1), dice.randint(1, 2)):
                if done[seat] == LENGTHS[seat]:
                    continue
                end = min(done[seat] + dice.choice((1, 1, 2, 17, 64, 80)), LENGTHS[seat])
                behind = slots[seat]
                if behind < 0 or dice.random() < 0.5:
                    behind = free.pop(dice.randrange(len(free)))
                    free += [slots[seat]] if slots[seat] >= 0 else []
                pieces.append(span(seat, done[seat], end, slots[seat], behind))
                done[seat], slots[seat] = end, behind
            if pieces:
                runner.step(*pieces)
        check(served, runner, 0)
        check(served, runner, 1)


@pytest.mark.parametrize(
    "wrong", ["zero state", "stale slot", "last token twice", "another row's state"]
)
def test_a_wrong_state_is_noticed(served, wrong):
    """These tests would fail with an engine that makes this mistake."""
    runner = served.runner()
    runner.step(span(0, 0, 99, ZERO, 1), span(1, 0, 100, ZERO, 4))
    runner.step(span(0, 99, 100, 1, 2))
    before = {"zero state": ZERO, "stale slot": 1, "another row's state": 4}.get(wrong, 2)
    start = 99 if wrong == "last token twice" else 100
    runner.step(span(0, start, 190, before, NOT_KEPT))
    with pytest.raises(AssertionError, match="not close"):
        check(served, runner, first=100)


def test_heads_of_256_dimensions(tmp_path):
    config = Qwen3_5TextConfig(**QWEN3_5_SHAPE | {"head_dim": 256}, tie_word_embeddings=True)
    served = Served(tmp_path, config)
    assert served.engine.manifest.decoder.rotary.dims == 64
    runner = served.runner()
    runner.step(span(0, 0, 70, ZERO, 1), span(1, 0, 131, ZERO, 0))
    runner.step(span(0, 70, 190, 1, 1))
    check(served, runner, 0)
    check(served, runner, 1)


def test_the_text_part_of_a_model_of_images(tmp_path):
    """The checkpoint has the names, and the layers for images and further tokens, of published
    ones."""
    config = Qwen3_5Config(
        text_config=QWEN3_5_SHAPE,
        vision_config=OF_IMAGES_SHAPE,
    )
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(config).float().eval().requires_grad_(False)
    checkpoint = tmp_path / "checkpoint"
    model.save_pretrained(checkpoint)
    (path,) = checkpoint.glob("*.safetensors")
    tensors = load_file(path)
    assert any(name.startswith("model.visual.") for name in tensors)
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2, 2)}, path, {"format": "pt"})
    built = build_engine(checkpoint, tmp_path / "engine")
    assert built.manifest.decoder.architecture == "Qwen3_5ForCausalLM"
    engine = open_engine(tmp_path / "engine")
    prompt = torch.randint(3, 160, (90,))
    runner = ScatteredRunner(
        engine.forward, engine.kv_shape(64, 4), [prompt], torch.float32, new_states(engine)
    )
    runner.step(span(0, 0, 90, ZERO, NOT_KEPT))
    expected = log_probabilities(model(prompt.unsqueeze(0)).logits[0])
    ours = log_probabilities(runner.all_logits(0))
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def test_the_text_part_of_a_mixture_whose_experts_are_one_tensor(tmp_path):
    """As in published checkpoints; transformers saves a tensor for each expert."""
    config = Qwen3_5MoeConfig(text_config=QWEN3_5_MOE_SHAPE, vision_config=OF_IMAGES_SHAPE)
    torch.manual_seed(0)
    model = Qwen3_5MoeForConditionalGeneration(config).float().eval().requires_grad_(False)
    checkpoint = tmp_path / "checkpoint"
    model.save_pretrained(checkpoint)
    (path,) = checkpoint.glob("*.safetensors")
    apart = load_file(path)
    tensors = {name: x for name, x in apart.items() if ".mlp.experts." not in name}
    assert len(tensors) == len(apart) - 4 * 3 * 8
    for layer, module in enumerate(model.model.language_model.layers):
        stem = f"model.language_model.layers.{layer}.mlp.experts"
        tensors[f"{stem}.gate_up_proj"] = module.mlp.experts.gate_up_proj.clone()
        tensors[f"{stem}.down_proj"] = module.mlp.experts.down_proj.clone()
    build_engine(checkpoint, tmp_path / "apart")
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2, 2)}, path, {"format": "pt"})
    fused, separate = (
        build_engine(checkpoint, tmp_path / name).manifest for name in ("fused", "apart")
    )
    assert fused.decoder.architecture == "Qwen3_5MoeForCausalLM"
    assert fused.parts.weights == separate.parts.weights
    engine = open_engine(tmp_path / "fused")
    prompt = torch.randint(3, 160, (90,))
    runner = ScatteredRunner(
        engine.forward, engine.kv_shape(64, 4), [prompt], torch.float32, new_states(engine)
    )
    runner.step(span(0, 0, 90, ZERO, NOT_KEPT))
    expected = log_probabilities(model(prompt.unsqueeze(0)).logits[0])
    ours = log_probabilities(runner.all_logits(0))
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3-5", "qwen3-5-moe", "qwen3-next"])
def test_two_ranks_are_one_rank(kind, tmp_path):
    """Each rank has its part of a state: half of its matrices and of its convolution's columns."""
    one = Served(tmp_path, tiny_config(kind))
    build_engine(tmp_path / "checkpoint", tmp_path / "two", tensor_parallel=2)
    engines = [open_engine(tmp_path / "two", rank=rank) for rank in range(2)]
    whole = one.engine.state_shape
    for engine in engines:
        assert 2 * engine.state_shape.matrix_bytes == whole.matrix_bytes
        assert 2 * engine.state_shape.column_bytes == whole.column_bytes

    def run(rank: int) -> list[Tensor]:
        states = new_states(engines[rank])
        runner = ScatteredRunner(
            engines[rank].forward,
            engines[rank].kv_shape(128, 4),
            one.prompts,
            torch.float32,
            states,
        )
        runner.step(span(0, 0, 120, ZERO, 0))
        runner.step(span(1, 0, 64, ZERO, 1), span(0, 120, 121, 0, 0))
        runner.step(span(0, 121, 190, 0, NOT_KEPT), span(1, 64, 131, 1, 1))
        return [log_probabilities(runner.all_logits(seat)) for seat in range(2)]

    group = ThreadRanks(2)
    register_group(TENSOR_PARALLEL, group)
    try:
        first, second = group.run(run)
    finally:
        release_group(TENSOR_PARALLEL)
    for seat in range(2):
        assert torch.equal(first[seat], second[seat])
        torch.testing.assert_close(first[seat], one.expected[seat], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3-5", "qwen3-5-moe"])
def test_ranks_of_a_random_engine_hold_its_parts(kind, tmp_path):
    path = tmp_path / "config.json"
    name = {"qwen3-5": "Qwen3_5ForCausalLM", "qwen3-5-moe": "Qwen3_5MoeForCausalLM"}[kind]
    path.write_text(json.dumps(tiny_config(kind).to_dict() | {"architectures": [name]}))
    config = decoder_config(read_json(path))
    parts = [random_weights(config, torch.float32, "cpu", 3, rank, 2) for rank in range(2)]
    joined = whole_weights(config, parts)
    for name, tensor in random_weights(config, torch.float32, "cpu", 3).items():
        assert torch.equal(joined[name], tensor)


def test_ranks_that_cannot_share_the_heads_are_refused():
    with pytest.raises(SettingError, match=r"2 key heads of linear attention.*only among 1 or 2$"):
        Shard(decoder_config(tiny_config("qwen3-5").to_dict() | NAMED), 4)


def test_bfloat16_keeps_matrices_and_decays_in_float32(tmp_path, served):
    save_random(Qwen3_5TextConfig(**QWEN3_5_SHAPE), tmp_path / "checkpoint", gain=1.0)
    build_engine(tmp_path / "checkpoint", tmp_path / "engine", dtype="bfloat16")
    engine = open_engine(tmp_path / "engine")
    weights = load_file(tmp_path / "engine" / "weights.safetensors")
    in_float32 = {name for name, tensor in weights.items() if tensor.dtype == torch.float32}
    assert {name.rpartition(".")[2] for name in in_float32} == {"a_log", "dt_bias"}
    states = new_states(engine)
    assert states.matrices[0].dtype == torch.float32 and states.columns[0].dtype == torch.bfloat16
    kv_shape = engine.kv_shape(64, 4)
    runner = ScatteredRunner(engine.forward, kv_shape, served.prompts[:1], engine.dtype, states)
    runner.step(span(0, 0, 100, ZERO, 1))
    runner.step(span(0, 100, 190, 1, 1))
    error = log_probabilities(runner.all_logits(0)) - served.expected[0]
    assert error.abs().mean() < 0.03


def test_random_weights_have_states_that_matter(tmp_path):
    """An engine from a config.json alone: finite results, and the state of 100 tokens before is
    noticed."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(Qwen3_5TextConfig(**QWEN3_5_SHAPE).to_dict() | NAMED))
    build_random_engine(path, tmp_path / "engine")
    engine = open_engine(tmp_path / "engine")
    assert Manifest.read(tmp_path / "engine") == engine.manifest
    assert engine.manifest.decoder == decoder_config(json.loads(path.read_text()))
    prompt = torch.randint(3, 160, (200,))
    runner = ScatteredRunner(
        engine.forward, engine.kv_shape(64, 4), [prompt], torch.float32, new_states(engine)
    )
    runner.step(span(0, 0, 100, ZERO, 1))
    runner.step(span(0, 100, 200, 1, NOT_KEPT))
    right = log_probabilities(runner.all_logits(0))
    assert right.isfinite().all()
    runner.step(span(0, 100, 200, ZERO, NOT_KEPT))
    assert (log_probabilities(runner.all_logits(0)) - right)[199].abs().max() > 0.01


NAMED = {"architectures": ["Qwen3_5ForCausalLM"]}
SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
OF_9B = read_json(SHAPES / "qwen3.5-9b.json")
OF_IMAGES = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}


def of_text(**changes) -> DecoderConfig:
    return decoder_config(OF_9B | changes)


@pytest.mark.parametrize(
    ("name", "weights_gib", "matrix_mib", "column_kib", "state_mib"),
    [
        ("qwen3.5-9b", 16.7, 2, 48, 49.1),
        ("qwen3.5-27b", 50.1, 3, 60, 146.8),
        ("qwen3.5-35b-a3b", 64.6, 2, 48, 61.4),
        ("qwen3-next-80b-a3b", 148.4, 2, 48, 73.7),
    ],
)
def test_sizes_of_published_models(name, weights_gib, matrix_mib, column_kib, state_mib):
    decoder = decoder_config(read_json(SHAPES / f"{name}.json"))
    parameters = sum(torch.Size(shape).numel() for shape in parameter_shapes(decoder).values())
    assert round(parameters * 2 / 2**30, 1) == weights_gib
    shape = state_shape(Shard(decoder), torch.bfloat16)
    assert shape.matrix_bytes == matrix_mib * 2**20 and shape.column_bytes == column_kib * 2**10
    assert round(shape.nbytes / 2**20, 1) == state_mib


def test_the_layers_of_9b():
    decoder = of_text()
    assert decoder == decoder_config({"text_config": OF_9B} | OF_IMAGES)
    assert decoder.kinds == (LINEAR, LINEAR, LINEAR, FULL) * 8
    assert (decoder.linear_layers, decoder.kv_layers) == (24, 8)
    assert [decoder.place(layer) for layer in (0, 3, 4, 7, 30, 31)] == [0, 0, 3, 1, 23, 7]
    assert decoder.rotary.dims == 64 and decoder.rotary.theta == 1e7
    assert decoder.gated_attention and decoder.norm_plus_one and not decoder.windows


@pytest.mark.parametrize("whole", [None, False, True])
@pytest.mark.parametrize("text", [None, False, True])
def test_whether_the_head_is_tied_is_the_whole_models_setting_if_it_has_one(whole, text):
    """As in transformers, which asks the text's part of no model of images. A checkpoint without
    the setting outside says it there."""
    name = "tie_word_embeddings"
    inner = {key: value for key, value in OF_9B.items() if key != name}
    inner |= {} if text is None else {name: text}
    outer = OF_IMAGES | ({} if whole is None else {name: whole})
    decoder = decoder_config({"text_config": inner} | outer)
    assert decoder.tied_embeddings == (whole if whole is not None else bool(text))


def test_random_weights_of_the_text_part_with_other_settings(tmp_path):
    path = tmp_path / "config.json"
    text = Qwen3_5TextConfig(**QWEN3_5_SHAPE).to_dict()
    path.write_text(json.dumps(OF_IMAGES | {"text_config": text}))
    build_random_engine(path, tmp_path / "engine", {"vocab_size": 96})
    decoder = open_engine(tmp_path / "engine").manifest.decoder
    assert decoder == decoder_config(text | NAMED | {"vocab_size": 96})
    with pytest.raises(SettingError, match="vision_size: nothing of"):
        build_random_engine(path, tmp_path / "other", {"vision_size": 1})


def test_a_kv_pool_has_only_the_layers_with_attention(served):
    assert served.engine.kv_shape(5, 4) == (5, 1, 2, 2, 4, 32)
    assert served.engine.manifest.layers == 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["linear_attention"] * 32}, "without full_attention"),
        ({"layer_types": ["full_attention", "chunked_attention"] * 16}, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 layers"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24 is no multiple"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be at least 2"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype 'bfloat16': only float32"),
        ({"partial_rotary_factor": 1.5, "rope_parameters": {}}, "partial_rotary_factor 1.5"),
        ({"model_type": "qwen3"}, "model_type 'qwen3' contradicts"),
    ],
)
def test_other_settings_are_refused_by_name(changes, named):
    with pytest.raises(SettingError, match=named):
        of_text(**changes)


def test_layers_without_linear_attention_have_no_states():
    decoder = of_text(layer_types=["full_attention"] * 32)
    assert decoder.linear is None and decoder.kinds == () and decoder.kv_layers == 32
    assert state_shape(Shard(decoder), torch.bfloat16) is None


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        pytest.param({"backend": "inductor"}, "--backend", marks=needs_compiler),
        ({"weights": "fp8"}, "--weights"),
        ({"weights": "int4"}, "--weights"),
    ],
)
def test_what_is_not_supported_yet_is_refused_before_anything_is_built(options, setting, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(Qwen3_5TextConfig(**QWEN3_5_SHAPE).to_dict() | NAMED))
    with pytest.raises(SettingError, match="linear attention") as refused:
        build_random_engine(path, tmp_path / "engine", **options)
    assert refused.value.setting == setting
    assert not (tmp_path / "engine").exists()


def test_a_checkpoint_without_a_tensor_of_states_is_refused(tmp_path):
    save_random(Qwen3_5TextConfig(**QWEN3_5_SHAPE), tmp_path / "checkpoint")
    (path,) = (tmp_path / "checkpoint").glob("*.safetensors")
    tensors = load_file(path)
    del tensors["model.layers.1.linear_attn.dt_bias"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(SettingError, match=r"missing tensors.*layers\.1\.linear_attn\.dt_bias"):
        build_engine(tmp_path / "checkpoint", tmp_path / "engine")


def test_fused_rows_that_do_not_fit_are_refused(tmp_path):
    save_random(tiny_config("qwen3-next"), tmp_path / "checkpoint")
    (path,) = (tmp_path / "checkpoint").glob("*.safetensors")
    tensors = load_file(path)
    name = "model.layers.1.linear_attn.in_proj_ba.weight"
    tensors[name] = tensors[name][:7].clone()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(SettingError, match=rf"{name} has the shape \[7, 64\].*for \[8, 64\]"):
        build_engine(tmp_path / "checkpoint", tmp_path / "engine")


DELTA = "model.layers.1.linear_attn"
EXPERTS = "model.layers.2.mlp.experts"
NEXT = (f"{DELTA}.in_proj_qkvz.weight", f"{DELTA}.in_proj_ba.weight")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("qwen3-5", [f"{DELTA}.{x}.weight" for x in ("in_proj_qkv", "in_proj_z", "conv1d")]),
        ("qwen3-5-moe", [f"{DELTA}.in_proj_qkv.weight", f"{EXPERTS}.gate_up_proj"]),
        ("qwen3-5-moe", [f"{EXPERTS}.down_proj", "model.layers.0.mlp.shared_expert_gate.weight"]),
        ("qwen3-next", [*NEXT, f"{EXPERTS}.3.up_proj.weight"]),
    ],
)
@pytest.mark.parametrize("damage", ["missing", "misshapen", "unexpected"])
def test_damaged_tensors_are_named_as_in_the_checkpoint(kind, names, damage, tmp_path):
    """Each error names one tensor, or the missing or unexpected ones of one, its file, and a
    cure."""
    checkpoint = tmp_path / "checkpoint"
    save_random(tiny_config(kind), checkpoint)
    (path,) = checkpoint.glob("*.safetensors")
    whole = load_file(path)
    if kind == "qwen3-5-moe":
        whole = with_fused_experts(whole)
    for name in names:
        tensors = dict(whole)
        if damage == "missing":
            del tensors[name]
            error = f"missing tensors for [^ ]*: {name}; download the checkpoint again"
        elif damage == "misshapen":
            tensors[name] = tensors[name][..., :-1].contiguous()
            error = f"tensor {name} has the shape .* in {path.name}; .*: take the config.json"
        else:
            other = re.sub(r"layers\.\d+", "layers.99", name)
            tensors[other] = tensors[name].clone()
            error = f"unexpected tensors for [^ ]*: {other} in {path.name}; take the config.json"
        save_file(tensors, path, {"format": "pt"})
        with pytest.raises(SettingError, match=error):
            build_engine(checkpoint, tmp_path / "engine")


def with_fused_experts(tensors):
    """As published checkpoints of Qwen3.5 have them."""
    stems = {name.split(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}
    fused = {name: x for name, x in tensors.items() if ".experts." not in name}
    for stem in sorted(stems):
        gate, up, down = (
            torch.stack([tensors[f"{stem}.{expert}.{part}_proj.weight"] for expert in range(8)])
            for part in ("gate", "up", "down")
        )
        fused[f"{stem}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        fused[f"{stem}.down_proj"] = down
    return fused


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4 weights of"),
    ],
)
def test_quantised_checkpoints_are_refused_by_name(settings, named, tmp_path):
    save_random(tiny_config("qwen3-5"), tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "config.json"
    path.write_text(json.dumps(read_json(path) | {"quantization_config": settings}))
    with pytest.raises(SettingError, match=named) as refused:
        build_engine(tmp_path / "checkpoint", tmp_path / "engine")
    assert refused.value.setting == "--checkpoint"
