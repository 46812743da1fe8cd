"""Serves a model over HTTP (OpenAI API), with a KV cache that survives between turns.

What takes seconds to import is imported once the options are known to be right.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from ..runtime.launch.attached import telling_model
from ..runtime.launch.command_line import ending_at_once
from ..runtime.launch.options import early_options, parse_options
from ..runtime.launch.settings import in_flags
from ..runtime.observe.logs import configure_logging
from ..runtime.ranks.launch import under_mpi
from ..runtime.system import hold_stack_signal
from ..scheduler.types import SettingError

log = logging.getLogger("pensieve")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    hold_stack_signal()
    try:
        with ending_at_once("pensieve serve"), telling_model(early_options(words).attach):
            settings = parse_options(words)
            configure_logging(settings.log_format, settings.log_level)
            if not under_mpi():
                from ..runtime.launch.checks import check_settings

                check_settings(settings)
                log.info("starting: loading PyTorch")
            from ..runtime.launch.command import run

            return run(settings, words)
    except SettingError as error:
        print(f"pensieve serve: {in_flags(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
