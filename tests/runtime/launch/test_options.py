"""Options of `pensieve serve`, from flags and from a file with the same names."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pensieve.plugins.state.pool import StateShape
from pensieve.runtime.device.protocol import Memory
from pensieve.runtime.launch.assemble import demo_engine, locked_directories
from pensieve.runtime.launch.http_options import http_settings
from pensieve.runtime.launch.options import ALIASES, ELSEWHERE, parse_options, parser
from pensieve.runtime.launch.settings import ServeSettings, in_flags
from pensieve.runtime.launch.sizing import (
    check_disk_holds,
    check_overflow,
    disk_settings,
    scheduler_config,
    with_disk_speed,
)
from pensieve.runtime.offline.settings import read_settings
from pensieve.scheduler.config import SPARE_STATES
from pensieve.scheduler.context_window import OVERFLOW_MODES
from pensieve.scheduler.cost_estimate import analytic_profile
from pensieve.scheduler.types import SettingError


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
    assert (read.engine, read.port, read.max_num_seqs, read.swap_out_below) == (
        "demo",
        9000,
        8,
        0.5,
    )
    assert (read.served_model_name, read.state_dir, read.reuse) == (
        ("one", "two"),
        Path("somewhere"),
        False,
    )
    assert (read.gpu_kv_bytes, read.max_queue) == (2**30, 1024)


def test_quotas_are_of_keys(tmp_path):
    with pytest.raises(SettingError, match="--api-key"):
        ServeSettings("demo", owner_kv_bytes=GIB)
    settings = ServeSettings("demo", owner_kv_bytes=GIB, api_key=("one",), state_dir=tmp_path)
    assert http_settings(settings).max_conversations_per_owner is None
    with pytest.raises(SettingError, match="max_conversations_per_owner: must be at least 1"):
        ServeSettings("demo", max_conversations_per_owner=0)


def test_flags_override_the_file(file):
    path = file(
        'engine = "demo"\nport = 9000\nno-reuse = true\nserved-model-name = "one"\ngpu-kv-bytes = '
        '"1GiB"'
    )
    read = options(
        path, "--port", "9001", "--reuse", "--served-model-name", "two", "--gpu-kv-chunks", "7"
    )
    assert (read.port, read.reuse, read.served_model_name) == (9001, True, ("two",))
    assert (read.gpu_kv_chunks, read.gpu_kv_bytes) == (7, None), (
        "the other way to say the same is overridden too"
    )
    path = file('engine = "demo"\ndevice = "cuda"\ngpu-memory-utilization = 0.5')
    assert options(path, "--gpu-kv-chunks", "7").gpu_memory_utilization == 0.9
    assert options(path, "--host-kv-chunks", "7").gpu_memory_utilization == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq = 8", "'max_num_seq'; did you mean max-num-seqs?"),
        ("[http]\nport = 1", "no option 'http'"),
        ("zzz = 1", "no option 'zzz'$"),
        ("swap-in = 'first'", "no option 'swap-in': KV is copied in by groups of layers"),
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


def test_values_are_checked_as_those_of_flags(file, capsys):
    with pytest.raises(SystemExit):
        options(file("port = 'high'"), "--engine", "demo")
    assert "argument --port: invalid int value: 'high'" in capsys.readouterr().err
    for text, error in (
        (
            "eviction = 'fifo-plain'",
            "eviction: must be one of retention, lru, lru-conversation, not 'fifo-plain'",
        ),
        (
            "queue-order = 'response-ratio'",
            "queue_order: must be one of bounded-ratio, arrival, not",
        ),
        ("overflow = 'restart-positions'", "overflow: must be one of keep, recompute, not"),
        ("prefetch = 'yes'", "--prefetch: must be one of on, off, not 'yes'"),
        ("max-body-bytes = 'big'", "--max-body-bytes: 'big' is not a size"),
    ):
        with pytest.raises(SettingError, match=error):
            options(file(text), "--engine", "demo")
    with pytest.raises(
        SettingError, match="--gpu-kv-bytes: cannot be given beside --gpu-kv-chunks"
    ):
        options(file("gpu-kv-chunks = 1\ngpu-kv-bytes = '1GiB'"), "--engine", "demo")


def test_an_engine_is_named_by_a_word_a_flag_or_the_file(file):
    path = file("engine = 'some'")
    assert options(path).engine == "some"
    assert (
        options(path, "--port", "1", "other").engine
        == options(path, "--engine", "other").engine
        == "other"
    )
    assert parse_options(["one", "--engine", "two"]).engine == "two", (
        "the last one counts, as of all options"
    )
    assert parse_options(["--engine", "two", "one"]).engine == "one"
    assert options(file("port = 1")).engine is None


@pytest.mark.parametrize("alias", ALIASES)
def test_other_names_of_an_option_mean_the_same(alias, file):
    ours = ALIASES[alias]
    value = [] if "prefix" in alias else ["some"] if ours == "--engine" else ["64"]
    assert parse_options(["demo", alias, *value]) == parse_options(["demo", ours, *value])
    if value:
        assert parse_options(["demo", f"{alias}={value[0]}"]) == parse_options(
            ["demo", ours, *value]
        )
    with pytest.raises(SettingError, match="there is no option"):
        options(file(f"{alias.strip('-')} = 1"), "demo")


def test_an_alias_overrides_the_rivals_in_the_file(file):
    read = options(file("gpu-kv-chunks = 7"), "demo", "--kv-cache-memory-bytes", "1GiB")
    assert (read.gpu_kv_chunks, read.gpu_kv_bytes) == (None, 2**30)


@pytest.mark.parametrize("theirs", ELSEWHERE)
def test_options_without_an_equal_say_what_to_use(theirs, capsys):
    with pytest.raises(SystemExit) as refused:
        parse_options(["demo", theirs, "1"])
    error = capsys.readouterr().err
    assert (
        refused.value.code == 2
        and error == f"pensieve serve: there is no option {theirs}: {ELSEWHERE[theirs]}\n"
    )
    for word in ELSEWHERE[theirs].split():
        assert not word.startswith("--") or word.partition("=")[0] in parser().format_help()


def test_an_unknown_option_is_one_line_with_the_closest_one(capsys):
    for words, error in (
        (["demo", "--prot", "9000"], "there is no option --prot; did you mean --port?"),
        (["--max-num-seq=3"], "there is no option --max-num-seq; did you mean --max-num-seqs?"),
        (
            ["--tensor-parallel-sise", "2"],
            "there is no option --tensor-parallel-sise; did you mean --tensor-parallel-size?",
        ),
        (
            ["demo", "--cpu-offload-gb", "4"],
            "there is no option --cpu-offload-gb (--help shows what there is)",
        ),
        (
            ["demo", "--max-logprobs", "4"],
            "there is no option --max-logprobs (--help shows what there is)",
        ),
        (
            ["demo", "--max_model_len", "9"],
            "there is no option --max_model_len; did you mean --max-model-len?",
        ),
        (
            ["demo", "--ssl-keyfile=x"],
            "there is no option --ssl-keyfile: put a proxy with TLS before the server",
        ),
        (["demo", "--max_seq_len", "9"], "there is no option --max_seq_len: use --max-model-len"),
        (["demo", "--xyz"], "there is no option --xyz (--help shows what there is)"),
        (["demo", "more"], "'more' is one word too many (--help shows what there is)"),
    ):
        with pytest.raises(SystemExit) as refused:
            parse_options(words)
        assert refused.value.code == 2 and capsys.readouterr().err == f"pensieve serve: {error}\n"


def test_help_shows_what_most_people_need_and_help_all_shows_all(capsys):
    shown = {}
    for word in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            parse_options([word])
        shown[word] = {
            line.split()[0].strip(",")
            for line in capsys.readouterr().out.splitlines()
            if " --" in line[:4]
        }
    assert 12 <= len(shown["--help"]) <= 20
    flags = {action.option_strings[0] for action in parser()._actions if action.option_strings}
    assert shown["--help-all"] == flags - {"--batching", "--link"}


def test_what_only_benchmarks_set_is_read_though_no_help_shows_it():
    read = parse_options(["demo", "--batching", "separate", "--link", "in-first"])
    assert (read.batching, read.link) == ("separate", "in-first")


def test_options_are_checked_before_anything_large_is_imported():
    probe = (
        "import sys; from pensieve.scripts import serve; serve.main(['--prefetch', 'off', "
        "'--save', 'none'])"
    )
    probe = f"import atexit, sys; atexit.register(lambda: print(*sys.modules)); {probe}"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert "argument --save: invalid choice: 'none'" in done.stderr
    assert not {"torch", "numpy", "pydantic", "fastapi"} & set(done.stdout.split())


def test_keys_of_the_command_line_are_added_to_those_of_the_file(file):
    assert options(file("engine = 'some'\napi-key = ['one']"), "--api-key", "two").api_key == (
        "one",
        "two",
    )
    assert parse_options(["--engine", "some"]) == ServeSettings("some")


def test_flags_are_not_abbreviated():
    """Or a file and a command line would not have the same names."""
    with pytest.raises(SystemExit):
        parse_options(["--engine", "demo", "--max-num", "3"])


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (7, 1), (8, 2), (15, 3), (16, 4), (64, 4)])
def test_the_processes_for_clients_follow_the_cores(cores, count, tmp_path, monkeypatch):
    monkeypatch.setattr("pensieve.runtime.launch.http_options.usable_cores", lambda: cores)
    settings = ServeSettings("demo", state_dir=tmp_path)
    assert http_settings(settings).api_server_count == count
    assert http_settings(replace(settings, api_server_count=3)).api_server_count == 3


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
    assert in_flags(refused.value).startswith(f"{setting}: ")


def test_a_chat_template_is_read_and_checked(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{% for message in messages %}")
    with pytest.raises(SettingError, match="does not parse") as refused:
        http_settings(parse_options(["--engine", "demo", "--chat-template", str(path)]))
    assert refused.value.setting == "--chat-template"
    path.write_text("{{ messages }}")
    right = parse_options(
        ["--engine", "demo", "--state-dir", str(tmp_path), "--chat-template", str(path)]
    )
    assert http_settings(right).chat_template


GIB = 2**30
DECODER = SimpleNamespace(
    linear=None,
    architecture="some",
    rotary=object(),
    hidden_size=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    gated=True,
    mlp_size=14336,
    experts=0,
    mlp_bias=False,
    shared_expert_size=0,
    norm_results=False,
    vocab_size=128256,
)
LLAMA_8B = SimpleNamespace(
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    kv_cache_dtype="auto",
    weight_bytes=2 * 8_030_261_248,
    widened_bytes=0,
    state_shape=None,
    chunk_bytes=lambda chunk_tokens: 2 * 32 * 8 * chunk_tokens * 128 * 2,
    kv_shape=lambda slots, chunk_tokens: (slots, 32, 2, 8, chunk_tokens, 128),
    manifest=SimpleNamespace(
        decoder=DECODER, tensor_parallel=1, max_model_len=131072, fingerprint="00"
    ),
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


def test_the_states_of_all_seats_are_taken_from_a_gpus_kv():
    shape = StateShape(24, 32, 128, 128, 3, 8192, torch.bfloat16)
    engine = SimpleNamespace(**vars(LLAMA_8B) | {"state_shape": shape})
    flags = ("--device", "cuda", "--max-model-len", "8192", "--max-num-seqs", "64")
    args = parse_options(["--engine", "some", *flags])
    config = scheduler_config(args, engine, H200)
    chunk = LLAMA_8B.chunk_bytes(32)
    assert config.states.chunks == -(-shape.nbytes // chunk)
    assert config.states.slots == 64 + SPARE_STATES
    states = config.states.slots * config.states.chunks
    assert config.gpu_kv_chunks == gpu_chunks(*flags) - states


def test_states_that_take_a_gpus_kv_are_refused_as_too_many_requests():
    shape = StateShape(24, 32, 128, 128, 3, 8192, torch.bfloat16)
    engine = SimpleNamespace(**vars(LLAMA_8B) | {"state_shape": shape})
    flags = ("--device", "cuda", "--max-model-len", "8192", "--max-num-seqs", "1024")
    gpu = SimpleNamespace(memory=lambda tier: Memory(free=52 * GIB, total=60 * GIB))
    with pytest.raises(SettingError, match=r"^--max-num-seqs: the states of 1024 requests take"):
        scheduler_config(parse_options(["--engine", "some", *flags]), engine, gpu)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_states_take_host_memory_on_a_cpu_only(device):
    shape = StateShape(24, 32, 128, 128, 3, 8192, torch.bfloat16)
    engine = SimpleNamespace(**vars(LLAMA_8B) | {"state_shape": shape})
    flags = ("--gpu-kv-chunks", "100", "--host-kv-bytes", "119GiB", "--max-num-seqs", "64")
    args = parse_options(["--engine", "some", "--device", device, *flags])
    if device == "cpu":
        with pytest.raises(SettingError, match=r"^--host-kv-bytes"):
            scheduler_config(args, engine, H200)
    else:
        assert scheduler_config(args, engine, H200).host_kv_chunks > 0


def test_by_default_a_gpus_host_pool_grows_into_the_machines_memory():
    """0.7 of 140 GiB less the 20 in use, and 16 times the GPU's pool at most."""

    def host_gib(*flags, sharing=1):
        args = parse_options(["--engine", "some", "--max-model-len", "2048", *flags])
        config = scheduler_config(args, LLAMA_8B, H200, sharing)
        chunk = LLAMA_8B.chunk_bytes(32) / GIB
        assert config.host_kv_chunks * chunk == (1 if "1GiB" in flags else 2)
        return config.most_host_kv_chunks * chunk

    cuda = ("--device", "cuda")
    assert host_gib(*cuda) == pytest.approx(78, abs=0.01)
    assert host_gib(*cuda, sharing=4) == pytest.approx(78 / 4, abs=0.01)
    assert host_gib(*cuda, "--gpu-kv-bytes", "3GiB") == 48
    assert host_gib(*cuda, sharing=100) == host_gib() == 2
    assert host_gib(*cuda, "--host-kv-bytes", "1GiB") == 1
    offline = read_settings("demo", None, {"device": "cuda"})
    assert offline.host_grows, "`LLM` itself gives it the size of other devices"


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_the_grace_time_ends(seconds):
    with pytest.raises(SettingError, match="shutdown_timeout: must be at least 0 seconds, not"):
        http_settings(parse_options(["--engine", "demo", f"--shutdown-timeout={seconds}"]))


