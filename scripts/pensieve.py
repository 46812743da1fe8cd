"""The `pensieve` command: one name, several tools."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from ..runtime.launch.command_line import VERSION, did_you_mean, ending_at_once, run_interruptible
from ..runtime.system import hold_streams

COMMANDS = {
    "serve": "serve a model over HTTP (OpenAI API)",
    "chat": "talk to a running server in the terminal",
    "profile": "measure what steps and copies of an engine cost on this hardware",
    "doctor": "say what this machine lacks, and what to do about it",
    "import-histories": "copy conversations from a file into a shared database",
    "simulate": "replay a trace against the scheduler on a virtual clock",
    "plan": "say how many GPUs a load of conversations needs, and what they cost",
    "triton-repository": "write a model repository for Triton Inference Server",
    "dynamo-worker": "register a running server as a worker of NVIDIA Dynamo",
}

MODULES = {"profile": "profile_engine"}  # of other names than their commands

HELP = "\n".join(
    [
        "usage: pensieve COMMAND [options]",
        "",
        *(f"  {name:17} {summary}" for name, summary in COMMANDS.items()),
        "",
        "`pensieve COMMAND --help` has a command's options. `build_engine` makes engines of "
        "checkpoints.",
    ]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one tool and imports only that one: the HTTP process, which imports this file again,
    stays small."""
    hold_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["-h"], ["--help"]):
        print(HELP)
        return 0
    if arguments == ["--version"]:
        print(VERSION)
        return 0
    if not arguments:
        print(HELP, file=sys.stderr)
        return 2
    name = arguments[0]
    if name not in COMMANDS:
        near = did_you_mean(name, [*COMMANDS, "--help", "--version"]) or "; there is " + ", ".join(
            COMMANDS
        )
        kind = "option" if name.startswith("-") else "command"
        print(f"pensieve: there is no {kind} {name}{near}", file=sys.stderr)
        return 2
    with ending_at_once(f"pensieve {name}"):
        command = importlib.import_module(
            "." + MODULES.get(name, name.replace("-", "_")), __package__
        )
    return run_interruptible(f"pensieve {name}", lambda: int(command.main(arguments[1:])))


if __name__ == "__main__":
    sys.exit(main())
