"""Writes a model repository with which Triton Inference Server serves an engine.

    pensieve triton-repository --engine DIR --output DIR [options of `pensieve serve`]
    tritonserver --model-repository DIR

The options are those of the engine and its cache; Triton has its own options for HTTP, keys and
limits. Triton's model starts `pensieve serve` with the options and adds `--attach SOCKET`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..builder.model_names import check_name
from ..runtime.launch.command_line import CommandParser
from ..runtime.launch.options import early_options, parse_options, parser
from ..runtime.launch.settings import in_flags
from ..scheduler.types import SettingError

NAMES = {"llmapi": "pensieve", "ensemble": "ensemble"}
"""The name of a model with these tensors, if the user gives none."""
MODEL = '''"""Pensieve in Triton's python backend; config.pbtxt has its settings."""

{paths}from pensieve.runtime.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def main(argv: Sequence[str] | None = None) -> int:
    command = CommandParser(
        prog="pensieve triton-repository",
        usage="%(prog)s --engine DIR --output DIR [--tensors SET] [--name NAME] "
        "[options of pensieve serve]",
        description=(
            "Writes a model repository with which Triton Inference Server serves an engine."
        ),
    )
    add_own_options(command)
    words = sys.argv[1:] if argv is None else argv
    args, options = command.parse_known_args(words)
    both = parser(command.prog)
    add_own_options(both)
    both.parse_args(words)  # answers wrong options
    try:
        if args.output is None:
            raise SettingError("--output", "must name the repository")
        directory = write_model(args.output, args.name, options, args.tensors)
    except SettingError as error:
        print(f"pensieve triton-repository: {in_flags(error)}", file=sys.stderr)
        return 2
    print(f"{directory} is ready: tritonserver --model-repository {args.output.resolve()}")
    return 0


def add_own_options(command: CommandParser) -> None:
    command.add_argument(
        "--output", type=Path, metavar="DIR", help="the repository; made if need be"
    )
    command.add_argument(
        "--tensors",
        choices=NAMES,
        default="llmapi",
        help="the tensors of TensorRT-LLM's llmapi model, or of its ensemble and tensorrt_llm_bls "
        "(default %(default)s)",
    )
    command.add_argument(
        "--name", help="of the model in it (default pensieve; ensemble with --tensors ensemble)"
    )


def write_model(
    repository: Path, name: str | None, options: Sequence[str], tensors: str = "llmapi"
) -> Path:
    """Writes the model NAME and returns its directory. An older one written by this command is
    replaced. SettingError."""
    options = checked(options)
    name = NAMES[tensors] if name is None else name
    if not name or Path(name).name != name:
        raise SettingError("--name", f"{name!r} cannot name a directory")
    directory = repository / name
    try:
        (directory / "1").mkdir(parents=True, exist_ok=True)
        (directory / "1" / "model.py").write_text(MODEL.format(paths=path_lines()), "utf-8")
        (directory / "config.pbtxt").write_text(model_config(name, options, tensors), "utf-8")
    except OSError as error:
        raise SettingError(
            "--output", f"cannot write {error.filename}: {error.strerror}"
        ) from error
    return directory


def checked(options: Sequence[str]) -> list[str]:
    """The options in a form for any working directory. SettingError for options without a meaning
    for Triton."""
    if early_options(options).attach is not None:
        raise SettingError("--attach", "Triton's model adds it")
    args = parse_options([*options, "--attach=SOCKET"])  # refuses options of HTTP clients
    paths = {
        "config": args.config,
        "state-dir": args.state_dir,
        "disk-dir": args.disk_dir,
        "trace": args.trace,
    }
    if args.engine not in (None, "demo"):
        try:
            check_name(args.engine)
        except SettingError as error:  # this command has no PATH
            raise SettingError("--engine", error.message) from error
        if Path(args.engine).exists():
            paths["engine"] = Path(args.engine)
    relative = {
        name: path for name, path in paths.items() if path is not None and not path.is_absolute()
    }
    # the last ones count
    return [*options, *(f"--{name}={path.resolve()}" for name, path in relative.items())]


def python_paths() -> list[str]:
    """The folders in PYTHONPATH. The stub of Triton's backend does not read it, and Triton may run
    without it."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [str(Path(path).resolve()) for path in named if path]


def path_lines() -> str:
    """The lines of model.py with which the stub's Python finds the same packages."""
    paths = python_paths()
    return f"import sys\n\nsys.path[:0] = {paths!r}\n\n" if paths else ""


def model_config(name: str, options: Sequence[str], tensors: str) -> str:
    """config.pbtxt in protobuf's text format, which accepts JSON strings."""
    from ..runtime.triton.tensor_sets import TENSOR_SETS  # and numpy

    kind = TENSOR_SETS[tensors]
    inputs = [
        f'{{ name: "{name}" data_type: TYPE_{one.type} '
        f"dims: {list(one.dims or (-1 if one.several else 1,))} optional: true }}"
        for name, one in kind.INPUTS.items()
    ]
    outputs = [
        f'{{ name: "{name}" data_type: TYPE_{type_name} dims: {list(dims)} }}'
        for name, (type_name, dims) in kind.OUTPUTS.items()
    ]
    if paths := python_paths():
        hidden = ["-u", "PYTHONHOME", "-u", "PYTHONSTARTUP"]
        python = ["env", *hidden, f"PYTHONPATH={os.pathsep.join(paths)}", sys.executable, "-P"]
    else:  # -E hides Triton's environment variables from the engine's Python
        python = [sys.executable, "-E", "-P"]
    parameters = {
        "engine_command": json.dumps(
            [*python, "-m", "pensieve.scripts.pensieve", "serve", *options]
        ),
        "tensors": tensors,
    }
    if sys.prefix != sys.base_prefix:  # a virtual environment, which Triton's Python does not know
        parameters["EXECUTION_ENV_PATH"] = sys.prefix
    parts = [
        "# Made by `pensieve triton-repository`; edit `engine_command` to change the engine's "
        "options.",
        f"name: {json.dumps(name)}",
        'backend: "python"',
        f"max_batch_size: {kind.MOST_ROWS}",
        "model_transaction_policy { decoupled: true }",
        "instance_group [{ count: 1 kind: KIND_CPU }]",
        *(
            f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(value)} }} }}"
            for key, value in parameters.items()
        ),
        _listed("input", inputs),
        _listed("output", outputs),
    ]
    return "\n".join(parts) + "\n"


def _listed(name: str, entries: Sequence[str]) -> str:
    return "\n".join([f"{name} [", ",\n".join(f"  {entry}" for entry in entries), "]"])
