"""Every launch of the library is the JIT's: kernel, grid, threads, memory, attributes, values."""

from __future__ import annotations

import ctypes

import pytest
import torch

pytest.importorskip("triton")
from pensieve.builder.tensorrt.network import (
    ALL_REDUCE,
    ATTENTION,
    NORM,
    PRODUCT,
    SILU_GATE,
    WRITE_KV,
    Attributes,
)
from pensieve.builder.tensorrt.package import step_of
from pensieve.plugins.attention import fp8_pool, kv_write_kernel
from pensieve.plugins.attention import kernel as attention_kernel
from pensieve.plugins.attention.work_list import Capacity
from pensieve.plugins.linear import norm_kernel
from pensieve.plugins.tensorrt import kernels as ahead_of_time
from pensieve.plugins.tensorrt.kernels import Norms
from pensieve.plugins.tensorrt.library import AllReduce

from ..recording_driver import STREAM, RecordingDriver
from .launching import HERE, Library, compile_cpp, headers, needs_compilers, needs_headers

pytestmark = needs_compilers
LAYERS = 3
FLOAT32, FLOAT16 = 0, 1  # `PensieveType`
NORMS = {  # of the shapes below
    "opt": Norms(5120, 1e-5, False, True, True),
    "llama": Norms(5120, 1e-6, True, True, False),
    "one key head": Norms(400, 1e-5, False, False, False),
    "float32": Norms(256, 1e-5, True, True, False),
}
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
    def __init__(self, shape, folder, silu_width=0, fp8=False):
        self.heads, self.kv_heads, self.head_dim, chunk, self.dims, self.dtype, self.capacity = (
            SHAPES[shape]
        )
        kind = fp8_pool.DTYPE if fp8 else self.dtype
        width = fp8_pool.pool_width(self.head_dim, kind)
        self.pool = torch.zeros(2, LAYERS, 2, self.kv_heads, chunk, width, dtype=kind)
        self.norms = NORMS[shape]
        heads = (self.heads, self.kv_heads, self.head_dim, self.dtype)
        self.work = attention_kernel.make_work_list(self.capacity, *heads, "cpu")
        ahead_of_time.write_kernels(
            folder, self.pool, self.work, self.dtype, self.dims, self.norms, silu_width
        )

    def batch(self, tokens, blocks):
        qkv = torch.zeros(tokens, self.heads + 2 * self.kv_heads, self.head_dim, dtype=self.dtype)
        rotary, slots = torch.zeros(tokens, self.dims), torch.zeros(tokens, dtype=torch.int32)
        return qkv, rotary, slots, torch.zeros(3, blocks, dtype=torch.int32)

    def norm_inputs(self, tokens):
        """x, y, weight and bias."""
        x, y = torch.zeros(2, tokens, self.norms.size, dtype=self.dtype)
        given = self.norms.weighted, self.norms.biased
        return (
            x,
            y,
            *(torch.zeros(self.norms.size, dtype=self.dtype) if one else None for one in given),
        )


def assert_same(ours, triton):
    """The launches, but for Triton's memory of its own, which nothing needs."""
    assert len(ours) == len(triton) > 0
    for one, other in zip(ours, triton, strict=True):
        scratch = one.values[len(other.values) :]
        assert one._replace(values=one.values[: len(other.values)]) == other
        assert not any(scratch)


