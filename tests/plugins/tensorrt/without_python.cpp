// Runs a plan without Python: the library, a plan, compiled kernels and a step's memory are enough.
//
//   without_python FOLDER      FOLDER has `plan`, `kernels/` and `step.txt`, whose lines are
//
//   layers N | longest N
//   input NAME RANK SIZE...    of the plan, at NAME.bin: x, slots, block_table and, with rotary, rotary
//   weights NAME...            of each layer; those of layer L are at L.NAME.bin
//   memory NAME...             of the step, at NAME.bin: pool partial lse counters covered, then items and arrivals of each class
//
// Writes the last layer's output to y.bin, and the pool behind the step to pool.out.bin.
#include <cuda.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../../../plugins/tensorrt/native/engine.h"
#include "../../../plugins/tensorrt/native/launch.h"

extern "C" int pensieve_register_plugins();

static void require(bool done, std::string const& what) {
  if (done) return;
  std::cerr << what << ": " << pensieve_error() << std::endl;
  std::exit(1);
}

static std::string content(std::string const& path) {
  std::ifstream file(path, std::ios::binary);
  require(static_cast<bool>(file), path);
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Memory {
  void* address;
  size_t size;
};

// Filled with NaN (bytes of ones): what is read before it is written spoils the results.
static Memory allocated(size_t size) {
  CUdeviceptr address = 0;
  size_t const least = size ? size : 1;
  require(cuMemAlloc(&address, least) == CUDA_SUCCESS, "cuMemAlloc");
  require(cuMemsetD8(address, 0xff, least) == CUDA_SUCCESS, "cuMemsetD8");
  return {reinterpret_cast<void*>(address), size};
}

static Memory loaded(std::string const& path) {
  std::string const bytes = content(path);
  Memory const memory = allocated(bytes.size());
  if (bytes.empty()) return memory;  // partial results of a step whose contexts need one split only
  require(cuMemcpyHtoD(reinterpret_cast<CUdeviceptr>(memory.address), bytes.data(), bytes.size()) == CUDA_SUCCESS, path);
  return memory;
}

static void saved(Memory const& memory, std::string const& path) {
  std::string bytes(memory.size, '\0');
  require(cuMemcpyDtoH(&bytes[0], reinterpret_cast<CUdeviceptr>(memory.address), bytes.size()) == CUDA_SUCCESS, path);
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

int main(int, char** arguments) {
  std::string const folder = std::string(arguments[1]) + "/";
  CUdevice device;
  CUcontext current;
  CUstream stream;
  require(cuInit(0) == CUDA_SUCCESS && cuDeviceGet(&device, 0) == CUDA_SUCCESS, "no GPU");
  require(cuDevicePrimaryCtxRetain(&current, device) == CUDA_SUCCESS && cuCtxSetCurrent(current) == CUDA_SUCCESS, "no context");
  require(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS, "no stream");
  require(pensieve_register_plugins(), "the plugins are not taken");

  std::string const plan = content(folder + "plan");
  auto* const engine = pensieve_engine_load(plan.data(), plan.size());
  require(engine, "the plan is not loaded");
  auto* const context = pensieve_context_new(engine, 0, allocated(pensieve_engine_memory(engine)).address, stream);
  require(context, "there is no context");
  auto* const kernels = pensieve_load_kernels((folder + "kernels").c_str());
  require(kernels, "the kernels are not loaded");

  int layers = 0;
  PensieveStep step{};
  std::vector<std::string> names;
  std::map<std::string, Memory> inputs, memory;
  std::istringstream lines(content(folder + "step.txt"));
  for (std::string line, what, name; std::getline(lines, line);) {
    std::istringstream words(line);
    words >> what;
    if (what == "layers") words >> layers;
    if (what == "longest") words >> step.longest;
    if (what == "weights") names.assign(std::istream_iterator<std::string>(words), {});
    if (what == "memory") while (words >> name) memory[name] = loaded(folder + name + ".bin");
    if (what == "input") {
      int rank;
      words >> name >> rank;
      std::vector<int64_t> const shape(std::istream_iterator<int64_t>(words), {});
      inputs[name] = loaded(folder + name + ".bin");
      require(!pensieve_set_shape(context, name.c_str(), rank, shape.data()), name);
      if (name != "x") require(!pensieve_set_address(context, name.c_str(), inputs[name].address), name);
    }
  }
  step.pool = memory["pool"].address;
  step.partial = memory["partial"].address;
  step.lse = memory["lse"].address;
  step.counters = memory["counters"].address;
  step.covered = memory["covered"].address;
  for (int i = 0; i < PENSIEVE_MOST_CLASSES; i++) {
    step.items[i] = memory["items" + std::to_string(i)].address;
    step.arrivals[i] = memory["arrivals" + std::to_string(i)].address;
  }
  std::vector<char const*> named;
  std::vector<void*> weights;
  for (auto const& name : names) named.push_back(name.c_str());
  for (int layer = 0; layer < layers; layer++)
    for (auto const& name : names) weights.push_back(loaded(folder + std::to_string(layer) + "." + name + ".bin").address);
  Memory x = inputs["x"], y = allocated(x.size);
  require(cuCtxSynchronize() == CUDA_SUCCESS, "the copies failed");  // the stream does not wait for them
  require(!pensieve_enqueue_layers(context, kernels, &step, layers, static_cast<int>(names.size()), named.data(), weights.data(), x.address, y.address, stream), "the layers are not enqueued");
  require(cuStreamSynchronize(stream) == CUDA_SUCCESS, "the step failed");
  saved(layers % 2 ? y : x, folder + "y.bin");
  saved(memory["pool"], folder + "pool.out.bin");
  pensieve_context_free(context);
  pensieve_engine_free(engine);
  pensieve_unload_kernels(kernels);
}
