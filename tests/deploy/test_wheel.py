"""The wheel, installed where the checkout is not to be seen: it serves, builds an engine, and answers offline."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.end_to_end.server import Server
from tests.models import tiny_config

ROOT = Path(__file__).parents[2]
PLACES = {name: f"pensieve/{name}" for name in ("builder", "plugins", "runtime", "scheduler", "scripts")}
PLACES |= {"deploy/ray_serve": "pensieve/ray_serve"}
SOURCES = (*PLACES, "src", "pyproject.toml", "README.md", "LICENSE")
PACKED = (".py", ".txt", ".js", ".css", ".html", ".svg", ".safetensors")
OFFLINE = """
import sys
from pensieve import LLM, SamplingParams
import pensieve.runtime.llm
with LLM("demo", gpu_kv_bytes="64MiB", host_kv_bytes="64MiB") as llm:
    (output,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=4))
print(pensieve.runtime.llm.__file__, len(output.outputs[0].token_ids), output.finished)
"""


def run(*words, **options) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_works_without_the_checkout(tmp_path):
    source, dist, outside = tmp_path / "source", tmp_path / "dist", tmp_path / "outside"
    for folder in (source, outside):
        folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", dist, source, cwd=outside)
    (wheel,) = dist.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    for room, prefix in PLACES.items():
        files = [path.relative_to(source / room) for path in (source / room).rglob("*") if path.suffix in PACKED]
        modules = [path for path in files if (source / room / path.parent / "__init__.py").exists()]
        data = [path for path in files if path.suffix != ".py"]
        assert not [path for path in (*modules, *data) if f"{prefix}/{path.as_posix()}" not in packed]

    env_dir = tmp_path / "env"
    venv.create(env_dir, with_pip=False)
    (site,) = env_dir.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))  # their own .pth files, with our checkout, are not read
    run(*pip, "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=outside)
    python = env_dir / "bin" / "python"
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment = kept | {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    where, tokens, finished = run(python, "-c", OFFLINE, cwd=outside, env=environment).split()
    assert (where, tokens, finished) == (str(site / "pensieve/runtime/llm.py"), "4", "True")

    (outside / "config.json").write_text(
        json.dumps(tiny_config("llama").to_dict() | {"architectures": ["LlamaForCausalLM"]})
    )
    words = (
        "--random-weights",
        "--config",
        "config.json",
        "--output",
        "engine",
        "--backend",
        "reference",
        "--dtype",
        "float32",
    )
    entry = "import sys; from pensieve.scripts.build_engine import main; sys.exit(main(sys.argv[1:]))"
    assert "built engine" in run(python, "-c", entry, *words, cwd=outside, env=environment)

    serve = (python, "-P", "-m", "pensieve.scripts.pensieve", "serve")
    with Server(tmp_path / "state", command=serve, environment=environment, start_seconds=300) as server:
        answer = server.post("/v1/completions", prompt="hello", max_tokens=4)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] >= 1