def test_eager_steps_are_a_gpus_own():
    with pytest.raises(SettingError, match=r"--enforce-eager: .* without --device cuda"):
        ServeSettings("demo", enforce_eager=True)


def test_a_context_that_overflows_is_recomputed_unless_its_kv_shall_be_kept():
    assert parse_options([]).overflow == "recompute"
    assert read_settings("demo", None, {}).overflow == "recompute"
    assert read_settings("demo", None, {"overflow": "keep"}).overflow == "keep"


def test_kv_is_kept_only_where_positions_run_on():
    def manifest(rotary):
        return SimpleNamespace(
            decoder=SimpleNamespace(architecture="OPTForCausalLM", rotary=rotary)
        )

    for mode in OVERFLOW_MODES:
        check_overflow(mode, manifest(object()))
    check_overflow("recompute", manifest(None))
    with pytest.raises(
        SettingError, match="--overflow: keep: OPTForCausalLM has learned positions"
    ):
        check_overflow("keep", manifest(None))


def test_the_lower_tier_in_eight_bits_holds_twice_the_chunks_and_shares_none_with_the_other():
    configs = [
        scheduler_config(
            parse_options(["--engine", "some", "--host-kv-bytes", "64GiB", *flags]), LLAMA_8B, H200
        )
        for flags in ((), ("--lower-tier-kv", "same"), ("--lower-tier-kv", "fp8"))
    ]
    default, same, fp8 = configs
    assert default == same and same.seed != fp8.seed
    assert same.host_kv_chunks == 64 * GIB // LLAMA_8B.chunk_bytes(32)
    assert 1.99 * same.host_kv_chunks < fp8.host_kv_chunks <= 2 * same.host_kv_chunks
    assert same.gpu_kv_chunks == fp8.gpu_kv_chunks


