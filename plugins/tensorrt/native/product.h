// Products of matrices by cuBLAS, of any version from 11 on. It is opened at run time: the one that the process has already
// (PyTorch's), else the newest that the loader finds.
#pragma once
#include <cstddef>

extern "C" {

enum { PENSIEVE_PRODUCT_WORKSPACE = 32 << 20 };  // bytes; what cuBLAS takes for itself on compute capability 9.0

// y [tokens, outputs] = x [tokens, inputs] times the transposed weight [outputs, inputs], all of one PensieveType. Sums are in
// float32. Returns 0, or 1: pensieve_error says why. The work is enqueued on the CUstream. A stream that captures must have
// seen these sizes before, since cuBLAS loads its kernels when they are first needed.
int pensieve_product(int type, int tokens, int inputs, int outputs, void const* x, void const* weight, void* y, void* workspace, void* stream);
}
