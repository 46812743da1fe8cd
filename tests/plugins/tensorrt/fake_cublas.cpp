// Stands for cuBLASLt where there is no GPU: it multiplies on the CPU, in float32 alone, and requires what the library promises.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>

struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t stride;
};
struct Description {
  std::map<int, uint64_t> set;
};
static size_t workspace = 0;
static int asked = 0;

extern "C" {
int fake_asked() { return asked; }  // how often an algorithm was asked for
int cublasLtCreate(void** handle) { *handle = &workspace; return 0; }
int cublasLtMatmulDescCreate(Description** made, int compute, int scale) { *made = new Description; return compute == 68 && scale == 0 ? 0 : 7; }
int cublasLtMatmulDescSetAttribute(Description* description, int attribute, void const* value, size_t size) {
  std::memcpy(&description->set[attribute], value, size);
  return 0;
}
int cublasLtMatrixLayoutCreate(Layout** made, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  *made = new Layout{type, rows, columns, stride};
  return 0;
}
int cublasLtMatmulPreferenceCreate(void** made) { *made = &workspace; return 0; }
int cublasLtMatmulPreferenceDestroy(void*) { return 0; }
int cublasLtMatmulPreferenceSetAttribute(void*, int attribute, void const* value, size_t size) {
  if (attribute == 1) std::memcpy(&workspace, value, size);
  return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void*, Description const*, Layout const* a, Layout const*, Layout const*, Layout const*, void*, int wanted, uint64_t* result, int* found) {
  asked++;
  *result = 77;
  *found = a->type == 0 && wanted == 1 && workspace == 32 << 20;
  return 0;
}
// D [m, n] = op(A) B, column-major: A is transposed, alpha is 1, beta 0.
int cublasLtMatmul(void*, Description const* description, float const* alpha, float const* a, Layout const* of_a, float const* b, Layout const* of_b, float const* beta, float const*, Layout const*, float* d, Layout const* of_d, uint64_t const* algorithm, void* memory, size_t size, void* stream) {
  auto const& set = description->set;
  int const epilogue = static_cast<int>(set.at(7));
  if (set.at(3) != 1 || *alpha != 1 || *beta != 0 || *algorithm != 77 || !memory || size != workspace || !stream) return 7;
  float const* const bias = epilogue & 4 ? reinterpret_cast<float const*>(set.at(8)) : nullptr;
  for (uint64_t j = 0; j < of_d->columns; j++)
    for (uint64_t i = 0; i < of_d->rows; i++) {
      float sum = bias ? bias[i] : 0;
      for (uint64_t p = 0; p < of_a->rows; p++) sum += a[p + i * of_a->stride] * b[p + j * of_b->stride];
      d[i + j * of_d->stride] = epilogue & 2 && sum < 0 ? 0 : sum;
    }
  return 0;
}
}
