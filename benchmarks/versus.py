"""Pensieve, vLLM and SGLang under one load: the same GPU, model, client and arrivals, KV and host
bytes, one after the other.

    python -m benchmarks.versus --workload chats --vllm VENV/bin/python --sglang VENV/bin/python
        --output docs/measured/versus-DATE.jsonl
    python -m benchmarks.versus --report docs/measured/versus-*.jsonl
        --page docs/measured/versus.md --plot FILE

Servers: `pensieve`, `vllm` (no offload), `vllm-offload` (its OffloadingConnector, with replies),
`vllm-simple-offload` (its SimpleCPUOffloadConnector), `sglang` (its hierarchical cache),
`sglang-gpu` (without). Rates of one server alone stand behind an @ (vllm@4,5), more of its own
options behind a colon: "pensieve:--queue-order arrival", "vllm@4:--stream-interval 8". The table
shows them. With `--quantization fp8` Pensieve's engine is built so. --tensor-parallel divides the
model of every server. --dry-run prints all commands and starts none.

Each server starts once and serves all rates. Every window has other token ids, so it finds no KV of
an earlier one. That KV takes room until it is evicted. A result is appended to --output as soon as
its window ends. A rate gets windows, each with another seed, until they have --sessions
conversations.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.builder.checkpoints.hugging_face import read_json
from pensieve.runtime.device.memory import GIB
from pensieve.runtime.launch.options import parse_bytes
from pensieve.runtime.launch.options import parser as serve_parser
from pensieve.runtime.launch.settings import default_state_dir
from pensieve.scheduler.types import SettingError
from pensieve.scripts.command import exit_status

from .compared import (
    ComparedServer,
    Installation,
    SharedModel,
    pensieve_command,
    sglang_command,
    sglang_variables,
    shared_config,
    vllm_command,
)
from .goodput import ENOUGH_SESSIONS, Promise
from .report import read_runs, write_report
from .servers import run, serving, tell_end, use_memory
from .workloads import WORKLOADS

SHAPES = Path(__file__).parent / "shapes"
START_SECONDS = 600.0  # longest start of a server
SPARE_HOST_BYTES = 4 * GIB  # beside a server's KV
CLIENT_SECONDS = 15.0  # of the client beside its windows
SEEDS = (0, 1, 2)
ALL_MEMORY = "all"
NEEDED = {
    "--trace": "lengths, as callanjfox/kv-cache-tester has them for agents",
    "--data": "conversations as lines of JSON",
    "--checkpoint": "a directory, as benchmarks.small_checkpoint writes it",
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="versus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--workload", choices=WORKLOADS, default="chats", help="(default %(default)s)")
    option(
        "--servers",
        nargs="+",
        metavar="NAME[@RATES][:OPTIONS]",
        default=["pensieve"],
        help="(default: pensieve)",
    )
    option(
        "--rates",
        type=float,
        nargs="+",
        metavar="R",
        help="conversations/s (default: the workload's)",
    )
    for name in ("vllm", "sglang"):
        option(
            f"--{name}",
            type=Path,
            metavar="PATH",
            help="a Python with it, or a folder of packages (default: this Python)",
        )
    option(
        "--slo",
        metavar="BOUNDS",
        help="first=15,later=5,token=50: most seconds to the first token of first and later turns "
        "(p95), most ms/token (p90) (default: the workload's)",
    )
    option(
        "--title",
        default="",
        metavar="TEXT",
        help="of a table of its own, for the results of this run: tuning, ablation, ...",
    )
    option(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON lines, appended (default: versus-DATE.jsonl)",
    )
    option(
        "--trace",
        type=Path,
        metavar="FILE",
        help="of agents and azure: lengths, see scripts/simulation/traces.py",
    )
    option("--data", type=Path, metavar="FILE", help="of text: conversations, see benchmarks.text")
    option(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="of text: the model, see benchmarks.small_checkpoint",
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
        default=list(SEEDS),
        metavar="N",
        help="of arrivals and lengths, in this order (default: 0 1 2)",
    )
    option(
        "--sessions",
        type=int,
        default=ENOUGH_SESSIONS,
        metavar="N",
        help="a rate's other seeds are left out once its windows have so many (default "
        "%(default)s)",
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
        help="KV and states on each GPU of each server; `all`: what each takes by its defaults "
        "(default %(default)s)",
    )
    option(
        "--host-kv-bytes",
        default="64GiB",
        metavar="SIZE",
        help="on the host, for each GPU, of each but `vllm` and `sglang-gpu` (default %(default)s)",
    )
    option(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="GPUs of each server (default %(default)s)",
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
    option("--dry-run", action="store_true", help="print the commands of a run, and start nothing")
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


class EngineKind(NamedTuple):
    """What an engine of Pensieve is built with, and the type of KV that its costs are measured
    with."""

    directory: Path
    weights: str
    kv_type: str


class Versus:
    """One run: a workload, servers and rates."""

    def __init__(self, args: argparse.Namespace):
        """SettingError before anything starts."""
        self._args = args
        self._workload = workload = WORKLOADS[args.workload]
        self._deadline = time.monotonic() + args.seconds
        self._servers = [ComparedServer.read(text) for text in args.servers]
        for server in self._servers:
            for name in ("--kv-cache-dtype", "--quantization"):
                server.option(name, "")  # SettingError without its value
            if server.package is None:
                serve_parser().parse_args(server.options)  # ends the process if one is wrong
        self._text = workload.shape is None
        needed: list[str] = []
        if self._text:
            needed = ["--checkpoint", "--data"]
        elif not workload.load:
            needed = ["--trace"]
        for option in needed:
            path = getattr(args, option[2:])
            if path is None or not path.exists():
                missing = f"there is no {path}" if path else f"{args.workload} needs one"
                raise SettingError(option, f"{missing}: {NEEDED[option]}")
        windows = args.ramp_s, args.warm_up_s, args.measure_s
        self._windows = [
            own if given is None else given
            for given, own in zip(windows, workload.windows, strict=True)
        ]
        self._rates = args.rates or workload.rates
        self._promise = Promise.read(args.slo) if args.slo else workload.promise
        if args.slo and self._text:
            raise SettingError("--slo", "text has no promise: its streams never wait")
        if self._text:
            config = read_json(args.checkpoint / "config.json", "--checkpoint")
        else:
            config = {
                "model_type": "llama",
                **read_json(args.shape or SHAPES / str(workload.shape), "--shape"),
                "max_position_embeddings": workload.max_model_len,
            }
        self._output = args.output or Path(f"versus-{time.strftime('%Y-%m-%d')}.jsonl")
        name = args.workload if args.shape is None else f"{args.workload}-{args.shape.stem}"
        name += f"-{args.tensor_parallel}-ranks" if args.tensor_parallel > 1 else ""
        self._work = args.work / name
        every_byte = args.gpu_kv_bytes == ALL_MEMORY
        self._model = SharedModel(
            directory=args.checkpoint if self._text else self._work,
            random=not self._text,
            config=config,
            dtype="bfloat16" if args.device == "cuda" else "float32",
            device=args.device,
            gpu_bytes=None if every_byte else parse_bytes(args.gpu_kv_bytes, "--gpu-kv-bytes"),
            host_bytes=parse_bytes(args.host_kv_bytes, "--host-kv-bytes"),
            max_num_seqs=workload.max_num_seqs,
            ranks=args.tensor_parallel,
        )
        self._installations = {
            package: Installation.of(package, getattr(args, package))
            for package in dict.fromkeys(server.package for server in self._servers)
            if package is not None
        }
        self._versions = {
            "pensieve": args.revision or revision(),
            "torch": importlib.metadata.version("torch"),
            **{package: where.versions for package, where in self._installations.items()},
        }

    def run(self) -> int:
        args = self._args
        if args.dry_run:
            self._tell()
            return 0
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end too
        self._make_model()
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # its CUDA context ends with it
            machine = pool.apply(measure_machine, (args.device,))
        print(f"{args.workload}:", json.dumps(machine), flush=True)
        if args.device == "cuda":
            use_memory(self._model.host_bytes * self._model.ranks + SPARE_HOST_BYTES)
        about = {
            "run": secrets.token_hex(4),
            "workload": args.workload,
            "model": self._model_name,
            "ranks": self._model.ranks,
            "title": args.title,
            "slo": self._promise,
            "gpu_kv_bytes": self._model.gpu_bytes,
            "host_kv_bytes": self._model.host_bytes,
            "machine": machine,
            "versions": self._versions,
        }
        missing = [server for server in self._servers if not self._measure(server, about)]
        if self._output.exists():
            print(write_report(read_runs([self._output]), None, None))
        for server in missing:
            print(f"not all was measured of {server.shown}", file=sys.stderr)
        return 1 if missing else 0

    def _make_model(self) -> None:
        """Pensieve's engines, on a GPU with their costs; one config.json for random weights."""
        self._work.mkdir(parents=True, exist_ok=True)
        if self._model.random:
            text = json.dumps(shared_config(self._model.config), indent=1)
            (self._work / "config.json").write_text(text)
        for engine in self._engines():
            run(*self._build(engine))
            if self._model.device == "cuda" and not (engine.directory / "profile.json").exists():
                run(*self._profile(engine))

    def _build(self, engine: EngineKind) -> list[str]:
        model = self._model
        words = ["pensieve.scripts.build_engine"]
        if model.random:
            words += ["--random-weights", "--config", str(model.directory / "config.json")]
        else:
            words += ["--checkpoint", str(model.directory)]
        words += ["--output", str(engine.directory), "--backend", "reference"]
        words += ["--dtype", model.dtype, "--device", model.device]
        words += ["--weights", engine.weights] if engine.weights else []
        return words + (["--tensor-parallel", str(model.ranks)] if model.ranks > 1 else [])

    def _profile(self, engine: EngineKind) -> list[str]:
        words = ["pensieve.scripts.profile_engine", "--engine", str(engine.directory)]
        words += ["--device", self._model.device, "--seconds", "0.02"]
        words += ["--max-num-seqs", str(self._model.max_num_seqs)]
        return [*words, "--kv-cache-dtype", engine.kv_type]

    def _engines(self) -> list[EngineKind]:
        ours = [self._engine(server) for server in self._servers if server.kind == "pensieve"]
        return list(dict.fromkeys(ours))

    def _engine(self, server: ComparedServer) -> EngineKind:
        weights = server.option("--quantization", "")
        kv_type = server.option("--kv-cache-dtype", "auto")
        name = "engine" if kv_type == "auto" else f"engine-{kv_type}"
        name += f"-weights-{weights}" if weights else ""
        return EngineKind(self._work / name, weights, kv_type)

    @property
    def _model_name(self) -> str:
        if self._text:
            return str(self._model.directory.absolute().name)
        return Path(self._args.shape or str(self._workload.shape)).stem

    def _tell(self) -> None:
        """Prints what a run would call, and how long its windows take at most."""
        for engine in self._engines():
            print(shlex.join(["python", "-m", *self._build(engine)]))
            if self._model.device == "cuda":
                print(shlex.join(["python", "-m", *self._profile(engine)]))
        windows = 0
        for server in self._servers:
            command, _ = self.command(server, Path("STATE"))
            variables = [
                f"{name}={value}"
                for name, value in self._variables(server).items()
                if name != "PATH"
            ]
            print(f"\n# {server.shown}")
            print(shlex.join(["env", *variables, *command] if variables else command))
            rates = server.rates or self._rates
            for load in self._loads(server, rates):
                print(shlex.join(["python", "-m", *load]))
            windows += len(rates) * (1 if self._text else len(self._args.seed))
        seconds = sum(self._windows[1:])
        print(
            f"\nat most {windows} windows of {seconds:g} s: {windows * seconds / 60:.0f} minutes "
            f"beside {len(self._servers)} starts"
        )

    def _loads(self, server: ComparedServer, rates: Sequence[float]) -> Iterator[list[str]]:
        if self._text:
            yield ["benchmarks.text", *self._text_load(rates)]
        else:
            for rate in rates:
                yield ["benchmarks.serving", *self.load(server, rate, self._args.seed[0])]

    def _measure(self, server: ComparedServer, about: dict[str, Any]) -> bool:
        """Whether all rates were measured."""
        rates = ",".join(f"{rate:g}" for rate in server.rates)
        log = self._args.work / (re.sub(r"[^\w.=,-]+", "_", server.shown + rates) + ".log")
        variables = self._variables(server)
        try:
            with tempfile.TemporaryDirectory() as state:
                command, ready = self.command(server, Path(state))
                seconds = min(START_SECONDS, self._left())
                heading = {
                    "server": server.shown,
                    "serve": self._without_paths(shlex.join(command), state),
                }
                with serving(command, log, seconds, ready, {**os.environ, **variables}) as url:
                    if self._text:
                        return self._measure_text(server, url, {**about, **heading})
                    return all(
                        self._measure_rate(server, rate, url, {**about, **heading})
                        for rate in server.rates or self._rates
                    )
        except (TimeoutError, subprocess.SubprocessError) as error:
            tell_end(log, error)
            return False

    def _measure_rate(
        self, server: ComparedServer, rate: float, url: str, heading: dict[str, Any]
    ) -> bool:
        """False if the time did not suffice for as many sessions as are needed."""
        sessions = 0
        for seed in self._args.seed:
            if self._left() < sum(self._windows[1:]) + CLIENT_SECONDS:
                print(f"{server.shown}: no time left for {rate:g}", flush=True)
                return False
            load = self.load(server, rate, seed)
            result = self._play(load, url)
            self._append(
                {**heading, "load": self._without_paths(shlex.join(load)), "result": result}
            )
            sessions += result["sessions"]
            if sessions >= self._args.sessions:
                break
        return True

    def _text_load(self, levels: Sequence[float]) -> list[str]:
        """benchmarks.text's options."""
        streams = ",".join(f"{level:g}" for level in levels)
        warm_up_s, measure_s = self._windows[1:]
        load = ["--data", str(self._args.data), "--streams", streams]
        load += ["--warm-up-s", f"{warm_up_s:g}", "--seconds", f"{measure_s:g}"]
        return [*load, "--processes", str(self._args.processes)]

    def _measure_text(self, server: ComparedServer, url: str, heading: dict[str, Any]) -> bool:
        levels = server.rates or self._rates
        load = self._text_load(levels)
        heading = {**heading, "load": self._without_paths(shlex.join(load))}
        file = self._args.work / "result.json"
        file.unlink(missing_ok=True)
        seconds = min(len(levels) * (sum(self._windows[1:]) + CLIENT_SECONDS), self._left())
        try:
            run("benchmarks.text", *load, "--url", url, "--json", file, seconds=seconds)
        finally:  # the levels that were measured are kept if a later one fails
            for line in file.read_text().splitlines() if file.exists() else ():
                self._append({**heading, "result": json.loads(line)})
        return True

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _variables(self, server: ComparedServer) -> dict[str, str]:
        if server.package is None:
            return {}
        where = self._installations[server.package]
        return sglang_variables(where) if server.package == "sglang" else where.variables

    def command(self, server: ComparedServer, state: Path) -> tuple[list[str], str]:
        """But for the port; and the path that answers when the server is ready."""
        if server.package is None:
            return pensieve_command(server, self._model, self._engine(server).directory, state)
        where = self._installations[server.package]
        build = sglang_command if server.package == "sglang" else vllm_command
        return build(server, self._model, where)

    def load(self, server: ComparedServer, rate: float, seed: int) -> list[str]:
        """benchmarks.serving's options: equal for all servers, except that Pensieve gets the
        conversations' names."""
        args = self._args
        words = [*self._workload.load] if args.trace is None else ["--trace", str(args.trace)]
        ramp_s, warm_up_s, measure_s = self._windows
        words += ["--ramp-s", f"{ramp_s:g}"] if ramp_s else []
        words += ["--warm-up-s", f"{warm_up_s:g}", "--measure-s", f"{measure_s:g}"]
        words += ["--vocabulary", str(self._model.config["vocab_size"])]
        words += ["--rate", f"{rate:g}", "--seed", str(seed)]
        words += ["--max-context", str(self._workload.max_model_len)]
        words += ["--processes", str(args.processes)]
        words += shlex.split(args.load)
        return [*words, "--conversations"] if server.kind == "pensieve" else words

    def _play(self, load: Sequence[str], url: str) -> dict[str, Any]:
        """What benchmarks.serving measured."""
        file = self._args.work / "result.json"
        seconds = min(sum(self._windows[1:]) + 10 * CLIENT_SECONDS, self._left())
        run("benchmarks.serving", *load, "--url", url, "--json", file, seconds=seconds)
        row: dict[str, Any] = json.loads(file.read_text())
        return {**row, "workload": Path(row["workload"]).name}

    def _append(self, record: dict[str, Any]) -> None:
        self._output.parent.mkdir(parents=True, exist_ok=True)
        with self._output.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")

    def _without_paths(self, command: str, state: str = "") -> str:
        """A command as anyone may run it: with words for this machine's places."""
        args = self._args
        words = {
            str(path): name
            for path, name in (
                (state, "STATE"),
                (args.trace, args.trace and args.trace.name),
                (args.data, args.data and args.data.name),
                (self._model.directory, "MODEL"),
                (self._work, "WORK"),
                (Path(__file__).parents[1], "."),
                *((where.python[0], "python") for where in self._installations.values()),
                (sys.executable, "python"),
            )
            if path
        }
        for path, name in words.items():
            command = command.replace(path, str(name))
        return command


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
