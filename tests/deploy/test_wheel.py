"""The wheel: what it holds; and it serves, builds engines and answers offline where no checkout is
to be seen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from pensieve import __version__
from tests.end_to_end.server import Server
from tests.models import tiny_config

ROOT = Path(__file__).parents[2]
ROOMS = ("builder", "plugins", "runtime", "scheduler", "scripts")
PLACES = {name: f"pensieve/{name}" for name in ROOMS}
PLACES |= {"deploy/ray_serve": "pensieve/ray_serve"}
SOURCES = (*PLACES, "src", "pyproject.toml", "README.md", "LICENSE")
PACKED = (".py", ".txt", ".js", ".css", ".html", ".svg", ".safetensors")
MOST_BYTES = 3_000_000  # of all files together but the demo model's, unpacked
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
OFFLINE = """
import sys
from pensieve import LLM, SamplingParams
import pensieve.runtime.llm
with LLM("demo", gpu_kv_bytes="64MiB", host_kv_bytes="64MiB") as llm:
    (output,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=4))
print(pensieve.runtime.llm.__file__, len(output.outputs[0].token_ids), output.finished)
"""


def run(*words, **options) -> str:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=600, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The files that the wheel is made of, without the rest of the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    dist = tmp_path_factory.mktemp("dist")
    run(
        *PIP,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        dist,
        source,
        cwd=dist,
    )
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_holds_the_program_and_one_demo_model(source, wheel):
    files = {
        PurePosixPath(file.filename): file.file_size for file in zipfile.ZipFile(wheel).infolist()
    }
    packed = {str(path) for path in files}
    ours = [path for path in files if path.parts[0] == "pensieve"]
    assert {path.parts[1] for path in ours if len(path.parts) > 2} == set(ROOMS) | {"ray_serve"}
    assert {path.parts[0] for path in files if path not in ours} == {
        f"pensieve-{__version__}.dist-info"
    }
    models = {path.parent for path in files if path.suffix == ".safetensors"}
    assert models == {PurePosixPath("pensieve/builder/demo_models/llama")}
    assert sum(size for path, size in files.items() if path.parent not in models) <= MOST_BYTES
    for room, prefix in PLACES.items():
        files = [
            path.relative_to(source / room)
            for path in (source / room).rglob("*")
            if path.suffix in PACKED
        ]
        modules = [path for path in files if (source / room / path.parent / "__init__.py").exists()]
        data = [path for path in files if path.suffix != ".py"]
        assert not [
            path for path in (*modules, *data) if f"{prefix}/{path.as_posix()}" not in packed
        ]


@pytest.mark.slow
def test_the_wheel_works_without_the_checkout(wheel, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    env_dir = tmp_path / "env"
    venv.create(env_dir, with_pip=False)
    (site,) = env_dir.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    # their own .pth files, with our checkout, are not read
    (site / "others.pth").write_text("\n".join(others))
    run(*PIP, "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=outside)
    python = env_dir / "bin" / "python"
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
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
    entry = (
        "import sys; from pensieve.scripts.build_engine import main; sys.exit(main(sys.argv[1:]))"
    )
    assert "built engine" in run(python, "-c", entry, *words, cwd=outside, env=environment)

    serve = (python, "-P", "-m", "pensieve.scripts.pensieve", "serve")
    with Server(
        tmp_path / "state", command=serve, environment=environment, start_seconds=300
    ) as server:
        answer = server.post("/v1/completions", prompt="hello", max_tokens=4)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] >= 1