def test_a_gpu_pool_in_eight_bits_holds_nearly_twice_the_chunks_and_shares_none():
    shape = (1, 32, 2, 8, 32, 129)
    fp8 = dict(
        kv_dtype=torch.uint8,
        kv_cache_dtype="fp8",
        chunk_bytes=lambda _: math.prod(shape),
        kv_shape=lambda *_: shape,
    )
    engines = LLAMA_8B, SimpleNamespace(**vars(LLAMA_8B) | fp8)
    tiers = ["--gpu-kv-bytes", "40GiB", "--host-kv-bytes", "64GiB", "--disk-kv-bytes", "90GiB"]
    auto, fp8 = (
        scheduler_config(parse_options(["--engine", "some", *tiers]), engine, H200)
        for engine in engines
    )
    for tier in ("gpu", "host", "disk"):
        before, now = (getattr(config, f"{tier}_kv_chunks") for config in (auto, fp8))
        assert 1.98 * before < now < 1.985 * before
    lower = scheduler_config(
        parse_options(["--engine", "some", "--lower-tier-kv", "fp8"]), LLAMA_8B, H200
    )
    assert len({auto.seed, fp8.seed, lower.seed}) == 3


@pytest.mark.parametrize("lower", ["fp8", "packed"])
def test_kv_in_eight_bits_has_no_other_form_below_the_gpu(lower):
    for kv_cache_dtype in ("fp8", "fp8_e4m3"):
        options = ["--engine", "some", "--kv-cache-dtype", kv_cache_dtype, "--lower-tier-kv"]
        with pytest.raises(
            SettingError,
            match=f"--lower-tier-kv: cannot be given beside --kv-cache-dtype {kv_cache_dtype},",
        ):
            parse_options([*options, lower])
        parse_options([*options, "same"])


