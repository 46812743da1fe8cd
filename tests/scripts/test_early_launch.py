"""The experiment with early launches: its kernels compile for Hopper, and wait before they do anything."""

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.plugins.kernel_cases import CUDA, INTERPRETED

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "experiments"))
import early_launch
import triton
from early_launch import Twin, TwinAhead, Way
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pensieve.plugins import attention_kernel, kv_write_kernel, norm_kernel

pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRETED or CUDA, reason="compiled on the CPU, for a GPU")]

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
ROWS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 32, 5120, 40, 10, 128
MEMORY = re.compile(r"griddepcontrol\.\w+|(?:ld|st)\.global|atom|cp\.async\.bulk\.prefetch|cp\.async|prefetch")
FETCHES = {"prefetch", "cp.async.bulk.prefetch"}


class Compiled:
    """A kernel that is compiled where it would be launched; `made` keeps what becomes of it."""

    def __init__(self, kernel):
        self.kernel, self.made = kernel, None

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *arguments, **more):
        names = self.kernel.arg_names
        given = dict(zip(names, arguments, strict=False)) | {name: more[name] for name in more if name in names}
        types, constants, aligned = {}, {}, {}
        for parameter in self.kernel.params:
            name, value, at = parameter.name, given[parameter.name], (parameter.num,)
            if parameter.is_constexpr or value is None:
                types[name], constants[at] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                types[name], aligned[at] = TYPES[value.dtype], [["tt.divisibility", 16]]
            else:
                types[name] = "fp32" if isinstance(value, float) else "i32"
                if value % 16 == 0:
                    aligned[at] = [["tt.divisibility", 16]]
        options = {name: value for name, value in more.items() if name not in names and value is not None}
        source = ASTSource(self.kernel, types, constants, aligned)
        self.made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def tensor(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def normalise():
    norm_kernel.add_norm(tensor(ROWS, HIDDEN), tensor(ROWS, HIDDEN), tensor(HIDDEN), None, 1e-5, True)


def gate():
    norm_kernel.silu_gate(tensor(ROWS, 27648))


def write():
    heads = tensor(ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    rotary, slots = tensor(ROWS, HEAD_DIM, dtype=torch.float32), tensor(ROWS, dtype=torch.int32)
    kv_write_kernel.write_kv(*heads, rotary, slots, tensor(2, 2, 2, KV_HEADS, 32, HEAD_DIM), 1)


def attend():
    capacity = early_launch.Capacity(ROWS, ROWS, early_launch.CONTEXT)
    work = early_launch.make_work_list(capacity, HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, device="cpu")
    work.longest = 1
    q, table = tensor(ROWS, HEADS, HEAD_DIM), tensor(ROWS, 35, dtype=torch.int32)
    attention_kernel.multi_token_attention(q, table, tensor(2, 2, 2, KV_HEADS, 32, HEAD_DIM), 1, 0.1, work)


@pytest.mark.parametrize("way", [Way(False), Way(True), Way(True, 8)], ids=str)
@pytest.mark.parametrize(
    "module, name, launch, loads",
    [
        (norm_kernel, "_norm", normalise, 0),
        (norm_kernel, "_silu_gate", gate, 0),
        (kv_write_kernel, "_write_kv", write, 0),
        (attention_kernel, "_attend", attend, 5),  # items listed, three words of one, its slots
    ],
)
def test_a_twin_waits_before_it_does_anything(monkeypatch, module, name, launch, loads, way):
    twin = Compiled(getattr(early_launch, f"{name}_twin"))
    leads_to_a_product = module is norm_kernel
    stand_in = TwinAhead(twin, way, [tensor(7680, HIDDEN)], 132) if leads_to_a_product else Twin(twin, way)
    monkeypatch.setattr(module, name, stand_in)
    launch()

    code = twin.made.asm["ptx"]
    assert twin.made.asm["cubin"] and twin.made.metadata.launch_pdl == way.early
    accesses = MEMORY.findall(code)
    wait = accesses.index("griddepcontrol.wait")
    assert accesses[wait + 1] == "griddepcontrol.launch_dependents"
    assert len([access for access in accesses if access.startswith("griddepcontrol")]) == 2
    before, after = accesses[:wait], accesses[wait + 2 :]
    assert set(before) <= FETCHES | {"ld.global"} and before.count("ld.global") == loads
    assert ("cp.async.bulk.prefetch" in before) == bool(leads_to_a_product and way.ahead)
    assert {"ld.global", "st.global"} <= set(after) and not FETCHES & set(after)


@pytest.mark.parametrize("name, launch", [("_norm", normalise), ("_silu_gate", gate)])
def test_the_products_own_kernels_do_not_wait(monkeypatch, name, launch):
    kernel = Compiled(getattr(norm_kernel, name))
    monkeypatch.setattr(norm_kernel, name, kernel)
    launch()
    assert "griddepcontrol" not in kernel.made.asm["ptx"]
