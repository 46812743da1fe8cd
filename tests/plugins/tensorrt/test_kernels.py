"""Every launch of the library is the JIT's: kernel, grid, threads, memory, attributes, values."""

from __future__ import annotations

import ctypes

import pytest
import torch

pytest.importorskip("triton")
from pensieve.builder.tensorrt.package import step_of
from pensieve.plugins.attention import kernel as attention_kernel
from pensieve.plugins.attention import kv_write_kernel
from pensieve.plugins.attention.work_list import Capacity
from pensieve.plugins.tensorrt import kernels as ahead_of_time

from ..recording_driver import STREAM, RecordingDriver
from .launching import HERE, Library, compile_cpp, headers, needs_compilers, needs_headers

pytestmark = needs_compilers
LAYERS = 3
FLOAT16 = 1  # `PensieveType`
SHAPES = {  # heads, kv_heads, head_dim, chunk_tokens, rotary dims, type, capacity
    "opt": (40, 40, 128, 32, 0, torch.float16, Capacity(512, 8, 2048)),
    "llama": (40, 10, 128, 32, 128, torch.bfloat16, Capacity(512, 7, 9000)),
    "one key head": (5, 1, 80, 16, 40, torch.float16, Capacity(301, 3, 5000)),
    "float32": (4, 2, 64, 32, 64, torch.float32, Capacity(64, 4, 1000)),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library(tmp_path_factory.mktemp("library"))


@pytest.fixture
def jit(monkeypatch):
    """What Triton's JIT launches, on a GPU whose kernels overlap."""
    recording = RecordingDriver(monkeypatch)
    monkeypatch.setattr(attention_kernel, "_overlaps", lambda device: True)
    return recording


class Case:
    def __init__(self, shape, folder):
        self.heads, self.kv_heads, self.head_dim, chunk, self.dims, self.dtype, self.capacity = SHAPES[shape]
        self.pool = torch.zeros(2, LAYERS, 2, self.kv_heads, chunk, self.head_dim, dtype=self.dtype)
        shape = (self.heads, self.kv_heads, self.head_dim, self.dtype)
        self.work = attention_kernel.make_work_list(self.capacity, *shape, "cpu")
        ahead_of_time.write_kernels(folder, self.pool, self.work, self.dims)

    def batch(self, tokens, blocks):
        qkv = torch.zeros(tokens, self.heads + 2 * self.kv_heads, self.head_dim, dtype=self.dtype)
        rotary, slots = torch.zeros(tokens, self.dims), torch.zeros(tokens, dtype=torch.int32)
        return qkv, rotary, slots, torch.zeros(3, blocks, dtype=torch.int32)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_launch_is_the_jits(shape, library, jit, tmp_path):
    case = Case(shape, tmp_path)
    kernels = library.load(tmp_path)
    jit.take()
    for tokens in sorted({1, 2, 16, 17, 64, case.capacity.tokens}):
        for layer, blocks, longest in ((0, 1, tokens), (1, 16, 1), (LAYERS - 1, 33, case.capacity.tokens)):
            case.work.longest = longest
            qkv, rotary, slots, block_table = case.batch(tokens, blocks)
            parts = qkv.split((case.heads, case.kv_heads, case.kv_heads), dim=1)
            rotated = kv_write_kernel.write_kv(*parts, rotary, slots, case.pool, layer)
            scale = case.head_dim**-0.5
            o = attention_kernel.multi_token_attention(rotated, block_table, case.pool, layer, scale, case.work)
            step = step_of(case.pool, case.work, [0] * LAYERS)
            library.write_kv(kernels, step, layer, qkv, rotary, slots, rotated)
            library.attend(kernels, step, layer, rotated, block_table, o)
            ours, triton = library.launched(), jit.take()
            assert len(ours) == len(triton)
            for one, other in zip(ours, triton, strict=True):
                scratch = one.values[len(other.values) :]
                assert one._replace(values=one.values[: len(other.values)]) == other
                assert not any(scratch)


@pytest.fixture
def small(jit, tmp_path):
    """A case whose kernels are compiled, and rows of one token."""
    return Case("float32", tmp_path)


def write_kv_of(case, library, kernels, step, layer=1, tokens=2):
    qkv, rotary, slots, _ = case.batch(tokens, 1)
    library.write_kv(kernels, step, layer, qkv, rotary, slots, torch.zeros(tokens, case.heads, case.head_dim))


@pytest.mark.parametrize("capturing, flags", [(False, 0), (True, 1)])
def test_a_layer_waits_for_its_gate_before_it_is_touched(capturing, flags, small, library, tmp_path):
    kernels = library.load(tmp_path, capturing=capturing)
    step = step_of(small.pool, small.work, [5, 0, 6])
    for layer in range(LAYERS):
        write_kv_of(small, library, kernels, step, layer)
    waits = [line for line in library.record() if line.startswith(("wait", "launch"))]
    assert [line.split()[0] for line in waits] == ["wait", "launch", "launch", "wait", "launch"]
    assert [waits[0], waits[3]] == [f"wait {STREAM} {event} {flags}" for event in (5, 6)]


def test_no_tokens_pass_the_gate_only(small, library, tmp_path):
    kernels = library.load(tmp_path)
    library.record()
    write_kv_of(small, library, kernels, step_of(small.pool, small.work, [5, 5, 5]), tokens=0)
    assert library.record() == [f"wait {STREAM} 5 0"]


def test_a_driver_that_refuses_the_machine_code_compiles_ptx(small, library, tmp_path):
    kernels = library.load(tmp_path, refuse_cubins=True)
    loads = [line for line in library.record() if line.startswith("load")]
    assert set(loads) == {"load ptx"} and len(loads) == len(library.images)
    library.library.pensieve_unload_kernels(kernels)
    assert library.record() == [f"unload {number}" for number in range(1, len(loads) + 1)]


def test_more_than_48_kb_of_shared_memory_are_asked_for(jit, library, tmp_path):
    Case("opt", tmp_path)
    library.load(tmp_path)
    shared = [int(line.split()[3]) for line in (tmp_path / "kernels.txt").read_text().splitlines() if "kernel" in line]
    asked = [line.split() for line in library.record() if line.startswith("attribute")]
    expected = [["attribute", str(i), "8", str(size)] for i, size in enumerate(shared, 1) if size > 48 * 1024]
    assert asked == expected and expected


def test_a_pointer_of_another_alignment_is_refused(small, library, tmp_path):
    kernels = library.load(tmp_path)
    step = step_of(small.pool, small.work, [0] * LAYERS)
    step.pool += 4
    with pytest.raises(RuntimeError, match=r"_write_kv cannot take \d+ for pool: it was compiled for other alignments"):
        write_kv_of(small, library, kernels, step)


def test_a_layer_beyond_the_pool_is_refused(small, library, tmp_path):
    kernels = library.load(tmp_path)
    with pytest.raises(RuntimeError, match="the pool has no layer 3"):
        write_kv_of(small, library, kernels, step_of(small.pool, small.work, [0] * LAYERS), layer=LAYERS)


@needs_headers
@pytest.mark.parametrize("folder", headers(), ids=str)
@pytest.mark.parametrize("shape", ["opt", "one key head"])
def test_plugins_launch_the_same(shape, folder, library, jit, tmp_path):
    compile_cpp(HERE / "plugin_harness.cpp", tmp_path / "plugin.so", f"-isystem{folder}")
    plugins = ctypes.CDLL(str(tmp_path / "plugin.so"))
    case = Case(shape, tmp_path)
    kernels = library.load(tmp_path)
    qkv, rotary, slots, block_table = case.batch(7, 9)
    q, o = (torch.zeros(7, case.heads, case.head_dim, dtype=case.dtype) for _ in range(2))

    def enqueue(operation, inputs, out):
        attributes = (ctypes.c_int32 * 6)(operation, case.heads, case.kv_heads, case.head_dim, case.dims, FLOAT16)
        shapes = [number for x in inputs for number in (x.dim(), *x.shape)]
        addresses = (ctypes.c_void_p * len(inputs))(*(x.data_ptr() for x in inputs))
        given = (attributes, len(inputs), (ctypes.c_int64 * len(shapes))(*shapes), addresses)
        return plugins.harness_enqueue(*given, ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(STREAM))

    angles = [rotary] if case.dims else []
    batches = ((0, [qkv.flatten(1), *angles, slots], q), (1, [q.flatten(1), block_table], o))
    assert [enqueue(*batch) for batch in batches] == [1, 1]  # the thread has not said what to run on
    step = step_of(case.pool, case.work, [0] * LAYERS)
    plugins.pensieve_run_on(kernels, ctypes.byref(step), 2)
    assert [enqueue(*batch) for batch in batches] == [0, 0]
    through_plugins = library.launched()
    library.write_kv(kernels, step, 2, qkv, rotary, slots, q)
    library.attend(kernels, step, 2, q, block_table, o)
    assert through_plugins == library.launched() != []


@pytest.mark.parametrize("line, reason", [
    ("given pointer 16 weight", "the kernels want an unknown weight"),
    ("given pointer", "a line of kernels.txt cannot be read: given pointer"),
    ("surprise 1", "a line of kernels.txt cannot be read: surprise 1"),
])  # fmt: skip
def test_a_description_that_it_does_not_understand_is_refused(line, reason, library, tmp_path):
    (tmp_path / "kernels.txt").write_text(f"kernel k 32 0 0 fixed 1 1 0\n{line}\n")
    with pytest.raises(RuntimeError, match=reason):
        library.load(tmp_path)


def test_a_missing_folder_is_named(library, tmp_path):
    with pytest.raises(RuntimeError, match=rf"cannot read {tmp_path}/none/kernels.txt"):
        library.load(tmp_path / "none")
