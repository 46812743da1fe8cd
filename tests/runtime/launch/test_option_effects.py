"""Every option of `pensieve serve` has an effect or is refused by name: none is accepted in
silence."""

from __future__ import annotations

import multiprocessing
import sys
from contextlib import nullcontext
from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.runtime.device.protocol import Memory
from pensieve.runtime.engine import open_engine
from pensieve.runtime.kv_events import publisher as publisher_module
from pensieve.runtime.launch import assemble, command, resolve, serving
from pensieve.runtime.launch.options import parse_options, parser
from pensieve.runtime.messages import TritonSettings
from pensieve.scheduler.kv.noted_store import NotedStores
from pensieve.scheduler.types import SettingError
from pensieve.scripts import serve as serve_module
from pensieve.scripts.triton_repository import checked

GIB = 2**30
DISK, CUDA, KEY, NO_HOST = (
    "--disk-kv-chunks 9",
    "--device cuda",
    "--api-key one",
    "--host-kv-chunks 0",
)


EVENTS = '{"enable_kv_cache_events":true,"endpoint":"tcp://127.0.0.1:0"}'


class Effect(NamedTuple):
    """`flags` change the value of `seen`; in both cases other options are set too."""

    flags: str
    seen: str
    beside: str = ""


class Refused(NamedTuple):
    """`flags` stop the start, and the message contains `needs`."""

    flags: str
    needs: str
    beside: str = ""


OPTIONS = {
    action.dest: action
    for action in parser()._actions
    if action.dest not in ("help", "help_all", "version", "path")
}


def each_choice(name: str, seen: str) -> tuple[Effect, ...]:
    """The option does something else with each choice but the default."""
    option = OPTIONS[name]
    choices = [choice for choice in option.choices or () if choice != option.default]
    return tuple(Effect(f"{option.option_strings[0]} {choice}", seen) for choice in choices)


def at_least(option: str, least: int) -> Refused:
    return Refused(f"--{option} {least - 1}", f"must be at least {least}")


SHARED = '--kv-shared-config {"engine":"directory","path":"FILES/kv","max_bytes":9}'

