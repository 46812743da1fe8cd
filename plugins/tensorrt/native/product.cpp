#include "product.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "engine.h"
#include "error.h"

namespace {

// Of cuBLAS's interface, which has kept these numbers since version 11.
enum { OP_N = 0, OP_T = 1, R_32F = 0, R_16F = 2, R_16BF = 14, COMPUTE_32F = 68, DEFAULT_ALGORITHM = -1 };

void* opened() {
  for (int const already : {RTLD_NOLOAD, 0})
    for (char const* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so.11"})
      if (void* library = dlopen(name, RTLD_NOW | already)) return library;
  throw std::runtime_error("there is no cuBLAS: install CUDA's, or PyTorch's");
}

template <class Function>
Function* function(char const* name) {
  static void* const library = opened();
  void* const found = dlsym(library, name);
  if (!found) throw std::runtime_error("cuBLAS has no " + std::string(name));
  return reinterpret_cast<Function*>(found);
}

void check(int status, char const* what) {
  if (status) throw std::runtime_error(std::string("cuBLAS cannot ") + what + ": status " + std::to_string(status));
}

// Of one thread, for the device that was active when it was made. It lives as long as the process.
struct Handle {
  void* handle = nullptr;
  Handle() { check(function<int(void**)>("cublasCreate_v2")(&handle), "start"); }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) int pensieve_product(int type, int tokens, int inputs, int outputs, void const* x, void const* weight, void* y, void* workspace, void* stream) {
  return pensieve::guarded([&] {
    static auto* const set_stream = function<int(void*, void*)>("cublasSetStream_v2");
    static auto* const set_workspace = function<int(void*, void*, size_t)>("cublasSetWorkspace_v2");
    static auto* const multiply = function<int(void*, int, int, int, int, int, void const*, void const*, int, int, void const*, int, int, void const*, void*, int, int, int, int)>("cublasGemmEx");
    thread_local Handle const own;
    check(set_stream(own.handle, stream), "take a stream");
    check(set_workspace(own.handle, workspace, PENSIEVE_PRODUCT_WORKSPACE), "take a workspace");  // a new stream forgets it
    int const kind = type == PENSIEVE_FLOAT16 ? R_16F : type == PENSIEVE_BFLOAT16 ? R_16BF : R_32F;
    float const one = 1, zero = 0;
    // cuBLAS counts columns first: to it the rows of y are columns.
    check(multiply(own.handle, OP_T, OP_N, outputs, tokens, inputs, &one, weight, kind, inputs, x, kind, inputs, &zero, y, kind, outputs, COMPUTE_32F, DEFAULT_ALGORITHM), "multiply");
  });
}
