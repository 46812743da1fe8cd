// Products of matrices by cuBLASLt, of any version from 11 on. It is opened at run time: the one that the process has already
// (PyTorch's), else the newest that the loader finds.
#pragma once
#include <cstddef>

extern "C" {

enum { PENSIEVE_PRODUCT_WORKSPACE = 32 << 20 };  // bytes, for cuBLAS

// y [tokens, outputs] = x [tokens, inputs] times the transposed weight [outputs, inputs], plus bias [outputs] where it is not
// null, and 0 where that is negative if relu is 1. All are of one PensieveType; sums are in float32. Returns 0, or 1:
// pensieve_error says why. The work is enqueued on the CUstream. A stream that captures must have seen these sizes before,
// since cuBLAS loads its kernels when they are first needed. Algorithms are chosen once for each shape.
int pensieve_product(int type, int tokens, int inputs, int outputs, void const* x, void const* weight, void const* bias, int relu,
                     void* y, void* workspace, void* stream);
}
