"""The `pensieve` command: one name, several tools."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from . import serve, simulate

COMMANDS = {"serve": serve, "simulate": simulate}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in COMMANDS:
        summaries = [f"  {name:10} {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
        print("\n".join(["usage: pensieve COMMAND [options]", "", *summaries]), file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    return COMMANDS[arguments[0]].main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
