"""The attention kernel's conversion of codes and exponents of a pool in eight bits (`fp8_pool`) to
numbers."""

from __future__ import annotations

import triton
import triton.language as tl

# the interpreter executes no machine instructions
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# The GPU makes two float16 of two codes, and by way of float32 two bfloat16 of two float16.
_UNPACK = """
    .reg .b16 low, high;
    .reg .b32 a, b;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 a, low;
    cvt.rn.f16x2.e4m3x2 b, high;
"""
_TO_FLOAT16 = tl.constexpr(f"{{{_UNPACK} prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; }}")
_TO_BFLOAT16 = tl.constexpr(f"""{{{_UNPACK}
    .reg .b16 h<4>;
    .reg .f32 f<4>;
    mov.b32 {{h0, h1}}, a;
    mov.b32 {{h2, h3}}, b;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    cvt.f32.f16 f2, h2;
    cvt.f32.f16 f3, h3;
    cvt.rn.bf16x2.f32 $0, f2, f0;
    cvt.rn.bf16x2.f32 $1, f3, f1;
}}""")


@triton.jit
def numbers(codes, kind: tl.constexpr):
    """e4m3 codes, uint8, as numbers of that type."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(kind)


@triton.jit
def scaled_numbers(codes, scale, kind: tl.constexpr):
    """Returns `numbers` times the scale of each row. Exact in bfloat16 and float32; in float16 it
    may overflow."""
    return (codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]).to(kind)


@triton.jit
def number_pairs(words, kind: tl.constexpr):
    """Codes, two in a word (int16), as numbers of that type, float16 or bfloat16: of the low codes,
    of the high codes.

    Two tensors of words' own layout let the compiler read words as it reads numbers of 16 bits. It
    would read single codes of an operand one by one.
    """
    if INTERPRETED:
        return numbers(words.to(tl.uint8), kind), numbers((words >> 8).to(tl.uint8), kind)
    elif kind == tl.float16:
        return tl.inline_asm_elementwise(
            _TO_FLOAT16, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            _TO_BFLOAT16, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )


@triton.jit
def load_scales(exponents, slot, slot_stride, n, end, to_values, CHUNK: tl.constexpr):
    """The scales of a tile's keys and values."""
    at = exponents + slot.to(tl.int64) * slot_stride + n % CHUNK
    of_keys = tl.load(at, mask=n < end, other=0).to(tl.int32)
    of_values = tl.load(at + to_values, mask=n < end, other=0).to(tl.int32)
    return (of_keys << 23).to(tl.float32, bitcast=True), (of_values << 23).to(
        tl.float32, bitcast=True
    )
