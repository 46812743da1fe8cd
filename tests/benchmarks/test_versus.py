"""Pensieve and vLLM in turns under one load, with a tiny engine and something that speaks as vLLM
does."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from benchmarks import versus
from benchmarks.compared import CONNECTORS, ComparedServer
from benchmarks.report import BEGIN, END, read_runs, write_report
from benchmarks.versus import Versus, main, parser
from benchmarks.workloads import WORKLOADS
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.plugins.collectives.cuda import OFF
from pensieve.scheduler.config import StateConfig
from pensieve.scheduler.types import SettingError
from tests.benchmarks.fake_vllm import make_site
from tests.models import LLAMA_SHAPE, QWEN3_5_SHAPE

GPU, HOST = 3 * 2**20, 5 * 2**20
RUN = [sys.executable, "-m", "benchmarks.versus"]


@pytest.fixture
def options(tmp_path):
    """Options of a run on the CPU, with short windows."""
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(LLAMA_SHAPE | {"architectures": ["LlamaForCausalLM"]}))
    words = [
        "--device",
        "cpu",
        "--shape",
        shape,
        "--vllm",
        make_site(tmp_path / "site"),
        "--work",
        tmp_path / "work",
    ]
    words += [
        "--gpu-kv-bytes",
        "3MiB",
        "--host-kv-bytes",
        "5MiB",
        "--processes",
        "1",
        "--seed",
        "7",
        "--revision",
        "r1",
    ]
    words += ["--ramp-s", "0.5", "--warm-up-s", "1", "--output", tmp_path / "out" / "versus.jsonl"]
    return [str(word) for word in words]


def started(tmp_path):
    """For each fake vLLM its words and the number of its process."""
    return [json.loads(line) for line in (tmp_path / "site" / "started").read_text().splitlines()]


def alive(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def value(command, option):
    return command[command.index(option) + 1]


def test_the_readmes_command_has_all_that_its_workload_needs():
    readme = (Path(__file__).parents[2] / "README.md").read_text().replace("\\\n", "")
    (line,) = (line for line in readme.splitlines() if "benchmarks.versus" in line)
    python, _, _, *words = shlex.split(line)
    args = parser().parse_args(words)
    assert python == ".venv/bin/python" and args.vllm == Path("VLLM/bin/python")
    assert args.sglang == Path("SGLANG/bin/python")
    assert WORKLOADS[args.workload].load or args.trace == Path("TRACE")


def test_the_comparisons_of_the_benchmarks_page_can_be_run(tmp_path):
    page = (Path(__file__).parents[2] / "benchmarks" / "README.md").read_text()
    rows = [line for line in page.splitlines() if "| `--workload" in line]
    trace = tmp_path / "TRACE"
    trace.touch()
    sites = ["--vllm", str(make_site(tmp_path / "vllm"))]
    sites += ["--sglang", str(make_site(tmp_path / "sglang", "sglang", "0.5.17"))]
    for row in rows:
        words = shlex.split(row.split("| `")[1].split("`")[0].replace("TRACE", str(trace)))
        bench = Versus(parser().parse_args([*sites, *words]))
        assert {server.package for server in bench._servers} == {None, "vllm", "sglang"}
        for server in bench._servers:
            command, _ = bench.command(server, tmp_path)
            assert command[len(command) - len(server.options) :] == server.options
    assert len(rows) == 4


def test_all_servers_have_equal_bytes_rows_and_load(options, tmp_path):
    words = ["--servers", "pensieve", "vllm"]
    bench = Versus(parser().parse_args([*options, *words]))
    ours, _ = bench.command(ComparedServer.read("pensieve:--queue-order arrival"), tmp_path)
    assert (int(value(ours, "--gpu-kv-bytes")), int(value(ours, "--host-kv-bytes"))) == (GPU, HOST)
    assert ours[-2:] == ["--queue-order", "arrival"]
    connectors = {}
    for name in CONNECTORS:
        server = ComparedServer.read(f"{name}@3,4.5:--max-num-batched-tokens 2048")
        assert (server.kind, server.rates, server.shown) == (
            name,
            (3, 4.5),
            f"{name}:--max-num-batched-tokens 2048",
        )
        theirs, ready = bench.command(server, tmp_path)
        assert ready == "/health"
        assert int(value(theirs, "--kv-cache-memory-bytes")) == GPU
        assert value(theirs, "--max-num-seqs") == value(ours, "--max-num-seqs") == "256"
        assert theirs[-2:] == ["--max-num-batched-tokens", "2048"]
        assert bench.load(server, 4, 0) == bench.load(ComparedServer.read("pensieve"), 4, 0)[:-1]
        longest = value(bench.load(server, 4, 0), "--max-context")
        assert longest == "16384", "not what each server says: arrivals are of it"
        if "--kv-transfer-config" in theirs:
            connectors[name] = json.loads(value(theirs, "--kv-transfer-config"))
    assert connectors == {
        "vllm-offload": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": HOST, "offload_prompt_only": False},
        },
        "vllm-simple-offload": {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": HOST},
        },
    }


def test_sglang_has_the_same_bytes_in_whole_pages(options, tmp_path):
    site = make_site(tmp_path / "sglang", "sglang", "0.5.17")
    servers = ["--sglang", str(site), "--servers", "sglang-gpu"]
    bench = Versus(parser().parse_args([*options, *servers]))
    server = ComparedServer.read("sglang:--hicache-write-policy write_back")
    command, ready = bench.command(server, tmp_path)
    assert ready == "/health" and command[-2:] == ["--hicache-write-policy", "write_back"]
    bytes_per_token = 2 * 2 * LLAMA_SHAPE["num_hidden_layers"] * LLAMA_SHAPE["hidden_size"]
    bytes_per_token //= LLAMA_SHAPE["num_attention_heads"]
    bytes_per_token *= LLAMA_SHAPE["num_key_value_heads"]
    tokens = int(value(command, "--max-total-tokens"))
    assert tokens == GPU // (64 * bytes_per_token) * 64
    on_host = tokens * float(value(command, "--hicache-ratio")) * bytes_per_token
    assert on_host == pytest.approx(HOST, rel=1e-4)
    alone, _ = bench.command(ComparedServer.read("sglang-gpu"), tmp_path)
    assert "--enable-hierarchical-cache" not in alone
    assert bench._variables(server)["PYTHONPATH"] == str(site)
    assert bench._versions["sglang"]["sglang"] == "0.5.17"


def test_two_ranks_divide_the_model_of_every_server(options, tmp_path, monkeypatch):
    site = make_site(tmp_path / "sglang", "sglang", "0.5.17")
    servers = ["--sglang", str(site), "--servers", "pensieve", "vllm", "sglang"]
    one = Versus(parser().parse_args([*options, *servers]))
    two = Versus(parser().parse_args([*options, *servers, "--tensor-parallel", "2"]))
    called = []
    monkeypatch.setattr(versus, "run", lambda name, *words, **how: called.append(words))
    two._make_model()
    assert value(called[0], "--tensor-parallel") == "2"
    ours, _ = two.command(ComparedServer.read("pensieve"), tmp_path)
    assert value(ours, "--engine") == value(called[0], "--output")
    assert value(ours, "--gpu-kv-bytes") == str(GPU), "of each rank"
    theirs, _ = two.command(ComparedServer.read("vllm-simple-offload"), tmp_path)
    assert value(theirs, "--tensor-parallel-size") == "2"
    assert value(theirs, "--kv-cache-memory-bytes") == str(GPU), "of each rank"
    transfer = json.loads(value(theirs, "--kv-transfer-config"))
    assert transfer["kv_connector_extra_config"] == {"cpu_bytes_to_use": 2 * HOST}, "of all ranks"
    alone, _ = one.command(ComparedServer.read("sglang"), tmp_path)
    theirs, _ = two.command(ComparedServer.read("sglang"), tmp_path)
    assert value(theirs, "--tp-size") == "2" and "--tp-size" not in alone
    for name in ("vllm", "sglang"):
        variables = two._variables(ComparedServer.read(name))
        assert OFF.items() <= variables.items(), "Pensieve's ranks are without multicast too"
    assert int(value(theirs, "--max-total-tokens")) == 2 * int(value(alone, "--max-total-tokens"))
    assert value(theirs, "--hicache-ratio") == value(alone, "--hicache-ratio")


@pytest.fixture
def hybrid(options, tmp_path):
    """Options of a run with a tiny hybrid of Qwen3.5."""
    shape = tmp_path / "hybrid.json"
    kinds = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    shape.write_text(json.dumps(QWEN3_5_SHAPE | kinds))
    sites = ["--sglang", str(make_site(tmp_path / "sglang", "sglang", "0.5.17"))]
    sizes = ["--gpu-kv-bytes", "200MiB", "--shape", str(shape)]
    return [*options, *sites, *sizes, "--servers", "pensieve", "vllm", "sglang"]


def test_a_hybrid_is_given_as_the_opponents_know_it(hybrid, tmp_path, monkeypatch):
    bench = Versus(parser().parse_args([*hybrid, "--device", "cuda"]))
    called = []
    monkeypatch.setattr(versus, "run", lambda name, *words, **how: called.append(name))
    bench._make_model()
    assert called == ["pensieve.scripts.build_engine", "pensieve.scripts.profile_engine"]
    config = AutoConfig.from_pretrained(tmp_path / "work" / "chats-hybrid")
    assert type(config).__name__ == "Qwen3_5Config"
    assert config.architectures == ["Qwen3_5ForConditionalGeneration"]
    assert config.text_config.max_position_embeddings == 16384
    assert config.text_config.layer_types == QWEN3_5_SHAPE["layer_types"]
    ours = decoder_config(config.to_dict())
    assert ours == decoder_config(bench._model.config) and ours.linear_layers == 3
    theirs, _ = bench.command(ComparedServer.read("vllm"), tmp_path)
    assert "--language-model-only" in theirs


def test_a_hybrids_states_and_kv_share_the_bytes(hybrid, tmp_path):
    bench = Versus(parser().parse_args(hybrid))
    shape = bench._model.shape
    size = 200 * 2**20
    assert shape.state_bytes > 0
    ours, _ = bench.command(ComparedServer.read("pensieve"), tmp_path)
    states = StateConfig.of_size(shape.state_bytes, 32 * shape.token_bytes, 32, 256)
    of_states = states.slots * states.chunks * 32 * shape.token_bytes
    assert int(value(ours, "--gpu-kv-bytes")) == size - of_states > 0
    with pytest.raises(SettingError, match="--gpu-kv-bytes: the states of running requests alone"):
        bench.command(ComparedServer.read("pensieve:--max-num-seqs 9999"), tmp_path)
    theirs, _ = bench.command(ComparedServer.read("sglang"), tmp_path)
    slots = int(value(theirs, "--max-mamba-cache-size"))
    tokens = int(value(theirs, "--max-total-tokens"))
    allocated = (slots + 1) * shape.state_bytes + tokens * shape.token_bytes
    assert size - 64 * shape.token_bytes < allocated <= size
    assert (slots + 1) * shape.state_bytes == pytest.approx(size * 0.9 / 1.9, rel=0.01)
    used = allocated - shape.state_bytes  # a slot holds nothing
    assert float(value(theirs, "--hicache-ratio")) * used == pytest.approx(HOST, rel=1e-3)
    other, _ = bench.command(ComparedServer.read("sglang:--mamba-full-memory-ratio 0.25"), tmp_path)
    assert int(value(other, "--max-mamba-cache-size")) < slots / 2


def test_a_dry_run_prints_all_commands_and_starts_nothing(options, tmp_path, capsys):
    words = ["--servers", "pensieve:--link in-first", "vllm@5,9:--stream-interval 8", "--dry-run"]
    assert main([*options, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not (tmp_path / "work").exists() and not (tmp_path / "out").exists()
    build, *_ = lines
    assert "pensieve.scripts.build_engine --random-weights" in build
    ours = lines[lines.index("# pensieve:--link in-first") + 1]
    assert ours.endswith("--link in-first")
    at = lines.index("# vllm:--stream-interval 8")
    assert f"PYTHONPATH={tmp_path / 'site'}" in lines[at + 1]
    assert lines[at + 1].endswith("--stream-interval 8")
    loads = [line for line in lines[at:] if "benchmarks.serving" in line]
    assert [value(shlex.split(line), "--rate") for line in loads] == ["5", "9"]
    assert lines[-1] == "at most 6 windows of 36 s: 4 minutes beside 2 starts"


def test_real_text_has_a_checkpoint_and_levels_of_streams(options, tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(LLAMA_SHAPE))
    data = tmp_path / "data.gz"
    data.touch()
    words = ["--workload", "text", "--checkpoint", str(checkpoint), "--data", str(data)]
    words += ["--servers", "pensieve", "vllm@64"]
    bench = Versus(parser().parse_args([*options, *words]))
    called = []

    def run(name, *words, **how):
        called.append([name, *map(str, words)])
        if name == "benchmarks.text":
            level = dict.fromkeys((*NUMBERS, "cached_tokens"), 1.5) | {"streams": 64, "errors": {}}
            Path(value(called[-1], "--json")).write_text(json.dumps(level) + "\n")

    monkeypatch.setattr(versus, "run", run)
    bench._make_model()
    built = next(words for words in called if words[0] == "pensieve.scripts.build_engine")
    assert value(built, "--checkpoint") == str(checkpoint) and "--random-weights" not in built
    vllm = ComparedServer.read("vllm@64")
    command, _ = bench.command(vllm, tmp_path)
    assert value(command, "--model") == str(checkpoint) and "dummy" not in command
    heading = {key: value for key, value in record("vllm", 4).items() if key != "result"}
    heading |= {"workload": "text", "title": "", "slo": None}
    heading |= {"gpu_kv_bytes": None, "host_kv_bytes": None}
    assert bench._measure_text(vllm, "url", heading)
    assert value(called[-1], "--streams") == "64" and value(called[-1], "--warm-up-s") == "1"
    table = write_report(read_runs([tmp_path / "out" / "versus.jsonl"]), None, None)
    assert "| 64 | `vllm` | 2 | 2, 2 | 1.5, 1.5 | 1.5, 1.5 | 1.50 | 100 |" in table


NUMBERS = ("output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "tokens_per_event", "prompt_tokens")
NUMBERS += ("ms_per_token_mean", "ms_per_token_p90", "inter_token_ms_p50", "inter_token_ms_p99")
NUMBERS += ("warm_up_s", "seconds", "time")


def test_all_memory_leaves_each_server_its_own_default(options, tmp_path):
    words = ["--servers", "vllm", "--gpu-kv-bytes", "all"]
    bench = Versus(parser().parse_args([*options, *words]))
    for name in ("pensieve", "vllm"):
        command, _ = bench.command(ComparedServer.read(name), tmp_path)
        assert not {"--gpu-kv-bytes", "--kv-cache-memory-bytes"} & set(command)


def test_a_rate_gets_seeds_until_it_has_enough_sessions(options, tmp_path, monkeypatch):
    words = ["--seed", "0", "1", "2", "--sessions", "60", "--title", "tuning"]
    bench = Versus(parser().parse_args([*options, *words]))
    results = iter([dict(record("x", 4)["result"], sessions=number) for number in (40, 25, 70)])
    monkeypatch.setattr(bench, "_play", lambda load, url: next(results))
    server = ComparedServer.read("pensieve")
    heading = {key: value for key, value in record("pensieve", 4).items() if key != "result"}
    assert bench._measure_rate(server, 4, "url", heading)
    assert bench._measure_rate(server, 5, "url", heading)
    records = read_runs([tmp_path / "out" / "versus.jsonl"])
    assert [value(shlex.split(each["load"]), "--rate") for each in records] == ["4", "4", "5"]
    assert [value(shlex.split(each["load"]), "--seed") for each in records] == ["0", "1", "0"]


def test_the_clients_options_override_the_workloads(options):
    bench = Versus(parser().parse_args([*options, "--load", "--think-s 60 --synthetic ultrachat"]))
    assert bench.load(ComparedServer.read("vllm"), 4, 0)[-4:] == [
        "--think-s",
        "60",
        "--synthetic",
        "ultrachat",
    ]


def test_what_cannot_be_run_is_told_before_anything_starts(options, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for words, error in (
        (["--servers", "lmdeploy"], "--servers: 'lmdeploy' is none of pensieve, vllm,"),
        (["--servers", "vllm@4;5"], "--servers: 'vllm@4;5': '4;5' are no rates"),
        (["--workload", "agents"], "--trace: agents needs one: lengths"),
        (["--slo", "first=1"], "--slo: 'first=1' is not of the form"),
        (["--servers", "sglang:--kv-cache-dtype"], "--kv-cache-dtype needs a value"),
        (["--workload", "text"], "--checkpoint: text needs one: a directory"),
        (
            ["--workload", "text", "--checkpoint", str(tmp_path), "--data", "none.gz"],
            "--data: there is no none.gz: conversations",
        ),
        (["--workload", "agents", "--trace", "none.gz"], "--trace: there is no none.gz"),
        (["--shape", "none.json"], "--shape: none.json does not exist"),
        (
            ["--servers", "vllm", "--vllm", str(tmp_path / "empty")],
            "PackageNotFoundError: No package metadata was found for vllm: install",
        ),
        (
            ["--servers", "vllm", "--vllm", str(tmp_path / "nowhere")],
            f"--vllm: there is no {tmp_path / 'nowhere'}: install",
        ),
    ):
        assert main([*options, *words]) == 2
        assert error in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*options, "--servers", "pensieve:--no-such-option"])
    assert "there is no option --no-such-option" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("workload", ["chats", "agents"])
def test_the_commands_that_a_run_calls_exist(options, tmp_path, monkeypatch, workload):
    called = []
    monkeypatch.setattr(versus, "run", lambda name, *words, **how: called.append(name))
    trace = tmp_path / "trace.gz"
    trace.touch()
    words = ["--workload", workload, "--trace", str(trace), "--device", "cuda"]
    run = Versus(parser().parse_args([*options, *words]))
    run._make_model()
    assert "pensieve.scripts.profile_engine" in called
    assert called and all(importlib.util.find_spec(name) for name in called)


def test_costs_are_measured_with_the_type_of_the_pool(options, tmp_path, monkeypatch):
    profiled = []
    monkeypatch.setattr(versus, "run", lambda name, *words, **how: profiled.append(words))
    trace = tmp_path / "trace.gz"
    trace.touch()
    servers = [
        "--servers",
        "pensieve",
        "pensieve@0.6:--kv-cache-dtype fp8",
        "pensieve:--queue-order arrival",
    ]
    run = Versus(
        parser().parse_args(
            [*options, "--workload", "agents", "--trace", str(trace), "--device", "cuda", *servers]
        )
    )
    run._make_model()
    profiled = {words[1]: words[-1] for words in profiled if "--kv-cache-dtype" in words}
    for server, (name, kv_type) in zip(
        run._servers, [("engine", "auto"), ("engine-fp8", "fp8"), ("engine", "auto")], strict=True
    ):
        engine = str(tmp_path / "work" / "agents-shape" / name)
        assert profiled[engine] == kv_type
        assert engine in run.command(server, tmp_path)[0]
    assert len(profiled) == 2


def test_weights_in_eight_bits_are_built_so_and_said(options, tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(versus, "run", lambda name, *words, **how: called.append([name, *words]))
    site = make_site(tmp_path / "sglang", "sglang", "0.5.17")
    exact = "pensieve:--kv-cache-dtype fp8"
    rounded = "pensieve:--quantization fp8 --kv-cache-dtype fp8"
    words = ["--device", "cuda", "--sglang", str(site), "--servers", exact, rounded, "sglang"]
    bench = Versus(parser().parse_args([*options, *words]))
    bench._make_model()
    builds = {value(words, "--output"): words for words in called if "--output" in words}
    for name, weights in ((exact, False), (rounded, True)):
        command, _ = bench.command(ComparedServer.read(name), tmp_path)
        assert ("--weights" in builds[value(command, "--engine")]) is weights
        assert ("--quantization" in command) is weights
    assert value(builds[value(command, "--engine")], "--weights") == "fp8"
    half, _ = bench.command(ComparedServer.read("sglang:--kv-cache-dtype fp8_e4m3"), tmp_path)
    whole, _ = bench.command(ComparedServer.read("sglang"), tmp_path)
    assert int(value(half, "--max-total-tokens")) == 2 * int(value(whole, "--max-total-tokens"))
    text = write_report([judged(rounded, 0.15), judged("pensieve", 0.15)], None, None)
    assert f"| 0.15 | `{rounded}` |" in text and "Rows with `fp8` round weights or KV" in text
    assert "Rows with `fp8`" not in write_report([judged("pensieve", 0.15)], None, None)


@pytest.mark.slow
def test_a_server_that_fails_keeps_no_other_and_nothing_is_left(options, tmp_path):
    servers = [
        "--servers",
        "vllm-offload:--no-memory",
        "vllm@5,9",
        "--rates",
        "7",
        "--measure-s",
        "1",
    ]
    ended = subprocess.run([*RUN, *options, *servers], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1, ended.stderr
    assert (
        "out of memory" in ended.stdout
        and "not all was measured of vllm-offload:--no-memory" in ended.stderr
    )
    records = read_runs([tmp_path / "out" / "versus.jsonl"])
    assert [(record["server"], record["result"]["rate"]) for record in records] == [
        ("vllm", 5),
        ("vllm", 9),
    ]
    assert all(
        record["result"]["errors"] == {} and record["result"]["seed"] == 7 for record in records
    )
    assert "* `vllm`: " in ended.stdout
    assert [alive(each["core"]) for each in started(tmp_path)] == [False, False]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.slow
def test_servers_end_with_the_command(options, tmp_path, number, status):
    words = [*RUN, *options, "--servers", "vllm", "--measure-s", "600"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert any("ready after" in line for line in process.stdout)
        process.send_signal(number)
        assert process.wait(60) == status
    assert [alive(each["core"]) for each in started(tmp_path)] == [False]


@pytest.mark.slow
def test_what_there_is_no_time_for_is_said(options, tmp_path):
    words = [*options, "--servers", "vllm", "--rates", "2", "--measure-s", "60", "--seconds", "40"]
    ended = subprocess.run([*RUN, *words], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1 and "vllm: no time left for 2" in ended.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_pensieve_and_vllm_in_one_run(options, tmp_path):
    servers = [
        "--servers",
        "pensieve:--queue-order arrival",
        "vllm-offload",
        "--rates",
        "2",
        "--measure-s",
        "3",
    ]
    servers += ["--seed", "7", "8", "--sessions", "1000"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    ended = subprocess.run(
        [*RUN, *options, *servers], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    ours, ours_again, theirs, theirs_again = read_runs([tmp_path / "out" / "versus.jsonl"])
    assert [again["result"]["seed"] for again in (ours_again, theirs_again)] == [8, 8]
    assert ours["run"] == theirs["run"] and ours["versions"] == theirs["versions"]
    assert ours["versions"]["pensieve"] == "r1" and ours["versions"]["vllm"]["vllm"] == "0.23.0"
    assert ours["load"] == f"{theirs['load']} --conversations" and "--seed 7" in ours["load"]
    assert ours["serve"].endswith("--queue-order arrival") and ours["result"]["sources"] is not None
    (fake,) = started(tmp_path)
    command = shlex.split(theirs["serve"])
    place = command.index("--model") + 2
    assert command[place - 1] == "WORK" and command[place:] == fake["words"][2:-2]
    assert str(tmp_path) not in json.dumps([ours, theirs])
    model = Path(value(fake["words"], "--model"))
    assert json.loads((model / "config.json").read_text())["max_position_embeddings"] == 16384


# -- the report


def record(server, rate, run="a1", workload="chats", **result):
    fields = dict.fromkeys(
        ("ms_per_token_p90", "ttft_ms_p90", "inter_token_ms_p50", "inter_token_ms_p99"), 1.5
    )
    fields |= dict(
        ms_per_token_mean=10.0 * rate,
        ttft_ms_p50=20.0,
        ttft_ms_p95=1234.5,
        ttft_ms_p99=4321.0 * rate,
    )
    fields |= dict(
        rate=rate,
        offered_per_s=22.25,
        completed_per_s=21.5,
        sources=None,
        cached_tokens=None,
        time=0,
    )
    fields |= dict(prompt_tokens=200, open_at_start=3, open_at_end=4, errors={}, seed=0)
    fields |= dict(ramp_s=60.0, warm_up_s=90.0, seconds=35.0)
    machine = dict(
        name="NVIDIA H200",
        cores=16,
        driver="580",
        link_in_gb_s=55.4,
        link_out_gb_s=54.2,
        product_tflop_s=790.0,
    )
    versions = {"pensieve": "v1", "torch": "2.11", "vllm": {"vllm": "0.23.0", "torch": "2.11"}}
    return dict(
        run=run,
        workload=workload,
        server=server,
        machine=machine,
        versions=versions,
        result=fields | result,
    )


RECORDS = [
    record("pensieve", 4, sources={"gpu": 30, "host": 50, "disk": 0, "recomputed": 15, "new": 5}),
    record("pensieve", 5),
    record("vllm", 4, cached_tokens=90, errors={"timeout": 8}),
    record("vllm", 5, ms_per_token_mean=None, ttft_ms_p99=None),
    record("pensieve", 4, seed=1),
    record("pensieve", 0.3, run="b2", workload="agents"),
]


def test_a_table_has_each_run_with_its_machine(tmp_path):
    text = write_report(RECORDS, None, None)
    assert (
        "run a1: 1970-01-01 00:00 UTC, NVIDIA H200, 16 cores, driver 580, link 55.4 GB/s in and "
        "54.2 out" in text
    )
    assert "Pensieve v1, vLLM 0.23.0 with torch 2.11, ramp 60, warm-up 90, measured 35 s" in text
    rows = [
        line.strip("| ").split(" | ")
        for line in text.splitlines()
        if line.startswith(("| a1", "| b2"))
    ]
    assert [row[:3] for row in rows] == [
        ["a1", "4", "`pensieve`"],
        ["a1", "4", "`vllm`"],
        ["a1", "4 (seed 1)", "`pensieve`"],
        ["a1", "5", "`pensieve`"],
        ["a1", "5", "`vllm`"],
        ["b2", "0.3", "`pensieve`"],
    ]
    assert rows[0][3:8] == [
        "22.25, 21.50",
        "40.0, 1.5",
        "20, 2, 1,234, 17,284",
        "1.5, 1.5",
        "30, 50, 0, 15, 5",
    ]
    assert rows[1][7:] == ["cached 45", "3, 4", "timeout: 8"] and rows[4][4] == "-, 1.5"


def test_what_all_runs_of_a_table_share_is_said_once():
    slow_link = RECORDS[0]["machine"] | {"link_in_gb_s": 44.6}
    records = [RECORDS[0], RECORDS[1] | {"run": "c3", "machine": slow_link}]
    lines = write_report(records, None, None).splitlines()
    assert [line for line in lines if line.startswith("* ")] == [
        "* all runs: 1970-01-01 00:00 UTC, NVIDIA H200, 16 cores, driver 580, bf16 product "
        "790 TFLOP/s, torch 2.11, Pensieve v1, vLLM 0.23.0 with torch 2.11, ramp 60, warm-up 90, "
        "measured 35 s",
        "* run a1: link 55.4 GB/s in and 54.2 out",
        "* run c3: link 44.6 GB/s in and 54.2 out",
    ]


def judged(server, rate, title="", later=(1000,) * 60, **result):
    """A record that goodput reads: 40 sessions, whose waits are a second and three."""
    samples = dict(
        sessions=40,
        waits_ms={"first": [3000] * 40, "later": list(later), "joined": []},
        open_waits_ms={"first": [], "later": [], "joined": []},
        session_s={"3": 20.0},
        replies_ms_per_token=[30.0] * 90,
        open_ms_per_token=[],
        output_tokens_per_s=400.0,
        prompt_tokens_per_s=30000.0,
        sent_per_s=21.0,
    )
    row = record(server, rate, workload="agents", **(samples | result))
    return row | {
        "slo": [15, 5, 50],
        "title": title,
        "gpu_kv_bytes": 2**30,
        "host_kv_bytes": None,
    }


def test_goodput_has_a_table_of_its_own_and_one_for_each_title_and_setting():
    records = [
        judged("pensieve", 0.15, sessions=70),
        judged("pensieve", 0.185, later=[9000] * 60),
        judged("sglang", 0.15, title="tuning"),
        judged("pensieve", 0.15) | {"gpu_kv_bytes": 2**31},
        record("vllm", 0.3, workload="agents"),
    ]
    text = write_report(records, None, None)
    own, tuning, larger, older = text.split("**agents")[1:]
    assert "KV on the GPU 1.0 GiB, on the host each its own" in own
    assert "Promise: TTFT p95 at most 15 s for first turns and 5 s for later ones" in own
    assert "* `pensieve`: 0.15 (fails at 0.185); single windows" in own
    assert "| 0.15 | `pensieve` | yes | 3.00, 1.00 | 30.0 | 400, 30,000 | - | 21.00, 21.50 |" in own
    assert "| 0.185 | `pensieve` | no: later turns | 3.00, 9.00 |" in own
    assert "weak evidence" in own, "the second row has 40 sessions"
    assert tuning.startswith(": tuning**") and "`sglang`: at least 0.15" in tuning
    assert "KV on the GPU 2.0 GiB" in larger and "* `pensieve`: at least 0.15" in larger
    assert "times in ms" in older and "`vllm`" in older


def test_two_ranks_and_other_models_have_tables_of_their_own():
    records = [
        judged("pensieve", 0.15),
        judged("pensieve", 0.15) | {"model": "qwen3.5-9b", "ranks": 1},
        judged("pensieve", 0.15) | {"model": "qwen3.5-9b", "ranks": 2},
    ]
    older, one, two = write_report(records, None, None).split("**agents** ")[1:]
    assert older.startswith("(NVIDIA H200, KV on the GPU 1.0 GiB")
    assert one.startswith("(qwen3.5-9b, NVIDIA H200, KV on the GPU 1.0 GiB")
    assert two.startswith("(qwen3.5-9b, NVIDIA H200, 2 for each server, KV on each GPU 1.0 GiB")


def test_a_page_is_filled_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Head\n\n{BEGIN}\nold\n{END}\n\nTail\n")
    text = write_report(RECORDS, page, None)
    assert page.read_text() == f"# Head\n\n{BEGIN}\n{text}\n{END}\n\nTail\n"
    write_report(RECORDS, tmp_path / "new.md", None)
    assert (tmp_path / "new.md").read_text() == f"{BEGIN}\n{text}\n{END}\n"


def test_files_that_cannot_be_told_of(tmp_path, capsys):
    lines = tmp_path / "a.jsonl"
    page = tmp_path / "page.md"
    page.write_text("no marks\n")
    lines.write_text(json.dumps(RECORDS[0]) + "\n")
    assert main(["--report", str(lines), "--page", str(page)]) == 2
    assert f"--page: {page} lacks a line {BEGIN}" in capsys.readouterr().err
    lines.write_text(json.dumps(RECORDS[0]) + '\n{"run": 1}\n')
    assert main(["--report", str(lines)]) == 2
    assert "a.jsonl, line 2: not a line of versus: KeyError" in capsys.readouterr().err
    assert main(["--report", str(tmp_path / "none.jsonl")]) == 2
    assert "--report" in capsys.readouterr().err


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    write_report(RECORDS, None, tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_a_machine_without_gpu_has_no_link():
    assert set(versus.measure_machine("cpu")) == {"name", "cores"}
