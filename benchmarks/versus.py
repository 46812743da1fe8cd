"""Pensieve and vLLM under one load: the same GPU, model, client and arrivals, KV and host bytes,
one after the other.

    python -m benchmarks.versus --workload chats --vllm VENV/bin/python --output
    docs/measured/versus-DATE.jsonl python -m benchmarks.versus --report
    docs/measured/versus-*.jsonl --page docs/measured/versus.md --plot FILE

Servers: `pensieve`, `vllm` (no offload), `vllm-offload` (its OffloadingConnector, with replies),
`vllm-simple-offload` (its SimpleCPUOffloadConnector). Rates of one server alone stand behind an @
(vllm@4,5), more of its own options behind a colon: "pensieve:--queue-order arrival".

Each server starts once and serves all rates. Every rate has other token ids, so it finds no KV of
an earlier rate. That KV takes room until it is evicted. A result is appended to --output as soon as
its window ends.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.builder.checkpoints.hugging_face import read_json
from pensieve.runtime.launch.options import parse_bytes
from pensieve.runtime.launch.settings import default_state_dir
from pensieve.scheduler.types import SettingError
from pensieve.scripts.command import exit_status

from .report import read_runs, write_report
from .servers import PIECE, READY, SERVE, run, serving, tell_end, use_memory

SHAPES = Path(__file__).parent / "shapes"
VLLM_SERVER = Path(__file__).with_name("vllm_server.py")
START_SECONDS = 300.0  # longest start of a server
CLIENT_SECONDS = 15.0  # of the client beside its windows
NO_VLLM = "install vLLM (python -m venv DIR; DIR/bin/pip install vllm) and name DIR/bin/python"
VERSIONS = (
    "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in ('vllm', "
    "'torch')}))"
)


class Preset(NamedTuple):
    """A workload, and what the servers are told for it.

    windows     ramp, warm-up, measured, s
    load        options of benchmarks.serving; none: a trace is needed
    pensieve    its options for this load
    profile     Pensieve's costs are measured before it starts
    """

    shape: str
    max_model_len: int
    rates: tuple[float, ...]
    windows: tuple[float, float, float]
    load: tuple[str, ...]
    max_num_seqs: int
    pensieve: tuple[str, ...]
    profile: bool


BEST_VLLM = "vllm-simple-offload"
"""Of chats and agents, see docs/measured/versus.md."""

PRESETS = {
    "chats": Preset(
        shape="llama-2-13b-gqa.json",
        max_model_len=16384,
        rates=(4, 5, 5.75),
        windows=(60, 90, 35),
        load=("--synthetic", "sharegpt", "--turn-counts", "uniform", "--think-s", "15"),
        max_num_seqs=256,
        pensieve=(
            "--max-num-batched-tokens",
            "384",
            "--swap-out-below",
            "0.04",
            "--generation-reserve",
            "0.02",
        ),
        profile=False,
    ),
    "agents": Preset(
        shape="llama-3-8b.json",
        max_model_len=40960,
        rates=(0.3, 0.6),
        windows=(60, 100, 80),
        load=(),
        max_num_seqs=128,
        pensieve=("--max-num-batched-tokens", "2048"),
        profile=True,
    ),
    "documents": Preset(
        shape="llama-3.1-8b.json",
        max_model_len=131072,
        rates=(0.16,),
        windows=(60, 80, 70),
        load=("--synthetic", "documents", "--turn-counts", "uniform", "--think-s", "30"),
        max_num_seqs=128,
        pensieve=("--max-num-batched-tokens", "2048"),
        profile=True,
    ),
}

CONNECTORS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "vllm": None,
    "vllm-offload": ("OffloadingConnector", {"offload_prompt_only": False}),
    "vllm-simple-offload": ("SimpleCPUOffloadConnector", {}),
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="versus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--workload", choices=PRESETS, default="chats", help="(default %(default)s)")
    option(
        "--servers",
        nargs="+",
        metavar="NAME[@RATES][:OPTIONS]",
        help=f"(default: pensieve {BEST_VLLM})",
    )
    option(
        "--rates",
        type=float,
        nargs="+",
        metavar="R",
        help="conversations/s (default: the workload's)",
    )
    option(
        "--vllm",
        type=Path,
        metavar="PATH",
        help="a Python with vLLM, or a folder of packages (default: this one)",
    )
    option(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON lines, appended; also a table in FILE's .md (default: versus-DATE.jsonl)",
    )
    option(
        "--trace",
        type=Path,
        metavar="FILE",
        help="of agents: lengths, see scripts/simulation/traces.py",
    )
    option(
        "--load",
        default="",
        metavar="OPTIONS",
        help="more options of benchmarks.serving: --load '--think-s 60'; "
        "a single word needs an equals sign: --load=--send-histories",
    )
    option(
        "--seed",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="of arrivals and lengths; all rates with each (default: 0)",
    )
    for name in ("ramp", "warm-up", "measure"):
        option(
            f"--{name}-s",
            type=float,
            metavar="S",
            help="see benchmarks.serving (default: the workload's)",
        )
    option(
        "--processes", type=int, default=6, metavar="N", help="of the client (default %(default)s)"
    )
    option(
        "--gpu-kv-bytes",
        default="38147MiB",
        metavar="SIZE",
        help="of each server (default %(default)s)",
    )
    option(
        "--host-kv-bytes",
        default="64GiB",
        metavar="SIZE",
        help="of each but `vllm` (default %(default)s)",
    )
    option("--shape", type=Path, metavar="FILE", help="a config.json (default: the workload's)")
    option("--device", default="cuda", choices=("cpu", "cuda"), help="(default %(default)s)")
    option("--work", type=Path, default=default_state_dir() / "versus", metavar="DIR",
           help="engines and logs (default %(default)s)")  # fmt: skip
    option(
        "--revision",
        metavar="TEXT",
        help="of Pensieve, for the record (default: as git describes it)",
    )
    option(
        "--seconds",
        type=float,
        default=float("inf"),
        metavar="S",
        help="for all of it; other rates are left out",
    )
    report = parser.add_argument_group("instead of a run, what runs have appended")
    report.add_argument(
        "--report", type=Path, nargs="+", metavar="FILE", help="print the table of these"
    )
    report.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="put it into this Markdown file, between its marks",
    )
    report.add_argument("--plot", type=Path, metavar="FILE", help="draw it (matplotlib)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 if not all was measured, 2 for a wrong option, 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        return exit_status("versus", lambda: tell(args) if args.report else Versus(args).run())
    except KeyboardInterrupt:
        return 130


def tell(args: argparse.Namespace) -> None:
    print(write_report(read_runs(args.report), args.page, args.plot))


class ComparedServer(NamedTuple):
    """`shown` in tables; `rates` empty: those of the run."""

    kind: str
    rates: tuple[float, ...]
    options: list[str]
    shown: str

    @classmethod
    def read(cls, text: str) -> ComparedServer:
        """Of KIND[@RATES][:OPTIONS]; SettingError."""
        head, colon, options = text.partition(":")
        kind, _, rates = head.partition("@")
        if kind not in ("pensieve", *CONNECTORS):
            raise SettingError(
                "--servers", f"{kind!r} is none of pensieve, {', '.join(CONNECTORS)}"
            )
        try:
            own = tuple(float(rate) for rate in rates.split(",") if rate)
        except ValueError:
            raise SettingError(
                "--servers", f"{text!r}: {rates!r} are no rates with commas between"
            ) from None
        return cls(kind, own, shlex.split(options), f"{kind}{colon}{options}")


class Versus:
    """One run: a workload, servers and rates."""

    def __init__(self, args: argparse.Namespace):
        """SettingError before anything starts."""
        self._args = args
        self._preset = preset = PRESETS[args.workload]
        self._deadline = time.monotonic() + args.seconds
        self._servers = [
            ComparedServer.read(text) for text in args.servers or ("pensieve", BEST_VLLM)
        ]
        kinds = {server.kind for server in self._servers}
        if not preset.load and args.trace is None:
            raise SettingError(
                "--trace",
                f"{args.workload} need one: lengths, as callanjfox/kv-cache-tester has them",
            )
        if args.trace is not None and not args.trace.is_file():
            raise SettingError("--trace", f"there is no {args.trace}")
        windows = args.ramp_s, args.warm_up_s, args.measure_s
        self._windows = [
            own if given is None else given
            for given, own in zip(windows, preset.windows, strict=True)
        ]
        self._rates = args.rates or preset.rates
        self._gpu_bytes = parse_bytes(args.gpu_kv_bytes, "--gpu-kv-bytes")
        self._host_bytes = parse_bytes(args.host_kv_bytes, "--host-kv-bytes")
        self._output = args.output or Path(f"versus-{time.strftime('%Y-%m-%d')}.jsonl")
        self._dtype = "bfloat16" if args.device == "cuda" else "float32"
        self._model = args.work / args.workload
        self._shape = read_json(args.shape or SHAPES / preset.shape, "--shape")
        self._versions = {
            "pensieve": args.revision or revision(),
            "torch": importlib.metadata.version("torch"),
        }
        self._python, self._variables = vllm_python(args.vllm)
        if kinds - {"pensieve"}:
            self._versions["vllm"] = vllm_versions(self._python, self._variables)

    def run(self) -> int:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end too
        args = self._args
        self._make_model()
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # its CUDA context ends with it
            machine = pool.apply(measure_machine, (args.device,))
        print(f"{args.workload}:", json.dumps(machine), flush=True)
        if args.device == "cuda":
            use_memory(self._host_bytes + PIECE)
        about = {
            "run": secrets.token_hex(4),
            "workload": args.workload,
            "machine": machine,
            "versions": self._versions,
        }
        missing = [server for server in self._servers if not self._measure(server, about)]
        for server in missing:
            print(f"not all was measured of {server.shown}", file=sys.stderr)
        return 1 if missing else 0

    def _make_model(self) -> None:
        """One config.json for both, and of it Pensieve's engine."""
        model = self._model
        preset = self._preset
        device = self._args.device
        model.mkdir(parents=True, exist_ok=True)
        config = {
            "model_type": "llama",
            **self._shape,
            "max_position_embeddings": preset.max_model_len,
        }
        (model / "config.json").write_text(json.dumps(config, indent=1))
        for engine, kv_type in {
            self._engine(server) for server in self._servers if server.kind == "pensieve"
        }:
            run("pensieve.scripts.build_engine", "--random-weights",
                "--config", model / "config.json", "--output", engine,
                "--backend", "reference", "--dtype", self._dtype, "--device", device)  # fmt: skip
            if preset.profile and not (engine / "profile.json").exists():
                run(
                    "pensieve.scripts.profile_engine",
                    "--engine",
                    engine,
                    "--device",
                    device,
                    "--seconds",
                    0.02,
                    "--max-num-seqs",
                    preset.max_num_seqs,
                    *preset.pensieve,
                    "--kv-cache-dtype",
                    kv_type,
                )

    def _engine(self, server: ComparedServer) -> tuple[Path, str]:
        """The engine's directory and its pool's `--kv-cache-dtype`: the profile in it is measured
        with that type."""
        options = server.options
        kv_type = (
            options[options.index("--kv-cache-dtype") + 1]
            if "--kv-cache-dtype" in options
            else "auto"
        )
        return self._model / ("engine" if kv_type == "auto" else f"engine-{kv_type}"), kv_type

    def _measure(self, server: ComparedServer, about: dict[str, Any]) -> bool:
        """Whether all rates were measured."""
        log = self._args.work / (re.sub(r"[^\w.=-]+", "_", server.shown) + ".log")
        ready, variables = (
            (READY, {}) if server.kind == "pensieve" else ("/health", self._variables)
        )
        try:
            with tempfile.TemporaryDirectory() as state:
                command = self.command(server, Path(state))
                seconds = min(START_SECONDS, self._left())
                with serving(command, log, seconds, ready, {**os.environ, **variables}) as url:
                    for rate, seed in product(server.rates or self._rates, self._args.seed):
                        if self._left() < sum(self._windows[1:]) + CLIENT_SECONDS:
                            print(f"{server.shown}: no time left for {rate:g}", flush=True)
                            return False
                        load = self.load(server, rate, seed)
                        heading = {
                            "server": server.shown,
                            "serve": shlex.join(command),
                            "variables": variables,
                        }
                        self._append(
                            {
                                **about,
                                **heading,
                                "load": shlex.join(load),
                                "result": self._play(load, url),
                            }
                        )
        except (TimeoutError, subprocess.SubprocessError) as error:
            tell_end(log, error)
            return False
        return True

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def command(self, server: ComparedServer, state: Path) -> list[str]:
        """But for the port."""
        rows = ["--max-num-seqs", str(self._preset.max_num_seqs)]
        if server.kind == "pensieve":
            where = [
                "--engine",
                str(self._engine(server)[0]),
                "--device",
                self._args.device,
                "--state-dir",
                str(state),
            ]
            sizes = [
                "--gpu-kv-bytes",
                str(self._gpu_bytes),
                "--host-kv-bytes",
                str(self._host_bytes),
            ]
            return [
                *SERVE,
                *where,
                *sizes,
                *rows,
                "--shutdown-timeout",
                "1",
                *self._preset.pensieve,
                *server.options,
            ]
        words = [
            "--model",
            str(self._model),
            "--load-format",
            "dummy",
            "--skip-tokenizer-init",
            "--dtype",
            self._dtype,
        ]
        words += [
            "--kv-cache-memory-bytes",
            str(self._gpu_bytes),
            "--attention-backend",
            "FLASH_ATTN",
        ]
        words += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        if offload := CONNECTORS[server.kind]:
            extra = {"cpu_bytes_to_use": self._host_bytes, **offload[1]}
            transfer = {
                "kv_connector": offload[0],
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
            words += ["--kv-transfer-config", json.dumps(transfer)]
        return [*self._python, str(VLLM_SERVER), *words, *rows, *server.options]

    def load(self, server: ComparedServer, rate: float, seed: int) -> list[str]:
        """benchmarks.serving's options: equal for all servers, except that Pensieve gets the
        conversations' names."""
        args = self._args
        words = [*self._preset.load] if args.trace is None else ["--trace", str(args.trace)]
        for name, value in zip(
            ("--ramp-s", "--warm-up-s", "--measure-s"), self._windows, strict=True
        ):
            words += [name, f"{value:g}"]
        words += [
            "--vocabulary",
            str(self._shape["vocab_size"]),
            "--rate",
            f"{rate:g}",
            "--seed",
            str(seed),
        ]
        words += [
            "--max-context",
            str(self._preset.max_model_len),
            "--processes",
            str(args.processes),
        ]
        words += shlex.split(args.load)
        return [*words, "--conversations"] if server.kind == "pensieve" else words

    def _play(self, load: Sequence[str], url: str) -> dict[str, Any]:
        """What benchmarks.serving measured."""
        file = self._args.work / "result.json"
        seconds = min(sum(self._windows[1:]) + 10 * CLIENT_SECONDS, self._left())
        run("benchmarks.serving", *load, "--url", url, "--json", file, seconds=seconds)
        row: dict[str, Any] = json.loads(file.read_text())
        return row

    def _append(self, record: dict[str, Any]) -> None:
        self._output.parent.mkdir(parents=True, exist_ok=True)
        with self._output.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
        write_report(read_runs([self._output]), self._output.with_suffix(".md"), None)


def vllm_python(path: Path | None) -> tuple[list[str], dict[str, str]]:
    """How a Python with vLLM starts, and variables: packages that Pensieve alone needs are not on
    its path."""
    # it would be compiled at the start; greedy sampling needs none
    variables = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if path is None:
        return [sys.executable, "-P"], variables
    if path.is_dir():
        return [sys.executable, "-P"], {**variables, "PYTHONPATH": str(path.resolve())}
    if not path.is_file():
        raise SettingError("--vllm", f"there is no {path}: {NO_VLLM}")
    return [str(path.absolute()), "-P"], {**variables, "PYTHONPATH": ""}


def vllm_versions(python: Sequence[str], variables: dict[str, str]) -> dict[str, str]:
    """SettingError if vLLM is missing."""
    completed = subprocess.run(
        [*python, "-c", VERSIONS], env={**os.environ, **variables}, capture_output=True, text=True
    )
    if completed.returncode:
        raise SettingError("--vllm", f"{completed.stderr.strip().splitlines()[-1]}: {NO_VLLM}")
    versions: dict[str, str] = json.loads(completed.stdout)
    return versions


def revision() -> str:
    words = ["git", "describe", "--always", "--dirty", "--tags"]
    completed = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True)
    return completed.stdout.strip() or "unknown"


def measure_machine(device: str) -> dict[str, Any]:
    """What computes here; of a GPU also its link (GB/s, one way at a time) and a bf16 product of
    8192^3 (TFLOP/s)."""
    import torch  # the process that measures alone needs it

    from .kernels import median_seconds

    machine = {"name": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if device == "cpu":
        return machine
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[0]
    host = torch.ones(2**30, dtype=torch.uint8).pin_memory()
    gpu = torch.ones(2**30, dtype=torch.uint8, device="cuda")
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))

    def seconds(work: Callable[[], object]) -> float:
        return median_seconds(work, repeats=10, before=torch.cuda.synchronize)

    return {
        **machine,
        "name": torch.cuda.get_device_name(),
        "driver": driver,
        "link_in_gb_s": host.nbytes / seconds(lambda: gpu.copy_(host, non_blocking=True)) / 1e9,
        "link_out_gb_s": host.nbytes / seconds(lambda: host.copy_(gpu, non_blocking=True)) / 1e9,
        "product_tflop_s": 2 * 8192**3 / seconds(lambda: a @ b) / 1e12,
    }


if __name__ == "__main__":
    sys.exit(main())
