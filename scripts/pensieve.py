"""The `pensieve` command: one name, several tools."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "serve": "serve an engine over HTTP (OpenAI API)",
    "chat": "talk to a running server in the terminal",
    "profile": "measure what steps and copies of an engine cost on this hardware",
    "doctor": "say what this machine lacks, and what to do about it",
    "simulate": "replay a trace against the scheduler on a virtual clock",
    "triton-repository": "write a model repository for Triton Inference Server",
}

MODULES = {"profile": "profile_engine"}  # of other names than their commands


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one tool. Only that one is imported: the HTTP process, which imports this file again, stays small."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in COMMANDS:
        lines = [f"  {name:17} {summary}" for name, summary in COMMANDS.items()]
        print("\n".join(["usage: pensieve COMMAND [options]", "", *lines]), file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    command = importlib.import_module("." + MODULES.get(name := arguments[0], name.replace("-", "_")), __package__)
    return int(command.main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main())