def test_packed_kv_is_for_bfloat16_and_counts_only_once_it_is_there():
    def config(engine, *flags):
        options = [
            "--engine",
            "some",
            "--host-kv-bytes",
            "64GiB",
            "--lower-tier-kv",
            "packed",
            *flags,
        ]
        return scheduler_config(parse_options(options), engine, H200)

    same = scheduler_config(
        parse_options(["--engine", "some", "--host-kv-bytes", "64GiB"]), LLAMA_8B, H200
    )
    packed = config(LLAMA_8B)
    assert 1.27 * same.host_kv_chunks < packed.host_kv_chunks < 1.29 * same.host_kv_chunks
    assert packed.copies_may_fail and not same.copies_may_fail and packed.seed != same.seed
    with pytest.raises(
        SettingError, match=r"--lower-tier-kv: packed is for .* bfloat16, and this one's is float16"
    ):
        config(SimpleNamespace(**vars(LLAMA_8B) | dict(dtype=torch.float16)))
    with pytest.raises(SettingError, match=r"--chunk-tokens: packed cannot hold .* 31 x 128"):
        config(LLAMA_8B, "--chunk-tokens", "31")


def test_the_logs_of_conversations_are_limited_by_the_size_of_the_tiers():
    options = [
        "--engine",
        "some",
        "--gpu-kv-chunks",
        "700",
        "--host-kv-chunks",
        "200",
        "--disk-kv-chunks",
        "100",
    ]
    assert scheduler_config(parse_options(options), LLAMA_8B, H200).log_chunks == 32 * 1000


