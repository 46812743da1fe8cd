"""Copies the conversations of a SQLite file into a PostgreSQL database, all of them or none.

Stop the server that has the file first. Names that the database has already, of the same owner,
stay as they are there. Exit status: 0 copied, 2 a wrong option, or a database that cannot be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..runtime.launch.command_line import CommandParser
from ..scheduler.types import RequestError, SettingError
from .command import add_history_url


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="pensieve import-histories", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="history.sqlite of a server's state directory"
    )
    add_history_url(parser, "where they go")
    args = parser.parse_args(argv)

    # loads FastAPI, which --help need not wait for
    from ..runtime.launch.http_options import history_url

    try:
        url = history_url(args.history_url, args.history_url_file)
        if url is None:
            raise SettingError("--history-url", "names no database")
        if not args.file.is_file():
            raise SettingError("FILE", f"there is no {args.file}")
        copied, kept = import_histories(args.file, url)
    except (SettingError, RequestError) as error:
        parser.error(str(error))
    print(f"copied {copied} conversations and responses, {kept} were there already")
    return 0


def import_histories(file: Path, url: str) -> tuple[int, int]:
    """How many were copied, and how many have a name that was taken."""
    from ..runtime.conversations.databases import open_database
    from ..runtime.conversations.store import HistoryStore

    try:
        source = open_database(file)
    except SettingError as error:  # it names the option of a server
        raise SettingError("FILE", error.args[1]) from error
    target = HistoryStore(url)
    try:
        return target.copy_from(source)
    finally:
        target.close()
        source.close()
