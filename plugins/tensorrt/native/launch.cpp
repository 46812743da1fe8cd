#include "launch.h"

#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "error.h"

// cuda.h gives some functions other names by macros: the inner macro sees the name that the library exports.
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define DRIVER(function) ([] { static auto const found = reinterpret_cast<decltype(&function)>(symbol(TEXT(function))); return found; }())

std::string& pensieve::last_error() {
  thread_local std::string text;
  return text;
}

namespace {

using pensieve::guarded;

void* symbol(char const* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) throw std::runtime_error("no NVIDIA driver: " + std::string(dlerror()));
  void* found = dlsym(library, name);
  if (!found) throw std::runtime_error("the NVIDIA driver is too old: it has no " + std::string(name));
  return found;
}

void check(CUresult result, std::string const& what) {
  if (result == CUDA_SUCCESS) return;
  char const* text = nullptr;
  DRIVER(cuGetErrorString)(result, &text);
  throw std::runtime_error("CUDA cannot " + what + ": " + (text ? text : std::to_string(result)));
}

// What a launch is given, by the names of the kernels' parameters.
enum Given { X, Y, WEIGHT, BIAS, NORMED, TOTAL, OUT, COUNT, Q, K, V, ROTARY, SLOTS, POOL, ROTATED, O, PARTIAL, LSE, BLOCK_TABLE, ITEMS, ARRIVALS, COUNTERS, COVERED, LAYER_OFFSET, TOKENS, BLOCKS, GIVEN };
std::array<char const*, GIVEN> const NAMES{"x", "y", "weight", "bias", "normed", "total", "out", "count", "q", "k", "v", "rotary", "slots", "pool", "rotated", "o", "partial", "lse", "block_table", "items", "arrivals", "counters", "covered", "layer_offset", "tokens", "blocks"};
using Values = std::array<uint64_t, GIVEN>;

uint64_t address(void const* pointer) { return reinterpret_cast<uint64_t>(pointer); }

struct Parameter {
  bool given, narrow;  // narrow: of 32 bits
  int name;  uint64_t value;      // where not
  uint64_t aligned;
};

struct Kernel {
  std::string name, grid;
  unsigned threads, shared, dependent, factor, rows;
  int kind;
  std::vector<Parameter> parameters;
  CUmodule module = nullptr;
  CUfunction function = nullptr;
};