def disk_config(*flags):
    args = parse_options(
        ["--engine", "some", "--gpu-kv-bytes", "40GiB", "--state-dir", "state", *flags]
    )
    config = scheduler_config(args, LLAMA_8B, H200)
    return config, disk_settings(args, config)


def test_the_disk_tier_is_off_unless_it_has_a_size_and_its_limit_counts_headers_too():
    config, disk = disk_config()
    assert config.owner_kv_chunks is None
    assert disk_config("--owner-kv-bytes", "1GiB", "--api-key", "one")[
        0
    ].owner_kv_chunks == GIB // LLAMA_8B.chunk_bytes(32)
    assert (config.disk_kv_chunks, config.save, config.prefetch, disk) == (0, "async", True, None)
    config, disk = disk_config("--disk-kv-bytes", "100GiB", "--save", "sync", "--prefetch", "off")
    assert config.disk_kv_chunks == 100 * GIB // (LLAMA_8B.chunk_bytes(32) + 4096)
    assert (config.save, config.prefetch) == ("sync", False)
    assert (disk.directory, disk.slots) == (Path("state/kv"), config.disk_kv_chunks)
    config, disk = disk_config(
        "--disk-kv-chunks", "7", "--disk-dir", "elsewhere", "--lower-tier-kv", "fp8"
    )
    assert (disk.directory, disk.slots, disk.engine) == (Path("elsewhere"), 7, config.seed.hex())


