"""Options of `pensieve serve`, from flags and from a file with the same names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pensieve.runtime.device import Memory
from pensieve.scheduler.types import SettingError
from pensieve.scripts.serve import make_device, scheduler_config
from pensieve.scripts.serve_http import http_settings
from pensieve.scripts.serve_options import parse_options


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "serve.toml"
        path.write_text(text)
        return path

    return write


def options(path, *flags):
    return parse_options(["--config", str(path), *flags])


def test_the_file_has_the_names_of_the_flags_with_dashes_or_underscores(file):
    path = file(
        """
        engine = "demo"                         # a comment
        port = 9000
        max-num-seqs = 8
        swap_out_below = 0.5
        served_model_name = ["one", "two"]
        state-dir = "somewhere"
        reuse = false
        gpu-kv-bytes = "1GiB"
        """
    )
    read = options(path)
    assert (read.engine, read.port, read.max_num_seqs, read.swap_out_below) == ("demo", 9000, 8, 0.5)
    assert (read.served_model_name, read.state_dir, read.reuse) == (["one", "two"], Path("somewhere"), False)
    assert (read.gpu_kv_bytes, read.max_queue) == ("1GiB", 1024)


def test_flags_override_the_file(file):
    path = file('engine = "demo"\nport = 9000\nno-reuse = true\nserved-model-name = "one"\ngpu-kv-bytes = "1GiB"')
    read = options(path, "--port", "9001", "--reuse", "--served-model-name", "two", "--gpu-kv-chunks", "7")
    assert (read.port, read.reuse, read.served_model_name) == (9001, True, ["two"])
    assert (read.gpu_kv_chunks, read.gpu_kv_bytes) == (7, None), "the other way to say the same is overridden too"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq = 8", "'max_num_seq'; did you mean max-num-seqs?"),
        ("[http]\nport = 1", "no option 'http'"),
        ("zzz = 1", "no option 'zzz'$"),
        ("config = 'other.toml'", "no option 'config'"),
        ("help = true", "no option 'help'"),
        ("reuse = 'no'", "reuse takes true or false"),
        ("port = [1]", "port takes one value"),
        ("port = true", "port takes one value"),
        ("served-model-name = []", "a value, or a list of them"),
        ("host = 1979-05-27", "host takes one value"),
        ("port =", "is not TOML"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong_in_it(file, text, message):
    with pytest.raises(SettingError, match=message) as refused:
        options(file(text), "--engine", "demo")
    assert refused.value.setting == "--config" and "serve.toml" in str(refused.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SettingError, match=r"cannot read .*nowhere"):
        options(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("text", ["port = 'high'", "eviction = 'none'", "gpu-kv-chunks = 1\ngpu-kv-bytes = '1GiB'"])
def test_values_are_checked_as_those_of_flags(file, capsys, text):
    with pytest.raises(SystemExit):
        options(file(text), "--engine", "demo")
    assert "argument --" in capsys.readouterr().err


def test_flags_are_not_abbreviated():
    """Or a file and a command line would not have the same names."""
    with pytest.raises(SystemExit):
        parse_options(["--engine", "demo", "--max-num", "3"])


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        (("--max-requests-per-client", "0"), "--max-requests-per-client"),
        (("--max-body-bytes", "big"), "--max-body-bytes"),
        (("--chat-template", "nowhere.jinja"), "--chat-template"),
        (("--chat-template", __file__ + "/.."), "--chat-template"),
    ],
)
def test_wrong_http_settings_are_named(flags, setting):
    with pytest.raises(SettingError) as refused:
        http_settings(parse_options(["--engine", "demo", *flags]))
    assert refused.value.setting == setting


def test_a_chat_template_is_read_and_checked(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{% for message in messages %}")
    with pytest.raises(SettingError, match="does not parse") as refused:
        http_settings(parse_options(["--engine", "demo", "--chat-template", str(path)]))
    assert refused.value.setting == "--chat-template"
    path.write_text("{{ messages }}")
    assert http_settings(parse_options(["--engine", "demo", "--chat-template", str(path)])).chat_template


GIB = 2**30
DECODER = SimpleNamespace(
    hidden_size=4096, heads=32, kv_heads=8, head_dim=128, gated=True, mlp_size=14336, vocab_size=128256
)
LLAMA_8B = SimpleNamespace(
    dtype=torch.bfloat16,
    weight_bytes=2 * 8_030_261_248,
    chunk_bytes=lambda chunk_tokens: 2 * 32 * 8 * chunk_tokens * 128 * 2,
    kv_shape=lambda slots, chunk_tokens: (slots, 32, 2, 8, chunk_tokens, 128),
    manifest=SimpleNamespace(decoder=DECODER, tensor_parallel=1, max_model_len=131072, fingerprint="00"),
)
H200 = SimpleNamespace(memory=lambda tier: Memory(free=120 * GIB, total=140 * GIB))


def gpu_chunks(*flags):
    args = parse_options(["--engine", "some", "--max-model-len", "8192", *flags])
    return scheduler_config(args, LLAMA_8B, H200).gpu_kv_chunks


def test_a_gpus_kv_is_what_its_memory_leaves_or_as_told():
    """90% of 140 GiB, less 15 GiB of weights, 2 GiB for CUDA and some for activations."""
    chunk = LLAMA_8B.chunk_bytes(32)
    assert 104 < gpu_chunks("--device", "cuda") * chunk / GIB < 108
    assert 90 < gpu_chunks("--device", "cuda", "--gpu-memory-utilization", "0.8") * chunk / GIB < 94
    assert gpu_chunks("--device", "cuda", "--gpu-kv-bytes", "40GiB") == 40 * GIB // chunk
    assert gpu_chunks("--device", "cuda", "--gpu-kv-chunks", "700") == 700
    assert gpu_chunks("--gpu-kv-bytes", "2GiB") == 2 * GIB // chunk
    with pytest.raises(SettingError, match=r"--gpu-memory-utilization: 0\.05 of 140"):
        gpu_chunks("--device", "cuda", "--gpu-memory-utilization", "0.05")


def test_eager_steps_are_a_gpus_own():
    with pytest.raises(SettingError, match=r"--enforce-eager: .* without --device cuda"):
        make_device(parse_options(["--engine", "demo", "--enforce-eager"]))


def test_the_lower_tier_in_eight_bits_holds_twice_the_chunks_and_shares_none_with_the_other():
    configs = [
        scheduler_config(parse_options(["--engine", "some", "--host-kv-bytes", "64GiB", *flags]), LLAMA_8B, H200)
        for flags in ((), ("--lower-tier-kv", "same"), ("--lower-tier-kv", "fp8"))
    ]
    default, same, fp8 = configs
    assert default == same and same.seed != fp8.seed
    assert same.host_kv_chunks == 64 * GIB // LLAMA_8B.chunk_bytes(32)
    assert 1.99 * same.host_kv_chunks < fp8.host_kv_chunks <= 2 * same.host_kv_chunks
    assert same.gpu_kv_chunks == fp8.gpu_kv_chunks
