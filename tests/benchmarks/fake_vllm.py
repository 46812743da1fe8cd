"""The parts of vLLM's server that `versus` uses: a process with a child, on the given port."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from tests.benchmarks.fake_completions import CompletionsServer

ROOT = Path(__file__).parents[2]


def make_site(site, name="vllm", version="0.23.0"):
    """A folder of packages with it, or with the version alone of another package.

    Each server that starts writes its words and its process's number to `started`."""
    module = site / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"from tests.benchmarks.fake_vllm import serve\nserve({str(site / 'started')!r})\n"
    )
    loader = site / "vllm" / "model_executor" / "model_loader" / "dummy_loader.py"
    loader.parent.mkdir(parents=True)
    loader.write_text(
        "def initialize_dummy_weights(module, model_config):\n    module.filled = True\n"
    )
    metadata = site / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return site


def serve(started):
    words = sys.argv[1:]
    core = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    with Path(started).open("a") as lines:
        lines.write(json.dumps({"words": words, "core": core.pid}) + "\n")
    if "--no-memory" in words:
        sys.exit("out of memory")
    with CompletionsServer(port=int(words[words.index("--port") + 1])):
        time.sleep(600)