CASES: dict[str, tuple[Effect | Refused, ...]] = {
    "config": (Effect("--config FILES/queue.toml", "config.max_queue"),),
    "attach": (Effect("--attach FILES/socket", "attach.path"),),
    "engine": (Effect("--engine FILES/other", "engine.directory"),),
    "device": (Effect(CUDA, "device.kind"),),
    "dtype": each_choice("dtype", "build.dtype"),
    "quantization": (Effect("--quantization fp8", "build.quantization"),),
    "tensor_parallel_size": (
        Effect("--tensor-parallel-size 2", "build.tensor_parallel"),
        at_least("tensor-parallel-size", 1),
    ),
    "enforce_eager": (
        Effect("--enforce-eager", "device.enforce_eager", CUDA),
        Refused("--enforce-eager", "no CUDA graphs without --device cuda"),
    ),
    "state_dir": (Effect("--state-dir FILES/state", "http.histories"),),
    "max_model_len": (
        Effect("--max-model-len 128", "config.max_model_len"),
        at_least("max-model-len", 1),
    ),
    "max_num_seqs": (Effect("--max-num-seqs 8", "config.max_num_seqs"),),
    "max_num_batched_tokens": (
        Effect("--max-num-batched-tokens 512", "config.max_num_batched_tokens"),
    ),
    "target_ms_per_token": (
        Effect("--target-ms-per-token 30", "config.target_ms_per_token"),
        Refused("--target-ms-per-token 30", "needs --batching unified", "--batching separate"),
    ),
    "batching": each_choice("batching", "config.batching"),
    "queue_order": each_choice("queue_order", "config.queue_order"),
    "speculate": each_choice("speculate", "config.speculate"),
    "max_queue": (Effect("--max-queue 9", "config.max_queue"),),
    "queue_timeout": (Effect("--queue-timeout 9", "config.queue_timeout"),),
    "shutdown_timeout": (Effect("--shutdown-timeout 9", "drain.seconds"),),
    "gpu_kv_chunks": (Effect("--gpu-kv-chunks 99", "config.gpu_kv_chunks"),),
    "gpu_kv_bytes": (
        Effect("--gpu-kv-bytes 100MiB", "config.gpu_kv_chunks"),
        Refused("--gpu-kv-bytes 100", "less than one chunk"),
    ),
    "gpu_memory_utilization": (
        Effect("--gpu-memory-utilization 0.8", "config.gpu_kv_chunks", CUDA),
        Refused("--gpu-memory-utilization 0.8", "--gpu-kv-bytes"),
        Refused(
            "--gpu-memory-utilization 0.8",
            "cannot be given beside --gpu-kv-bytes",
            f"{CUDA} --gpu-kv-bytes 1GiB",
        ),
        Refused(
            "--gpu-memory-utilization 0.8",
            "cannot be given beside --gpu-kv-chunks",
            f"{CUDA} --gpu-kv-chunks 9",
        ),
    ),
    "host_kv_chunks": (Effect(NO_HOST, "config.host_kv_chunks"),),
    "host_kv_bytes": (
        Effect("--host-kv-bytes 100MiB", "config.host_kv_chunks"),
        Refused("--host-kv-bytes 100", "less than one chunk"),
    ),
    "disk_kv_chunks": (
        Effect(DISK, "disk.slots"),
        Refused(DISK, "needs --host-kv-chunks above 0", NO_HOST),
    ),
    "disk_kv_bytes": (
        Effect("--disk-kv-bytes 10MiB", "disk.slots"),
        Refused("--disk-kv-bytes 100", "less than one chunk"),
    ),
    "disk_dir": (
        Effect("--disk-dir FILES/disk", "disk.directory", DISK),
        Refused("--disk-dir FILES/disk", "needs --disk-kv-bytes or --disk-kv-chunks"),
    ),
    "save": (
        Effect("--save sync", "config.save", DISK),
        Effect("--save off", "config.save", DISK),
        Refused("--save sync", "needs --disk-kv-bytes or --disk-kv-chunks"),
        Refused("--save off", "needs --disk-kv-bytes or --disk-kv-chunks", "--disk-kv-bytes 0GiB"),
    ),
    "prefetch": (
        Effect("--prefetch off", "config.prefetch", DISK),
        Refused("--prefetch off", "needs --disk-kv-bytes or --disk-kv-chunks"),
    ),
    "kv_shared_config": (
        Effect(SHARED, "shared.config"),
        Effect(SHARED, "config.shared_min_tokens"),
        Refused(SHARED, "needs --host-kv-bytes above 0", NO_HOST),
        Refused("--kv-shared-config {}", '"engine" must be one of'),
    ),
    "kv_cache_dtype": each_choice("kv_cache_dtype", "engine.kv_cache_dtype"),
    "lower_tier_kv": (
        Refused(
            "--lower-tier-kv packed",
            "cannot be given beside --kv-cache-dtype fp8",
            "--kv-cache-dtype fp8",
        ),
        Effect("--lower-tier-kv packed", "executor.form"),
        Effect("--lower-tier-kv fp8", "executor.form"),
        Refused(
            "--lower-tier-kv fp8", "needs --host-kv-bytes or --host-kv-chunks above 0", NO_HOST
        ),
    ),
    "chunk_tokens": (
        Effect("--chunk-tokens 16", "config.chunk_tokens"),
        at_least("chunk-tokens", 1),
    ),
    "conversation_ttl": (Effect("--conversation-ttl 9", "config.conversation_ttl"),),
    "owner_kv_bytes": (
        Effect("--owner-kv-bytes 1MiB", "config.owner_kv_chunks", KEY),
        Refused("--owner-kv-bytes 1MiB", "needs --api-key"),
        Refused("--owner-kv-bytes 100", "must be enough for one chunk", KEY),
    ),
    "eviction": each_choice("eviction", "config.eviction"),
    "swap_out_below": (
        Effect("--swap-out-below 0.5", "config.swap_out_below"),
        Refused(
            "--swap-out-below 0.5", "needs --host-kv-bytes or --host-kv-chunks above 0", NO_HOST
        ),
    ),
    "generation_reserve": (Effect("--generation-reserve 0.2", "config.generation_reserve"),),
    "link": (
        Effect("--link in-first", "executor.in_first"),
        Refused("--link in-first", "needs --host-kv-bytes or --host-kv-chunks above 0", NO_HOST),
    ),
    "overflow": (
        Effect("--overflow keep", "config.overflow"),
        Refused("--overflow keep", "no context can overflow", "--max-model-len 60"),
    ),
    "overflow_ratio": (
        Effect("--overflow-ratio 0.25", "config.overflow_ratio"),
        Refused("--overflow-ratio 0.005", "no context can overflow"),
    ),
    "reuse": (Effect("--no-reuse", "config.reuse"),),
    "host": (Effect("--host 127.0.0.2", "listen.host"),),
    "port": (Effect("--port 9", "listen.port"),),
    "served_model_name": (Effect("--served-model-name some", "ready.model"),),
    "chat_template": (
        Effect("--chat-template FILES/chat.jinja", "http.chat_template"),
        Refused("--chat-template FILES/chat.jinja", "has no tokenizer", "--engine FILES/dumb"),
    ),
    "generation_config": (
        Effect("--generation-config FILES/sampling", "ready.sampling"),
        Refused("--generation-config FILES/none", "cannot read"),
    ),
    "strict_fields": (Effect("--strict-fields", "http.strict_fields"),),
    "keep_tokens_left": (Effect("--keep-tokens-left", "http.keep_tokens_left"),),
    "api_key": (Effect(KEY, "http.api_keys"),),
    "api_key_file": (Effect("--api-key-file FILES/keys", "http.api_keys"),),
    "history_url": (
        Effect("--history-url postgresql://histories/one", "http.histories"),
        Refused("--history-url postgresql://me:secret@histories/one", "must not hold a password"),
        Refused(
            "--history-url postgresql://histories/one?password=secret", "must not hold a password"
        ),
        Refused("--history-url mysql://histories/one", "must be a URL as postgresql://"),
        Refused(
            "--history-url postgresql://h/1",
            "cannot be given beside",
            "--history-url-file FILES/histories",
        ),
    ),
    "history_url_file": (
        Effect("--history-url-file FILES/histories", "http.histories"),
        Refused("--history-url-file FILES/none", "cannot read"),
    ),
    "history_ttl": (Effect("--history-ttl 9", "http.history_ttl"),),
    "max_requests_per_client": (
        Effect("--max-requests-per-client 9", "http.max_requests_per_client"),
    ),
    "max_conversations_per_owner": (
        Effect("--max-conversations-per-owner 9", "http.max_conversations_per_owner"),
    ),
    "max_body_bytes": (Effect("--max-body-bytes 1MiB", "http.max_body_bytes"),),
    "max_connections": (Effect("--max-connections 9", "http.max_connections"),),
    "api_server_count": (Effect("--api-server-count 3", "http.api_server_count"),),
    "client_timeout": (Effect("--client-timeout 9", "http.client_timeout"),),
    "reasoning_parser": (Effect("--reasoning-parser none", "http.reasoning_parser"),),
    "tool_call_parser": (Effect("--tool-call-parser mistral", "http.tool_call_parser"),),
    "cors_origins": (Effect("--cors-origins https://one.example", "http.cors_origins"),),
    "otlp_traces_endpoint": (
        Effect(
            "--otlp-traces-endpoint http://127.0.0.1:4318/v1/traces", "http.otlp_traces_endpoint"
        ),
    ),
    "trace": (Effect("--trace FILES/trace.json", "trace.path"),),
    "kv_events_config": (
        Effect(f"--kv-events-config {EVENTS}", "kv_events.config"),
        Refused("--kv-events-config {}x", "is not JSON"),
        Refused('--kv-events-config {"port":1}', "there is no field 'port'"),
        Refused(f"--kv-events-config {EVENTS}", "--no-reuse", "--no-reuse"),
    ),
    "log_format": each_choice("log_format", "log.format"),
    "log_level": each_choice("log_level", "log.level"),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Directory of the demo engine in bfloat16, which `packed` wants."""
    directory = tmp_path_factory.mktemp("engines") / "engine"
    build_engine(DEMO_CHECKPOINT, directory, "reference", dtype="bfloat16")
    return directory


@pytest.fixture
def files(tmp_path, engine):
    """The files that the cases name."""
    (tmp_path / "queue.toml").write_text("max-queue = 9")
    (tmp_path / "sampling").mkdir()
    (tmp_path / "sampling" / "generation_config.json").write_text('{"top_k": 20}')
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "keys").write_text("one")
    (tmp_path / "histories").write_text("postgresql://me:secret@histories/one\n")
    (tmp_path / "other").symlink_to(engine)
    (tmp_path / "dumb").mkdir()
    for path in engine.iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / "dumb" / path.name).symlink_to(path)
    return tmp_path


@pytest.fixture
def served(files, engine, monkeypatch):
    """served(words): the settings that `pensieve serve` would serve with, by "section.name".
    SystemExit if it does not start, with its message on stderr.

    The program is the real one except for slow parts: GPU, pools, processes and the loop only
    record their arguments.
    """
    settings: dict[str, object] = {}

    def note(section, **values):
        settings.update({f"{section}.{name}": value for name, value in values.items()})

    def device(kind, enforce_eager=False):
        note("device", kind=kind, enforce_eager=enforce_eager)
        return SimpleNamespace(
            memory=lambda tier: Memory(free=10 * GIB, total=10 * GIB), watch=lambda report: None
        )

    def connect(path):
        note("attach", path=path)
        return nullcontext(SimpleNamespace(send=lambda message: None))

    def executor(
        device, engine, config, group_layers, grammars, in_first, form, disk, shared, states
    ):
        note("executor", in_first=in_first, form=form)
        note("disk", **({} if disk is None else disk._asdict()))
        note("shared", **({} if shared is None else shared._asdict()))
        return SimpleNamespace(stored_records=dict)

    def service(scheduler, *_):
        return SimpleNamespace(run=lambda ready: note("ready", **asdict(ready)))

    def scheduler(config, cost, store):
        note("config", **asdict(config))
        if isinstance(store, NotedStores):
            store.store = None
        return SimpleNamespace(lower=SimpleNamespace(adopt=lambda records, now: None))

    def process(target, args, name):
        note("http", **asdict(args[-1]))
        return SimpleNamespace(
            start=lambda: None, join=lambda seconds: None, kill=lambda: None, exitcode=0
        )

    def listen(host, port):
        note("listen", host=host, port=port)
        return SimpleNamespace(getsockname=lambda: (host, port), close=lambda: None)

    def trace(path):
        note("trace", path=path)
        return SimpleNamespace(work=None)

    def opened(directory, device, kv_cache_dtype):
        note("engine", directory=directory, kv_cache_dtype=kv_cache_dtype)
        return open_engine(directory)

    def built(path, **settings):
        note("build", **settings)
        return Path(path)

    def publisher(config, store, seed, chunk_tokens, has_states):
        note("kv_events", config=config)

    monkeypatch.setattr(publisher_module, "KVEventPublisher", publisher)
    gpu = SimpleNamespace(CudaDevice=lambda enforce_eager: device("cuda", enforce_eager))
    monkeypatch.setitem(sys.modules, "pensieve.runtime.device.cuda", gpu)
    monkeypatch.setattr(multiprocessing.get_context("spawn"), "Process", process, raising=False)
    for name, fake in {
        "CpuDevice": lambda: device("cpu"),
        "Executor": executor,
        "Service": service,
        "Scheduler": scheduler,
        "TraceFile": trace,
        "configure_logging": lambda form, level: note("log", format=form, level=level),
        "connect": connect,
        "drain_on_signals": lambda service, seconds: note("drain", seconds=seconds),
        "HistoryStore": lambda *_, **__: SimpleNamespace(close=lambda: None, shared=False),
        "engine_for": built,
        "listen": listen,
        "open_engine": opened,
        "open_grammars": lambda *_: None,
        "hold_stack_signal": lambda: None,
        "print_stacks_on_signal": lambda: None,
        "with_disk_speed": lambda cost, *_: cost,
    }.items():
        for module in (assemble, command, resolve, serving, serve_module):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, fake)

    def run(words):
        settings.clear()
        status = serve_module.main(["--engine", str(engine), "--state-dir", str(files), *words])
        if status:
            raise SystemExit(status)
        return dict(settings)

    return run


def words(case, files):
    """The words of the other options, and of the case's own."""
    return [text.replace("FILES", str(files)).split() for text in (case.beside, case.flags)]


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_has_an_effect_or_is_refused(name, served, files, capsys):
    """A new option needs its cases: the setting that it changes, and the options with which it
    would change nothing."""
    flags = OPTIONS[name].option_strings
    assert any(isinstance(case, Effect) for case in CASES[name])
    for case in CASES[name]:
        beside, own = words(case, files)
        assert own[0] in flags
        if isinstance(case, Effect):
            assert served([*beside, *own])[case.seen] != served(beside).get(case.seen), case
            continue
        served(beside)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            served([*beside, *own])
        error = capsys.readouterr().err
        assert ended.value.code == 2 and own[0] in error and case.needs in error, case


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.choices])
def test_every_choice_is_tried(name):
    tried = {case.flags.split()[1] for case in CASES[name]}
    assert tried >= {*OPTIONS[name].choices} - {OPTIONS[name].default or "keep"}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_at_its_default_is_never_refused(name, served, capsys):
    """It may stand in a file for all servers."""
    option = OPTIONS[name]
    if option.default is not None and not isinstance(option.default, bool | list):
        served([option.option_strings[0], str(option.default), *NO_HOST.split()])


