// Stands for cuBLAS where there is no GPU: it multiplies on the CPU, in float32 alone, and requires what the library promises.
#include <cstdint>
#include <cstddef>

static bool streamed = false, given_memory = false;

extern "C" {
int cublasCreate_v2(void** handle) { *handle = &streamed; return 0; }
int cublasSetStream_v2(void* handle, void* stream) { streamed = handle && stream; given_memory = false; return 0; }
int cublasSetWorkspace_v2(void*, void* memory, size_t size) { given_memory = memory && size == 32 << 20; return 0; }
// C [m, n] = op(A) op(B), column-major: here A is transposed, and alpha is 1, beta 0.
int cublasGemmEx(void*, int of_a, int of_b, int m, int n, int k, void const* alpha, void const* a, int type_a, int lda, void const* b, int type_b, int ldb, void const* beta, void* c, int type_c, int ldc, int compute, int algorithm) {
  bool const known = of_a == 1 && of_b == 0 && type_a == 0 && type_b == 0 && type_c == 0 && compute == 68 && algorithm == -1;
  if (!known || !streamed || !given_memory || *static_cast<float const*>(alpha) != 1 || *static_cast<float const*>(beta) != 0) return 7;
  for (int j = 0; j < n; j++)
    for (int i = 0; i < m; i++) {
      float sum = 0;
      for (int p = 0; p < k; p++) sum += static_cast<float const*>(a)[p + i * lda] * static_cast<float const*>(b)[p + j * ldb];
      static_cast<float*>(c)[i + j * ldc] = sum;
    }
  return 0;
}
}