@pytest.mark.parametrize("fp8", [False, True], ids=["as the values", "fp8 KV"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_launch_is_the_jits(shape, fp8, library, jit, tmp_path):
    case = Case(shape, tmp_path, fp8=fp8)
    kernels = library.load(tmp_path)
    jit.take()
    for tokens in sorted({1, 2, 16, 17, 64, case.capacity.tokens}):
        for layer, blocks, longest in (
            (0, 1, tokens),
            (1, 16, 1),
            (LAYERS - 1, 33, case.capacity.tokens),
        ):
            case.work.longest = longest
            qkv, rotary, slots, block_table = case.batch(tokens, blocks)
            parts = qkv.split((case.heads, case.kv_heads, case.kv_heads), dim=1)
            rotated = kv_write_kernel.write_kv(*parts, rotary, slots, case.pool, layer)
            scale = case.head_dim**-0.5
            o = attention_kernel.multi_token_attention(
                rotated, block_table, case.pool, layer, scale, case.work
            )
            step = step_of(case.pool, case.work, [0] * LAYERS)
            library.write_kv(kernels, step, layer, qkv, rotary, slots, rotated)
            library.attend(kernels, step, layer, rotated, block_table, o)
            assert_same(library.launched(), jit.take())


@pytest.mark.parametrize("shape", SHAPES)
def test_every_launch_of_a_norm_is_the_jits(shape, library, jit, tmp_path):
    case = Case(shape, tmp_path)
    kernels = library.load(tmp_path)
    eps, rms = case.norms.eps, case.norms.rms
    for tokens in (1, 2, 16, 17, 4096):
        x, y, weight, bias = case.norm_inputs(tokens)
        jit.take()
        normed = norm_kernel.norm(x, weight, bias, eps, rms)
        library.norm(kernels, x, None, weight, bias, normed, None)
        assert_same(library.launched(), jit.take())
        normed, total = norm_kernel.add_norm(x, y, weight, bias, eps, rms)
        library.norm(kernels, x, y, weight, bias, normed, total)
        assert_same(library.launched(), jit.take())


@pytest.mark.parametrize("width", [13824, 704])
def test_every_launch_of_a_gate_is_the_jits(width, library, jit, tmp_path):
    Case("llama", tmp_path, width)
    kernels = library.load(tmp_path)
    for tokens in (1, 3, 64, 4096):
        jit.take()
        x = torch.zeros(tokens, 2 * width, dtype=torch.bfloat16)
        library.silu_gate(kernels, x, norm_kernel.silu_gate(x))
        (ours,), (triton,) = library.launched(), jit.take()
        assert (
            ours.grid == triton.grid
            and ours.image == triton.image
            and ours.values[2:4] == triton.values[2:4]
        )


@pytest.mark.parametrize("relu", [0, 1])
@pytest.mark.parametrize("bias", [None, torch.randn(7)], ids=["no bias", "bias"])
def test_a_product_is_of_rows_and_transposed_weights(bias, relu, library):
    library.needs_fake_cublas()
    x = torch.randn(3, 5)
    weight = torch.randn(7, 5)
    y = torch.empty(3, 7)
    workspace = torch.empty(1)
    before = library.cublas.fake_asked()
    for _ in range(2):  # the algorithm is asked for once
        library.product(FLOAT32, x, weight, bias, relu, y, workspace)
        exact = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(y, exact.relu() if relu else exact)
    assert library.cublas.fake_asked() == before + 1
    # the fake has no float16
    with pytest.raises(RuntimeError, match="cuBLAS has no algorithm for a product"):
        library.product(FLOAT16, x, weight, bias, relu, y, workspace)


@pytest.fixture
def small(jit, tmp_path):
    """A case whose kernels are compiled, and rows of one token."""
    return Case("float32", tmp_path)


def write_kv_of(case, library, kernels, step, layer=1, tokens=2):
    qkv, rotary, slots, _ = case.batch(tokens, 1)
    library.write_kv(
        kernels, step, layer, qkv, rotary, slots, torch.zeros(tokens, case.heads, case.head_dim)
    )


@pytest.mark.parametrize("capturing, flags", [(False, 0), (True, 1)])
def test_a_layer_waits_for_its_gate_before_it_is_touched(
    capturing, flags, small, library, tmp_path
):
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
    shared = [
        int(line.split()[3])
        for line in (tmp_path / "kernels.txt").read_text().splitlines()
        if "kernel" in line
    ]
    attributes = [line.split() for line in library.record() if line.startswith("attribute")]
    expected = [
        ["attribute", str(i), "8", str(size)]
        for i, size in enumerate(shared, 1)
        if size > 48 * 1024
    ]
    assert attributes == expected and expected


def test_a_pointer_of_another_alignment_is_refused(small, library, tmp_path):
    kernels = library.load(tmp_path)
    step = step_of(small.pool, small.work, [0] * LAYERS)
    step.pool += 4
    with pytest.raises(
        RuntimeError,
        match=r"_write_kv cannot take \d+ for pool: it was compiled for other alignments",
    ):
        write_kv_of(small, library, kernels, step)


def test_a_layer_beyond_the_pool_is_refused(small, library, tmp_path):
    kernels = library.load(tmp_path)
    with pytest.raises(RuntimeError, match="the pool has no layer 3"):
        write_kv_of(
            small, library, kernels, step_of(small.pool, small.work, [0] * LAYERS), layer=LAYERS
        )


@needs_headers
@pytest.mark.parametrize("folder", headers(), ids=str)
@pytest.mark.parametrize("shape", ["opt", "one key head"])
def test_plugins_launch_the_same(shape, folder, library, jit, tmp_path):
    compile_cpp(HERE / "plugin_harness.cpp", tmp_path / "plugin.so", f"-isystem{folder}")
    plugins = ctypes.CDLL(str(tmp_path / "plugin.so"))
    case = Case(shape, tmp_path, silu_width=32)
    kernels = library.load(tmp_path)
    qkv, rotary, slots, block_table = case.batch(7, 9)
    q, o = (torch.zeros(7, case.heads, case.head_dim, dtype=case.dtype) for _ in range(2))
    x, y, weight, bias = case.norm_inputs(7)
    normed, total = torch.zeros_like(x), torch.zeros_like(x)

    def enqueue(attributes, inputs, *out):
        inputs = [x for x in inputs if x is not None]
        shapes = [number for x in inputs for number in (x.dim(), *x.shape)]
        addresses = [
            (ctypes.c_void_p * len(some))(*(x.data_ptr() for x in some)) for some in (inputs, out)
        ]
        given = (
            (ctypes.c_int32 * len(attributes))(*attributes),
            len(inputs),
            (ctypes.c_int64 * len(shapes))(*shapes),
        )
        return plugins.harness_enqueue(*given, *addresses, ctypes.c_void_p(STREAM))

    def of_norm(added):
        return Attributes(
            NORM, FLOAT16, added=added, weighted=weight is not None, biased=bias is not None
        )

    heads = (case.heads, case.kv_heads, case.head_dim, case.dims)
    batches = (
        (
            Attributes(WRITE_KV, FLOAT16, *heads),
            [qkv.flatten(1), rotary if case.dims else None, slots],
            q,
        ),
        (Attributes(ATTENTION, FLOAT16, *heads), [q.flatten(1), block_table], o),
        (of_norm(added=0), [x, weight, bias], normed),
        (of_norm(added=1), [x, y, weight, bias], normed, total),
    )
    # the thread has not said what to run on
    assert [enqueue(*batch) for batch in batches] == [1] * 4
    step = step_of(case.pool, case.work, [0] * LAYERS)
    plugins.pensieve_run_on(kernels, ctypes.byref(step), 2)
    assert [enqueue(*batch) for batch in batches] == [0] * 4
    through_plugins = library.launched()
    library.write_kv(kernels, step, 2, qkv, rotary, slots, q)
    library.attend(kernels, step, 2, q, block_table, o)
    library.norm(kernels, x, None, weight, bias, normed, None)
    library.norm(kernels, x, y, weight, bias, normed, total)
    assert through_plugins == library.launched() != []
    sums = []

    def add(x, total, tokens, stream):
        sums.append((x, total, tokens, stream))
        return len(sums) - 1

    total_of_ranks = Attributes(ALL_REDUCE, FLOAT16), [x], total
    assert enqueue(*total_of_ranks) == 1  # the step is of one rank
    step.all_reduce = AllReduce(add)
    # what the function returns is the plugin's result
    assert [enqueue(*total_of_ranks) for _ in range(2)] == [0, 1]
    assert sums == [(x.data_ptr(), total.data_ptr(), 7, STREAM)] * 2
    gate = Attributes(SILU_GATE, FLOAT16, outputs=32)
    halves = torch.zeros(7, 64).half()
    assert enqueue(gate, [halves], torch.zeros(7, 32).half()) == 0
    assert len(library.launched()) == 1
    library.needs_fake_cublas()
    a = torch.randn(3, 5)
    b = torch.randn(7, 5)
    c = torch.randn(1, 7)
    d = torch.zeros(3, 7)
    assert enqueue(Attributes(PRODUCT, FLOAT32, outputs=7, biased=1, relu=1), [a, b, c], d) == 0
    torch.testing.assert_close(d, (a @ b.T + c).relu())


@pytest.mark.parametrize("line, reason", [
    ("given pointer 16 scale", "the kernels want an unknown scale"),
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