def test_the_start_of_an_engine_that_cannot_chat_names_the_missing_files(
    served, files, engine, caplog
):
    mute = files / "mute"
    mute.mkdir()
    for path in engine.iterdir():
        if path.name != "tokenizer_config.json":
            (mute / path.name).symlink_to(path)
    for words, parts in (
        ([], ()),
        (
            ["--engine", str(files / "dumb")],
            ("there is no tokenizer.json", "only completions of token ids"),
        ),
        (
            ["--engine", str(mute)],
            ("no chat_template.jinja", "tokenizer_config.json", "--chat-template FILE"),
        ),
        (["--engine", str(mute), "--chat-template", str(files / "chat.jinja")], ()),
    ):
        caplog.clear()
        served(words)
        warnings = [
            record.getMessage() for record in caplog.records if record.levelname == "WARNING"
        ]
        assert len(warnings) == bool(parts) and all(part in warnings[0] for part in parts), words


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_start_of_a_float16_engine_on_a_cpu_names_faster_dtypes(dtype, served, files, caplog):
    build_engine(DEMO_CHECKPOINT, files / "built", "reference", dtype=dtype)
    served(["--engine", str(files / "built")])
    cure = "build it, or load its checkpoint, with dtype float32 or bfloat16"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [cure in warning for warning in warnings] == [True] * (dtype == "float16")


# its model gets `Ready` too
TOLD_TO_TRITON = {"sampling", *(field.name for field in fields(TritonSettings))}


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "attach"])
def test_triton_is_served_with_an_option_or_refuses_it(name, engine, files):
    """When the repository is written, and when the engine is started with options that were added
    to it."""
    for case in CASES[name]:
        section, _, seen = getattr(case, "seen", "").partition(".")
        if not section:
            continue
        options = ["--engine", str(engine), *chain(*words(case, files))]
        if KEY not in case.beside and (
            section not in ("http", "listen", "ready") or seen in TOLD_TO_TRITON
        ):
            checked(options)
            continue
        with pytest.raises(SettingError, match="Triton serves the clients"):
            checked(options)
        with pytest.raises(SettingError, match="Triton serves the clients"):
            parse_options([*options, "--attach", "socket"])