std::string content(std::string const& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

struct PensieveKernels {
  std::vector<Kernel> kernels;
  std::vector<std::pair<long, std::vector<size_t>>> attend;  // from the most rows to the fewest
  size_t norm = 0, add_norm = 0, silu_gate = 0, write_kv = 0;
  long layers = 0, layer_stride = 0, heads = 0, kv_heads = 0, head_dim = 0, item_bytes = 0, rotary_dims = 0;

  explicit PensieveKernels(std::string const& folder) {
    std::istringstream lines(content(folder + "/kernels.txt"));
    for (std::string line; std::getline(lines, line);) read(line);
    for (size_t i = 0; i < kernels.size(); i++) load(kernels[i], folder + "/" + std::to_string(i));
  }
  PensieveKernels(PensieveKernels const&) = delete;
  ~PensieveKernels() {
    for (auto const& kernel : kernels)
      if (kernel.module) DRIVER(cuModuleUnload)(kernel.module);
  }

  void read(std::string const& line) {
    std::istringstream words(line);
    std::string what;
    words >> what;
    if (what == "pool") {
      words >> layers >> layer_stride;
    } else if (what == "shape") {
      words >> heads >> kv_heads >> head_dim >> item_bytes >> rotary_dims;
    } else if (what == "kernel") {
      Kernel k;
      words >> k.name >> k.threads >> k.shared >> k.dependent >> k.grid >> k.factor >> k.rows >> k.kind;
      kernels.push_back(k);
    } else if (what == "value" || what == "given") {
      Parameter p{what == "given", false, 0, 0, 1};
      std::string type, name;
      words >> type >> p.aligned;
      p.narrow = type == "i32" || type == "fp32";
      if (p.given && words >> name) {
        auto const found = std::find(NAMES.begin(), NAMES.end(), name);
        if (found == NAMES.end()) throw std::runtime_error("the kernels want an unknown " + name);
        p.name = static_cast<int>(found - NAMES.begin());
      } else {
        words >> p.value;
      }
      if (kernels.empty()) words.setstate(std::ios::failbit);
      if (words) kernels.back().parameters.push_back(p);
    } else if (what == "norm") {
      words >> norm;
    } else if (what == "add_norm") {
      words >> add_norm;
    } else if (what == "silu_gate") {
      words >> silu_gate;
    } else if (what == "write_kv") {
      words >> write_kv;
    } else if (what == "attend") {
      attend.emplace_back();
      words >> attend.back().first;
      for (size_t number; words >> number;) attend.back().second.push_back(number);
      words.clear();
    } else {
      words.setstate(std::ios::failbit);
    }
    if (!words) throw std::runtime_error("a line of kernels.txt cannot be read: " + line);
  }

  static void load(Kernel& k, std::string const& path) {
    std::string const cubin = content(path + ".cubin");
    if (DRIVER(cuModuleLoadData)(&k.module, cubin.data()) != CUDA_SUCCESS) {  // of another driver or GPU
      std::string const ptx = content(path + ".ptx");
      check(DRIVER(cuModuleLoadData)(&k.module, ptx.c_str()), "load the kernel " + k.name);
    }
    check(DRIVER(cuModuleGetFunction)(&k.function, k.module, k.name.c_str()), "find the kernel " + k.name);
    if (k.shared <= 48 * 1024) return;  // more has to be asked for
    check(DRIVER(cuFuncSetCacheConfig)(k.function, CU_FUNC_CACHE_PREFER_SHARED), "set the cache of " + k.name);
    check(DRIVER(cuFuncSetAttribute)(k.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(k.shared)), "give " + k.name + " shared memory");
  }

  static unsigned grid(Kernel const& k, unsigned tokens) {
    if (k.grid == "tokens") return tokens * k.factor;
    return k.grid == "rows" ? (tokens + k.factor - 1) / k.factor : k.factor;
  }

  void launch(Kernel const& k, Values const& values, CUstream stream) const {
    std::vector<uint64_t> held;
    std::vector<void*> arguments;
    held.reserve(k.parameters.size());
    for (auto const& p : k.parameters) {
      uint64_t const value = p.given ? values[static_cast<size_t>(p.name)] : p.value;
      if (p.given && (value % p.aligned || (p.narrow && value > INT32_MAX)))
        throw std::runtime_error(k.name + " cannot take " + std::to_string(value) + " for " + NAMES[static_cast<size_t>(p.name)] + ": it was compiled for other alignments or sizes");
      held.push_back(value);  // little-endian: the first bytes are those of a narrow one
      arguments.push_back(&held.back());
    }
    CUlaunchAttribute dependent{};
    dependent.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    dependent.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config{};
    config.gridDimX = grid(k, static_cast<unsigned>(values[TOKENS]));
    config.gridDimY = k.rows;
    config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.blockDimX = k.threads;
    config.sharedMemBytes = k.shared;
    config.hStream = stream;
    config.attrs = &dependent;
    config.numAttrs = k.dependent;
    check(DRIVER(cuLaunchKernelEx)(&config, k.function, arguments.data(), nullptr), "launch " + k.name);
  }

  Values values(PensieveStep const& step, int layer, int tokens) const {
    if (layer < 0 || layer >= layers) throw std::runtime_error("the pool has no layer " + std::to_string(layer));
    Values v{};
    v[POOL] = address(step.pool);
    v[TOKENS] = static_cast<uint64_t>(tokens);
    v[LAYER_OFFSET] = static_cast<uint64_t>(layer * layer_stride);
    return v;
  }

  static void pass_gate(PensieveStep const& step, int layer, CUstream stream) {
    if (!step.gates || !step.gates[layer]) return;
    CUstreamCaptureStatus capturing;
    check(DRIVER(cuStreamIsCapturing)(stream, &capturing), "ask whether a stream is captured");
    unsigned const flags = capturing == CU_STREAM_CAPTURE_STATUS_NONE ? CU_EVENT_WAIT_DEFAULT : CU_EVENT_WAIT_EXTERNAL;
    check(DRIVER(cuStreamWaitEvent)(stream, static_cast<CUevent>(step.gates[layer]), flags), "wait for a gate");
  }
};

#define API extern "C" __attribute__((visibility("default")))

API PensieveKernels* pensieve_load_kernels(char const* folder) {
  PensieveKernels* made = nullptr;
  guarded([&] { made = new PensieveKernels(folder); });
  return made;
}

API void pensieve_unload_kernels(PensieveKernels* kernels) { delete kernels; }

API int pensieve_write_kv(PensieveKernels* kernels, PensieveStep const* step, int layer, int tokens, void const* qkv,
                          void const* rotary, void const* slots, void* rotated, void* stream) {
  return guarded([&] {
    auto const queue = static_cast<CUstream>(stream);
    Values v = kernels->values(*step, layer, tokens);
    long const head_bytes = kernels->head_dim * kernels->item_bytes;
    v[Q] = address(qkv);
    v[K] = v[Q] + static_cast<uint64_t>(kernels->heads * head_bytes);
    v[V] = v[K] + static_cast<uint64_t>(kernels->kv_heads * head_bytes);
    v[ROTARY] = address(rotary);
    v[SLOTS] = address(slots);
    v[ROTATED] = address(rotated);
    PensieveKernels::pass_gate(*step, layer, queue);
    if (tokens) kernels->launch(kernels->kernels.at(kernels->write_kv), v, queue);
  });
}

API int pensieve_norm(PensieveKernels* kernels, int tokens, void const* x, void const* y, void const* weight, void const* bias,
                      void* normed, void* total, void* stream) {
  return guarded([&] {
    Values v{};
    v[X] = address(x);
    v[Y] = address(y);
    v[WEIGHT] = address(weight);
    v[BIAS] = address(bias);
    v[NORMED] = address(normed);
    v[TOTAL] = address(total);
    v[COUNT] = v[TOKENS] = static_cast<uint64_t>(tokens);
    kernels->launch(kernels->kernels.at(y ? kernels->add_norm : kernels->norm), v, static_cast<CUstream>(stream));
  });
}

API int pensieve_silu_gate(PensieveKernels* kernels, int tokens, void const* x, void* out, void* stream) {
  return guarded([&] {
    Values v{};
    v[X] = address(x);
    v[OUT] = address(out);
    v[TOKENS] = static_cast<uint64_t>(tokens);
    kernels->launch(kernels->kernels.at(kernels->silu_gate), v, static_cast<CUstream>(stream));
  });
}

API int pensieve_attend(PensieveKernels* kernels, PensieveStep const* step, int layer, int tokens, int blocks,
                        void const* q, void const* block_table, void* o, void* stream) {
  return guarded([&] {
    Values v = kernels->values(*step, layer, tokens);
    v[Q] = address(q);
    v[O] = address(o);
    v[BLOCK_TABLE] = address(block_table);
    v[BLOCKS] = static_cast<uint64_t>(blocks);
    v[PARTIAL] = address(step->partial);
    v[LSE] = address(step->lse);
    v[COUNTERS] = address(step->counters);
    v[COVERED] = address(step->covered);
    long const rows = std::min(tokens, step->longest) * (kernels->heads / kernels->kv_heads);
    auto const& attend = kernels->attend;
    auto const fits = [&](auto const& launches) { return rows >= launches.first; };
    auto const launches = std::find_if(attend.begin(), attend.end(), fits);
    if (launches == attend.end()) throw std::runtime_error("the kernels have no attention");
    for (size_t const number : launches->second) {
      Kernel const& kernel = kernels->kernels.at(number);
      v[ITEMS] = address(step->items[kernel.kind]);
      v[ARRIVALS] = address(step->arrivals[kernel.kind]);
      kernels->launch(kernel, v, static_cast<CUstream>(stream));
    }
  });
}

API char const* pensieve_error() { return pensieve::last_error().c_str(); }
