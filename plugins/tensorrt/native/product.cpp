#include "product.h"

#include <dlfcn.h>

#include <array>
#include <map>
#include <stdexcept>
#include <string>

#include "engine.h"
#include "error.h"

namespace {

// Of cuBLASLt's interface, which has kept these numbers and shapes since version 11.
enum { OP_T = 1, R_32F = 0, R_16F = 2, R_16BF = 14, COMPUTE_32F = 68 };
enum { DESCRIPTION_TRANSA = 3, DESCRIPTION_EPILOGUE = 7, DESCRIPTION_BIAS = 8, PREFERENCE_WORKSPACE = 1 };
enum { EPILOGUE_NONE = 1, EPILOGUE_RELU = 2, EPILOGUE_BIAS = 4 };  // the last two together: RELU_BIAS, 6
struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

void* opened() {
  for (int const already : {RTLD_NOLOAD, 0})
    for (char const* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11"})
      if (void* library = dlopen(name, RTLD_NOW | already)) return library;
  throw std::runtime_error("there is no cuBLAS: install CUDA's, or PyTorch's");
}

template <class... Arguments>
void call(char const* name, Arguments... arguments) {
  static void* const library = opened();
  auto* const function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
  if (!function) throw std::runtime_error("cuBLAS has no " + std::string(name));
  if (int const status = function(arguments...)) throw std::runtime_error(std::string(name) + " failed with status " + std::to_string(status));
}

// A product of one shape, as cuBLAS wants it described, and the algorithm that it proposes. It lives as long as its thread.
struct Product {
  void *description, *weight, *x, *y;
  Heuristic chosen{};

  Product(void* handle, int type, int tokens, int inputs, int outputs, void const* bias, bool relu) {
    int const kind = type == PENSIEVE_FLOAT16 ? R_16F : type == PENSIEVE_BFLOAT16 ? R_16BF : R_32F, transposed = OP_T;
    int const epilogue = bias || relu ? (bias ? EPILOGUE_BIAS : 0) + (relu ? EPILOGUE_RELU : 0) : EPILOGUE_NONE;
    // cuBLAS counts columns first: to it the rows of x, of y and of the weight are columns.
    call("cublasLtMatmulDescCreate", &description, int{COMPUTE_32F}, int{R_32F});
    set(DESCRIPTION_TRANSA, transposed);
    set(DESCRIPTION_EPILOGUE, epilogue);
    if (bias) set(DESCRIPTION_BIAS, bias);
    layout(&weight, kind, inputs, outputs);
    layout(&x, kind, inputs, tokens);
    layout(&y, kind, outputs, tokens);
    void* preference;
    size_t const most = PENSIEVE_PRODUCT_WORKSPACE;
    int found = 0;
    call("cublasLtMatmulPreferenceCreate", &preference);
    call("cublasLtMatmulPreferenceSetAttribute", preference, int{PREFERENCE_WORKSPACE}, static_cast<void const*>(&most), sizeof most);
    call("cublasLtMatmulAlgoGetHeuristic", handle, description, weight, x, y, y, preference, 1, &chosen, &found);
    call("cublasLtMatmulPreferenceDestroy", preference);
    if (!found) throw std::runtime_error("cuBLAS has no algorithm for a product");
  }
  template <class Value>
  void set(int attribute, Value const& value) const {
    call("cublasLtMatmulDescSetAttribute", description, attribute, static_cast<void const*>(&value), sizeof value);
  }
  static void layout(void** made, int kind, int rows, int columns) {
    call("cublasLtMatrixLayoutCreate", made, kind, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), static_cast<int64_t>(rows));
  }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) int pensieve_product(int type, int tokens, int inputs, int outputs, void const* x, void const* weight, void const* bias, int relu, void* y, void* workspace, void* stream) {
  return pensieve::guarded([&] {
    thread_local void* const handle = [] { void* made; call("cublasLtCreate", &made); return made; }();
    thread_local std::map<std::array<int, 6>, Product> products;
    std::array<int, 6> const shape{type, tokens, inputs, outputs, bias ? 1 : 0, relu};
    auto found = products.find(shape);
    if (found == products.end()) found = products.emplace(shape, Product(handle, type, tokens, inputs, outputs, bias, relu)).first;
    Product const& one = found->second;
    if (bias) one.set(DESCRIPTION_BIAS, bias);
    float const whole = 1, none = 0;
    call("cublasLtMatmul", handle, one.description, static_cast<void const*>(&whole), weight, one.weight, x, one.x, static_cast<void const*>(&none), static_cast<void const*>(y), one.y, y, one.y, &one.chosen.algorithm, workspace, size_t{PENSIEVE_PRODUCT_WORKSPACE}, stream);
  });
}
