"""build_engine: compiles a checkpoint (TensorRT-LLM's legacy ones too), or a config.json alone,
into an engine."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..builder.choices import BACKENDS, DEFAULT_BACKEND, DEVICES, DTYPES, WEIGHTS
from ..builder.model_names import check_name, find_model
from ..runtime.launch.command_line import CommandParser, ending_at_once, run_interruptible
from ..runtime.system import hold_streams
from ..scheduler.types import SettingError
from . import profile_engine
from .command import exit_status

if TYPE_CHECKING:
    from ..builder.build import Built
    from ..builder.manifest import Compiled

DESCRIPTION = "Compile a Hugging Face checkpoint or a GGUF file into an engine."
EPILOG = """\
An engine for measuring needs no checkpoint:

  build_engine --random-weights --config opt-13b/config.json --set max_position_embeddings=16384 \\
      --dtype bfloat16 --device cuda --output engine

Its weights are made anew whenever it is opened, on its device, the same for the same seed and kind
of device. It has no tokenizer: prompts and replies are token ids.
"""


ALIASES = {
    "--checkpoint_dir": "--checkpoint",
    "--output_dir": "--output",
    "--tp_size": "--tensor-parallel",
    "--tensor-parallel-size": "--tensor-parallel",
}
"""TensorRT-LLM's names of options, and that of `pensieve serve`."""

ELSEWHERE = {
    "--max-batch-size": "`pensieve serve` has --max-num-seqs",
    "--max-num-tokens": "`pensieve serve` has --max-num-batched-tokens",
    "--max-seq-len": "`pensieve serve` has --max-model-len",
    "--max-input-len": "`pensieve serve` has --max-model-len",
    "--gemm-plugin": "there are no plugins to choose; leave it out",
    "--gpt-attention-plugin": "there are no plugins to choose; leave it out",
}
"""Frequent options of `trtllm-build` without an equal here, with the suggestion for each. They are
typed with underscores."""


def parser() -> CommandParser:
    command = CommandParser(
        prog="build_engine",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        aliases=ALIASES,
        elsewhere=ELSEWHERE,
    )
    command.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="a directory of config.json, *.safetensors and tokenizer files; a GGUF file; or "
        "ORG/NAME of the Hugging Face Hub",
    )
    command.add_argument(
        "--output", required=True, metavar="DIR", help="the engine directory to make or replace"
    )
    command.add_argument(
        "--backend",
        default=DEFAULT_BACKEND,
        help=f"one of {', '.join(BACKENDS)} (default %(default)s)",
    )
    command.add_argument(
        "--dtype", help=f"one of {', '.join(DTYPES)} (default: the checkpoint's own)"
    )
    command.add_argument(
        "--weights",
        default="same",
        help=(
            f"of the layers' projections: {', '.join(WEIGHTS)}; int4 is of random weights "
            "(default %(default)s)"
        ),
    )
    command.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="ranks (default %(default)s)"
    )
    command.add_argument(
        "--device", default="cpu", help=f"one of {', '.join(DEVICES)} (default %(default)s)"
    )
    command.add_argument(
        "--workspace",
        type=int,
        metavar="MIB",
        help="most memory of a layer, of --backend tensorrt (default: all)",
    )
    random = command.add_argument_group("instead of a checkpoint")
    random.add_argument(
        "--random-weights", action="store_true", help="weights of the right shape and size"
    )
    random.add_argument("--config", metavar="FILE", help="the config.json that gives the shape")
    random.add_argument(
        "--set",
        action="append",
        metavar="KEY=JSON",
        help="replaces a value of config.json; may be repeated",
    )
    random.add_argument("--seed", type=int, metavar="N", help="of the weights (default 0)")
    command.add_argument(
        "--profile", action="store_true", help="then measure it here, as `pensieve profile` does"
    )
    return command


def build(args: argparse.Namespace) -> Built:
    """Raises SettingError."""
    check(args)
    with ending_at_once("build_engine"):
        from ..builder.build import build_engine, build_random_engine  # and torch
    how = dict(
        backend=args.backend,
        dtype=args.dtype,
        tensor_parallel=args.tensor_parallel,
        device=args.device,
        workspace=args.workspace,
        weights=args.weights,
        say=lambda stage: print(f"build_engine: {stage}", file=sys.stderr, flush=True),
    )
    if args.random_weights:
        return build_random_engine(
            args.config, args.output, overrides(args.set or []), args.seed or 0, **how
        )
    return build_engine(checkpoint(args.checkpoint, how["say"]), args.output, **how)