@pytest.mark.parametrize("tier", ["gpu", "host"])
def test_more_than_there_is_is_refused_before_anything_is_made(tier):
    """A book of slots for a thousand tebibytes would itself be more than there is."""
    for option, size in ((f"--{tier}-kv-bytes", "1000TiB"), (f"--{tier}-kv-chunks", "1000000000")):
        with pytest.raises(SettingError, match=rf"^{option}: .* 120\.00 GiB are free"):
            scheduler_config(parse_options(["--engine", "some", option, size]), LLAMA_8B, H200)


def test_a_size_without_a_unit_is_less_than_a_chunk():
    with pytest.raises(
        SettingError, match=r"^--gpu-kv-bytes: .* one chunk, which takes 4194304 bytes"
    ):
        scheduler_config(
            parse_options(["--engine", "some", "--gpu-kv-bytes", "40"]), LLAMA_8B, H200
        )


def test_a_demo_that_cannot_be_made_is_a_wrong_state_directory(tmp_path):
    (tmp_path / "demo").touch()
    with pytest.raises(SettingError, match=f"^--state-dir: {tmp_path / 'demo'} is a file"):
        demo_engine(tmp_path, "cpu")


def test_the_demo_has_its_name_on_every_device(tmp_path, monkeypatch):
    """Requests name the model, and a server's model has the name of its engine's directory."""
    monkeypatch.setattr(
        "pensieve.runtime.launch.assemble.build_engine",
        lambda *_, **settings: SimpleNamespace(outcome="built"),
    )
    directories = {demo_engine(tmp_path, device) for device in ("cpu", "cuda")}
    assert len(directories) == 2
    assert {directory.name for directory in directories} == {"demo"}


def test_a_disk_does_not_hold_more_than_all_of_it(tmp_path):
    args = parse_options(
        ["--engine", "some", "--disk-kv-bytes", "1000TB", "--disk-dir", str(tmp_path)]
    )
    check_disk_holds(args, 1000, 4096)
    with pytest.raises(
        SettingError, match=r"^--disk-kv-bytes: .* need 17179869184\.0 GiB and the disk of"
    ):
        check_disk_holds(args, 2**51, 4096 - 1)


def test_a_disk_holds_the_records_of_all_ranks_here(tmp_path):
    chunks = shutil.disk_usage(tmp_path).total // 8192 * 3 // 4
    args = parse_options(
        ["--engine", "some", "--disk-kv-chunks", str(chunks), "--disk-dir", str(tmp_path)]
    )
    check_disk_holds(args, chunks, 4096)
    with pytest.raises(SettingError, match=r"^--disk-kv-chunks: "):
        check_disk_holds(args, chunks, 4096, ranks=2)


