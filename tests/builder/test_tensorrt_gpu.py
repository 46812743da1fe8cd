"""TensorRT itself, where it is installed, on an NVIDIA GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.config import Shard
from pensieve.builder.inductor.compile_worker import engine_weights
from pensieve.builder.layers.parts import LayerInputs
from pensieve.builder.manifest import PLAN, Manifest
from pensieve.builder.parity import CHUNK, MOST_CONTEXT, random_batches
from pensieve.plugins.tensorrt.installation import find_tensorrt
from pensieve.plugins.torch_ops import register_pool, release_pool
from pensieve.scheduler.types import SettingError
from tests.models import tiny_checkpoint


def tensorrt_here():
    try:
        find_tensorrt()
    except SettingError:
        return False
    return True


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not tensorrt_here(), reason="needs TensorRT and its headers"),
]
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parents[1] / "plugins" / "tensorrt" / "without_python.cpp"
CHECKERS = {
    "alone": [],
    **{
        tool: ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        for tool in ("memcheck", "racecheck", "synccheck", "initcheck")
    },
}


@pytest.fixture(scope="module", params=["llama", "qwen3", "opt"])
def engine(request, tmp_path_factory):
    """A compiled engine of a tiny model."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_checkpoint(request.param, folder / "hf")
    built = build_engine(
        folder / "hf", folder / "engine", backend="tensorrt", dtype="float16", device="cuda"
    )
    print(request.param, built.manifest.compiled)
    return folder / "engine"


def test_an_engine_computes_what_the_reference_does(engine):
    assert (engine / PLAN).exists()  # the compiler has compared them


def loaded_library(name):
    """The path of a shared library of this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return Path(next(line.split()[-1] for line in lines if name in line))


def write(path, tensor):
    path.write_bytes(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())


class Dumped:
    """A step of one batch: run here, and written for the program."""

    def __init__(self, engine, folder):
        from pensieve.builder.tensorrt.network import BATCH_INPUTS, layer_inputs
        from pensieve.builder.tensorrt.package import kernel_sizes, load_decoder
        from pensieve.plugins.attention.kernel import make_work_list
        from pensieve.plugins.attention.work_list import Capacity
        from pensieve.plugins.tensorrt.kernels import write_kernels

        manifest = Manifest.read(engine)
        config = manifest.decoder
        weights = engine_weights(engine, manifest, rank=0)
        decoder = load_decoder(engine / PLAN, config, weights)
        shard = Shard(config)
        given = random_batches(config, "cuda")[3]
        slots = int(given.block_table.max()) + 1
        pool = torch.randn(
            slots, config.layers, 2, shard.kv_heads, CHUNK, config.head_dim, dtype=torch.float16
        ).cuda()
        capacity = Capacity(len(given.slots), len(given.segments), MOST_CONTEXT)
        work = make_work_list(capacity, shard.heads, shard.kv_heads, config.head_dim, torch.float16)
        handle = register_pool(pool, work=work)
        try:
            layer_given = LayerInputs(given, decoder.rotary(given.positions), handle)
            x = torch.randn(
                len(given.slots), config.hidden_size, dtype=torch.float16, device="cuda"
            )
            work.build(given.segments)
            memory = {
                name: getattr(work, name) for name in ("partial", "lse", "counters", "covered")
            }
            for kind in range(len(work.tiles)):
                memory |= {f"items{kind}": work.items[kind], f"arrivals{kind}": work.arrivals[kind]}
            inputs = {"x": x} | {name: getattr(given, name) for name in BATCH_INPUTS}
            if config.rotary:
                inputs["rotary"] = layer_given.rotary[0]
            for name, tensor in (inputs | memory | {"pool": pool}).items():
                write(folder / f"{name}.bin", tensor)
            for layer in range(config.layers):
                own = layer_inputs(config, weights, layer)
                for name, tensor in own.items():
                    write(folder / f"{layer}.{name}.bin", tensor)
            (folder / "kernels").mkdir()
            write_kernels(folder / "kernels", pool, work, torch.float16, *kernel_sizes(config))
            shutil.copy(engine / PLAN, folder / "plan")
            shapes = [
                f"input {name} {x.dim()} {' '.join(map(str, x.shape))}"
                for name, x in inputs.items()
            ]
            lines = [
                f"layers {config.layers}",
                f"longest {work.longest}",
                f"weights {' '.join(own)}",
                f"memory pool {' '.join(memory)}",
                *shapes,
            ]
            (folder / "step.txt").write_text("\n".join(lines) + "\n")
            with torch.inference_mode():
                self.y = decoder.layers[0](x.clone(), None, layer_given)[0].cpu()
            self.pool = pool.cpu()
        finally:
            release_pool(handle)


@pytest.mark.parametrize("checker", CHECKERS.values(), ids=CHECKERS.keys())
def test_a_program_without_python_runs_the_plan(checker, engine, tmp_path):
    if checker and shutil.which(checker[0]) is None:
        pytest.skip("needs compute-sanitizer")
    from pensieve.plugins.tensorrt.library import compile_library, cuda_headers

    folder = tmp_path / "step"
    folder.mkdir()
    dumped = Dumped(engine, folder)
    tensorrt = find_tensorrt()
    library = compile_library(tensorrt.headers, tensorrt.library)
    program = tmp_path / "without_python"
    command = [
        "g++",
        "-std=c++17",
        f"-isystem{cuda_headers()}",
        str(PROGRAM),
        str(library),
        str(loaded_library("/libcuda.so")),
        f"-Wl,-rpath,{library.parent}",
        "-Wl,--allow-shlib-undefined",
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    paths = [str(loaded_library(name).parent) for name in ("/libcublas.so", "/libcuda.so")]
    environment = os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [*checker, str(program), str(folder)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    y = torch.frombuffer(bytearray((folder / "y.bin").read_bytes()), dtype=torch.float16).view(
        dumped.y.shape
    )
    pool = torch.frombuffer(bytearray((folder / "pool.out.bin").read_bytes()), dtype=torch.float16)
    torch.testing.assert_close(y, dumped.y, rtol=0, atol=0)
    torch.testing.assert_close(pool, dumped.pool.flatten(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_two_ranks_say_what_the_reference_says(kind, tmp_path):
    """In their serving mode: over MPI, in CUDA graphs."""
    tiny_checkpoint(kind, tmp_path / "hf")
    for dtype in ("float32", "float16"):
        built = build_engine(
            tmp_path / "hf",
            tmp_path / dtype,
            backend="tensorrt",
            dtype=dtype,
            device="cuda",
            tensor_parallel=2,
        )
        print(kind, dtype, built.manifest.compiled)
    words = ["--device", "cuda", "--prompts", "8", "--tokens", "200"]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.check.ranks", *words, "--engine", "float32", "float16"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    reports = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert [report["passed"] for report in reports] == [True, True]
    assert reports[0]["dtype"] == "float32" and reports[0]["equal_replies"] == 8
