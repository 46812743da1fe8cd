"""Does a server behave as users of the OpenAI API expect? Asks it, through the official client, one thing at a time.

python -m pensieve.scripts.check_openai --url http://127.0.0.1:8000/v1 --model demo [--api-key KEY]

Works with any OpenAI-compatible server that nobody else is using; what it gives no occasion to see is skipped and says
why. Exit status: 0 none failed, 1 some failed, 2 it could not begin.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check_openai", description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="with /v1 (default %(default)s)")
    parser.add_argument("--model", default="demo", help="the name it is served under (default %(default)s)")
    parser.add_argument("--api-key", default="none", metavar="KEY", help="where the server wants one")
    args = parser.parse_args(argv)
    try:
        import openai
    except ImportError:
        print("check_openai needs the official client: pip install openai", file=sys.stderr)
        return 2
    from . import openai_output, openai_serving, openai_text
    from .openai_server import Server

    server = Server(args.url.rstrip("/"), args.model, args.api_key)
    try:
        server.client.models.list()
    except openai.OpenAIError as error:
        print(f"{args.url} does not list its models: {error}", file=sys.stderr)
        return 2
    checks = [*behaviours(openai_text), *behaviours(openai_output), *behaviours(openai_serving)]
    return run(checks, server)


def behaviours(module: ModuleType) -> list[Callable[[Any], None]]:
    """The public functions that the module defines, in its order."""
    functions = [value for value in vars(module).values() if inspect.isfunction(value)]
    own = [function for function in functions if function.__module__ == module.__name__]
    return [function for function in own if not function.__name__.startswith("_")]


def run(checks: Sequence[Callable[[Any], None]], server: Any) -> int:
    """One line for each, and the sum. Returns the exit status."""
    import openai

    from .openai_server import Skipped

    # A field that a server leaves out, or writes otherwise, shows up as one of the last four; the client raises
    # RuntimeError for a stream that ends too early.
    failures = (
        *(AssertionError, openai.OpenAIError, OSError, RuntimeError),
        *(AttributeError, LookupError, TypeError, ValueError),
    )
    passed = failed = skipped = 0
    for check in checks:
        name = check.__name__.replace("_", " ")
        try:
            check(server)
        except Skipped as reason:
            skipped += 1
            print(f"skip  {name}: {reason}", flush=True)
        except failures as error:
            failed += 1
            print(f"FAIL  {name}: {reason_of(error)}", flush=True)
        else:
            passed += 1
            print(f"ok    {name}", flush=True)
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


def reason_of(error: BaseException) -> str:
    """What the error says, on one line; of an assertion that says nothing, its source."""
    said = " ".join(str(error).split())
    if isinstance(error, AssertionError):
        return said or traceback.extract_tb(error.__traceback__)[-1].line or "an assertion"
    return f"{type(error).__name__}: {said}"


if __name__ == "__main__":
    sys.exit(main())