def test_sizes_are_a_ranks_in_every_tier():
    """Each of two ranks has half of every chunk."""
    flags = [f"--{tier}-kv-bytes=1GiB" for tier in ("gpu", "host", "disk")]
    args = parse_options(["--engine", "some", "--state-dir", "state", *flags])
    half = LLAMA_8B.chunk_bytes(32) // 2
    manifest = SimpleNamespace(**vars(LLAMA_8B.manifest) | {"tensor_parallel": 2})
    parts = dict(
        chunk_bytes=lambda chunk_tokens: LLAMA_8B.chunk_bytes(chunk_tokens) // 2,
        kv_shape=lambda slots, chunk_tokens: (slots, 32, 2, 4, chunk_tokens, 128),
    )
    config = scheduler_config(
        args, SimpleNamespace(**vars(LLAMA_8B) | parts | {"manifest": manifest}), H200
    )
    assert (config.gpu_kv_chunks, config.host_kv_chunks) == (GIB // half, GIB // half)
    assert config.disk_kv_chunks == GIB // (half + 4096)
    for rank in range(2):
        disk = disk_settings(args, config, SimpleNamespace(size=2, rank=rank))
        assert (disk.slots, disk.ranks, disk.rank) == (config.disk_kv_chunks, 2, rank)


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        (("--disk-dir", "elsewhere"), "--disk-dir"),
        (("--disk-kv-bytes", "1KiB"), "--disk-kv-bytes"),
        (("--disk-kv-chunks", "-1"), "--disk-kv-chunks"),
        (("--disk-kv-chunks", "5", "--host-kv-chunks", "0"), "--disk-kv-chunks"),
        (("--disk-kv-bytes", "big"), "--disk-kv-bytes"),
    ],
)
def test_wrong_disk_settings_are_named(flags, setting):
    with pytest.raises(SettingError) as refused:
        disk_config(*flags)
    assert in_flags(refused.value).startswith(f"{setting}: ")


def test_a_server_has_its_directories_for_itself(tmp_path):
    args = parse_options(
        ["--engine", "demo", "--state-dir", str(tmp_path / "a"), "--disk-dir", str(tmp_path / "kv")]
    )
    other = parse_options(
        ["--engine", "demo", "--state-dir", str(tmp_path / "b"), "--disk-dir", str(tmp_path / "kv")]
    )
    with locked_directories(args):
        for second, setting in ((args, "--state-dir"), (other, "--disk-dir")):
            with (
                pytest.raises(SettingError, match="in use by process") as refused,
                locked_directories(second),
            ):
                pass
            assert refused.value.setting == setting
    with locked_directories(other):
        pass


def test_a_disk_directory_in_its_usual_place_is_its_servers_too(tmp_path):
    state = ["--state-dir", str(tmp_path / "a"), "--disk-kv-chunks", "9"]
    disk = ["--disk-dir", str(tmp_path / "a/kv")]
    args = parse_options(["--engine", "demo", *state])
    other = parse_options(
        ["--engine", "demo", "--state-dir", str(tmp_path / "b"), "--disk-kv-chunks", "9", *disk]
    )
    with (
        locked_directories(args),
        pytest.raises(SettingError, match="in use by process"),
        locked_directories(other),
    ):
        pass


def test_one_directory_may_be_both(tmp_path):
    same = str(tmp_path / ".." / tmp_path.name)
    args = parse_options(["--engine", "demo", "--state-dir", str(tmp_path), "--disk-dir", same])
    with locked_directories(args):
        pass


@pytest.mark.parametrize(
    ("flops_per_s", "message"),
    [
        (1e12, "reading 32 tokens pays from "),
        (1e18, "32 tokens never pays, 4096 tokens never pays"),
    ],
)
def test_the_disks_speed_is_measured_and_said(tmp_path, caplog, flops_per_s, message):
    caplog.set_level("INFO")
    cost = analytic_profile(
        chunk_tokens=32,
        parameters=10**9,
        layers=4,
        attention_width=512,
        chunk_bytes=2**16,
        max_context=4096,
        flops_per_s=flops_per_s,
        link_bytes_per_s=1e10,
        step_base_seconds=1e-9,
    )
    measured = with_disk_speed(cost, tmp_path, 4096)
    assert measured.disk_read_bytes_per_s != cost.disk_read_bytes_per_s and message in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            SettingError("max_num_batched_tokens", "must be at least `max_num_seqs` (64), not 5"),
            "--max-num-batched-tokens: must be at least --max-num-seqs (64), not 5",
        ),
        (
            SettingError("disk_kv_bytes", "`separate` is wrong"),
            "--disk-kv-bytes: `separate` is wrong",
        ),
        (SettingError("--port", "is in use"), "--port: is in use"),
        (SettingError("profile", "costs nothing"), "profile: costs nothing"),
    ],
)
def test_the_command_line_names_settings_by_their_flags(error: SettingError, words: str) -> None:
    assert in_flags(error) == words
