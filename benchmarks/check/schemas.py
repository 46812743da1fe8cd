"""schemas: which public JSON schemas replies can follow, and in what words others are refused.

    pip download --no-deps --dest DIR check-jsonschema openapi-spec-validator nbformat \\
        kubernetes-validate
    python -m benchmarks.check.schemas DIR

Each schema of the packages is judged as a client's `response_format` is; of kubernetes' thousands
the newest version's pod, service and config map. For each one line: accepted, with what is not
enforced, or refused, with the message.
"""

from __future__ import annotations

import argparse
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pensieve.runtime.frontend.grammar_check import GrammarChecker
from pensieve.runtime.step.grammar import json_grammar
from pensieve.scheduler.types import RequestError

MODEL = Path(__file__).parents[2] / "builder" / "demo_models" / "llama"
OF_KUBERNETES = re.compile(r"/v([\d.]+)-local/(pod|service|configmap)-v1\.json$")
SECONDS = 60.0  # longest wait for a verdict


def schemas(folder: Path) -> Iterator[tuple[str, Any]]:
    """Names and schemas in the wheels of the folder."""
    for path in sorted(folder.glob("*.whl")):
        wheel = zipfile.ZipFile(path)
        names = [name for name in sorted(wheel.namelist()) if name.endswith(".json")]
        if path.name.startswith("kubernetes"):
            versions = {name: match[1] for name in names if (match := OF_KUBERNETES.search(name))}
            newest = max(versions.values(), key=lambda text: tuple(map(int, text.split("."))))
            names = [name for name, version in versions.items() if version == newest]
        for name in names:
            yield "/".join(name.split("/")[-2:]), json.loads(wheel.read(name))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check.schemas")
    parser.add_argument("wheels", type=Path, metavar="DIR", help="the folder of the packages")
    folder = parser.parse_args().wheels
    vocab_size = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    checker = GrammarChecker(str(MODEL), vocab_size, ())
    verdicts: Counter[str] = Counter()
    for name, schema in schemas(folder):
        check = checker.begin_check(json_grammar(schema), "response_format", "")
        try:
            remarks = check.result(SECONDS)
            verdict = "accepted"
            words = f"not enforced: {', '.join(remarks)}" if remarks else ""
        except RequestError as error:
            verdict = "refused"
            words = error.message
        verdicts[verdict] += 1
        print(f"{name:44} {verdict}  {words}")
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))


if __name__ == "__main__":
    main()