def check(args: argparse.Namespace) -> None:
    """SettingError for options that are wrong together, and for files that do not exist. Takes no
    time, as the build's own imports do."""
    if args.random_weights:
        if args.checkpoint is not None:
            raise SettingError(
                "--checkpoint", "not with --random-weights, which takes its shape from --config"
            )
        if args.config is None:
            raise SettingError(
                "--config", "must name the config.json that --random-weights follows"
            )
        if not Path(args.config).exists():
            raise SettingError("--config", f"{args.config} does not exist")
        overrides(args.set or [])
        return
    for name in ("config", "set", "seed"):
        if getattr(args, name) is not None:
            raise SettingError(f"--{name}", "only with --random-weights")
    if args.checkpoint is None:
        raise SettingError(
            "--checkpoint", "must name a checkpoint (or use --random-weights and --config)"
        )
    with _of_checkpoint():
        check_name(args.checkpoint)


def checkpoint(text: str, say: Callable[[str], None]) -> Path:
    """Returns the checkpoint of that name, which is downloaded if need be. SettingError."""
    # without `ending_at_once` Ctrl-C waits for the end of a download
    with _of_checkpoint(), ending_at_once("build_engine"):
        return find_model(text, say).path


@contextmanager
def _of_checkpoint() -> Iterator[None]:
    """Errors that name a model's PATH name the option instead."""
    try:
        yield
    except SettingError as error:
        raise SettingError("--checkpoint", error.message) from error


def overrides(settings: list[str]) -> dict[str, Any]:
    """Parses {key: value} from KEY=JSON; SettingError for a text of another form, or a repeated
    key."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not (key and equals):
            raise SettingError("--set", f"{setting!r} is not KEY=JSON")
        if key in values:
            raise SettingError("--set", f"{key} is set twice")
        try:
            values[key] = json.loads(text)
        except ValueError:
            raise SettingError(
                "--set", f"the value of {setting!r} is no JSON; text needs double quotes"
            ) from None
    return values


def describe(compiled: Compiled) -> str:
    parity = compiled.parity
    return (
        f"compiled in {compiled.compile_seconds:.1f} s into {compiled.package_bytes / 2**20:.1f} "
        "MiB, which load in "
        f"{compiled.load_seconds:.3f} s; relative error against float32: logits "
        f"{parity.logits:.1e} "
        f"(eager {parity.logits_eager:.1e}), KV {parity.kv:.1e} (eager {parity.kv_eager:.1e})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    hold_streams()
    args = parser().parse_args(argv)
    return run_interruptible(
        "build_engine", lambda: exit_status("build_engine", lambda: make(args))
    )


def make(args: argparse.Namespace) -> int:
    """Builds the engine and prints the result; returns the exit status. Raises SettingError."""
    start = time.perf_counter()
    built = build(args)
    seconds = time.perf_counter() - start
    manifest = built.manifest
    each = "" if manifest.tensor_parallel == 1 else f" on each of {manifest.tensor_parallel} ranks"
    kind = "weights" if manifest.random_seed is None else "random weights"
    kind += (
        " (projections in FP8)"
        if manifest.fp8
        else " (projections in int4)"
        if manifest.int4
        else ""
    )
    print(
        f"{built.outcome} {args.output}: {manifest.architecture}, {manifest.backend} backend, "
        f"{manifest.device}, "
        f"{manifest.dtype}, {manifest.layers} layers, {manifest.weight_bytes / 2**20:.1f} MiB of "
        f"{kind}{each}, "
        f"contexts up to {manifest.max_model_len} tokens, in {seconds:.1f} s (fingerprint "
        f"{manifest.fingerprint[:16]})"
    )
    if manifest.quantisation is not None:
        logits, kv = manifest.quantisation.logits, manifest.quantisation.kv
        print(
            f"relative error of FP8 against the unquantised model in float32: logits {logits:.1e}, "
            f"KV {kv:.1e}"
        )
    if manifest.compiled is not None:
        print(describe(manifest.compiled))
    if manifest.random_seed is not None:
        print("random weights have no tokenizer: prompts must be token ids")
    elif not built.has_tokenizer:
        print(
            "the checkpoint has neither tokenizer.json nor vocab.json and merges.txt: prompts must "
            "be token ids"
        )
    return (
        profile_engine.main(["--engine", args.output, "--device", args.device])
        if args.profile
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())
