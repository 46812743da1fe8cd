// TensorRT plugins of a layer's operations, for TensorRT 8.5 to 11: they launch our kernels on the stream they are given.
//
//   PensieveWriteKv   qkv [T, (heads + 2 kv_heads) head_dim], rotary [T, R] float32 where R > 0, slots [T] -> [T, heads head_dim]
//   PensieveAttention q [T, heads head_dim], block_table [seats, blocks] -> [T, heads head_dim]
//   PensieveProduct   x [T, inputs], weight [outputs, inputs], bias [1, outputs] where there is one -> [T, outputs]
//   PensieveSiluGate  x [T, 2 outputs] -> [T, outputs]
//   PensieveNorm      x [T, size], y [T, size] where it is added, weight [1, size], bias [1, size] where there are
//                     -> norm of x or of x + y; where y is added, x + y too
//   PensieveAllReduce x [T, size] -> the sum of all ranks' x [T, size], as the step's all_reduce makes it
//
// All take one field, "attributes": the bytes of `Attributes`. The kernels, the step's memory and the layer are those of the
// thread that enqueues (pensieve_run_on), so that one plan serves all layers and knows neither addresses nor kernels.
#include <NvInfer.h>

#include <cstring>
#include <string>

#include "engine.h"
#include "launch.h"
#include "product.h"
#include "versions.h"

namespace {

using namespace nvinfer1;

thread_local PensieveKernels* kernels_of_thread = nullptr;
thread_local PensieveStep const* step_of_thread = nullptr;
thread_local int layer_of_thread = 0;

enum Operation : int32_t { WRITE_KV, ATTENTION, PRODUCT, NORM, SILU_GATE, ALL_REDUCE };
char const* const NAMES[] = {"PensieveWriteKv", "PensieveAttention", "PensieveProduct", "PensieveNorm", "PensieveSiluGate", "PensieveAllReduce"};
char const* const VERSION = "1";

struct Attributes {
  int32_t operation, type;                        // type: PensieveType
  int32_t heads, kv_heads, head_dim, rotary_dims;  // of WRITE_KV and ATTENTION
  int32_t outputs;                                // of PRODUCT and SILU_GATE
  int32_t biased;                                 // of PRODUCT and NORM: 1 or 0
  int32_t relu;                                   // of PRODUCT: 1 or 0
  int32_t added, weighted;                        // of NORM: 1 or 0
};

// Of a PensieveType. A plugin takes one type only: TensorRT would enqueue it to compare several, without a step to work on.
DataType type_of(int32_t type) {
  DataType result = DataType::kFLOAT;
  pensieve::find_type(type, result);
  return result;
}

class Plugin final : public IPluginV2DynamicExt {
 public:
  explicit Plugin(Attributes const& attributes) : a(attributes) {}

  IPluginV2DynamicExt* clone() const noexcept override {
    auto* copy = new Plugin(a);
    copy->space = space;
    return copy;
  }
  DimsExprs getOutputDimensions(int32_t, DimsExprs const* in, int32_t, IExprBuilder& expressions) noexcept override {
    DimsExprs shape = in[0];
    if (a.operation != NORM && a.operation != ALL_REDUCE) shape.d[1] = expressions.constant(a.outputs ? a.outputs : a.heads * a.head_dim);
    return shape;
  }
  bool supportsFormatCombination(int32_t place, PluginTensorDesc const* all, int32_t inputs, int32_t) noexcept override {
    if (all[place].format != TensorFormat::kLINEAR) return false;
    bool const values = place == 0 || place >= inputs || a.operation >= PRODUCT;
    if (values) return all[place].type == type_of(a.type);
    bool const rotary = a.operation == WRITE_KV && a.rotary_dims > 0 && place == 1;
    return all[place].type == (rotary ? DataType::kFLOAT : DataType::kINT32);
  }
  void configurePlugin(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*, int32_t) noexcept override {}
  size_t getWorkspaceSize(PluginTensorDesc const*, int32_t, PluginTensorDesc const*, int32_t) const noexcept override {
    return a.operation == PRODUCT ? PENSIEVE_PRODUCT_WORKSPACE : 0;
  }

  int32_t enqueue(PluginTensorDesc const* described, PluginTensorDesc const*, void const* const* in, void* const* out, void* workspace, cudaStream_t stream) noexcept override {
    if (!kernels_of_thread || !step_of_thread) return 1;  // the caller has not said what to run on
    int32_t const tokens = described[0].dims.d[0] > 0 ? static_cast<int32_t>(described[0].dims.d[0]) : 0;
    int32_t const width = static_cast<int32_t>(described[0].dims.d[1]);
    switch (a.operation) {
      case WRITE_KV: {
        void const* const rotary = a.rotary_dims > 0 ? in[1] : nullptr;
        void const* const slots = a.rotary_dims > 0 ? in[2] : in[1];
        return pensieve_write_kv(kernels_of_thread, step_of_thread, layer_of_thread, tokens, in[0], rotary, slots, out[0], stream);
      }
      case ATTENTION: {
        int32_t const blocks = static_cast<int32_t>(described[1].dims.d[1]);
        return pensieve_attend(kernels_of_thread, step_of_thread, layer_of_thread, tokens, blocks, in[0], in[1], out[0], stream);
      }
      case PRODUCT: return pensieve_product(a.type, tokens, width, a.outputs, in[0], in[1], a.biased ? in[2] : nullptr, a.relu, out[0], workspace, stream);
      case SILU_GATE: return pensieve_silu_gate(kernels_of_thread, tokens, in[0], out[0], stream);
      case ALL_REDUCE: return step_of_thread->all_reduce ? step_of_thread->all_reduce(in[0], out[0], tokens, stream) : 1;
      default: {
        void const* const* next = in + 1;
        void const* const y = a.added ? *next++ : nullptr;
        void const* const weight = a.weighted ? *next++ : nullptr;
        void const* const bias = a.biased ? *next : nullptr;
        return pensieve_norm(kernels_of_thread, tokens, in[0], y, weight, bias, out[0], a.added ? out[1] : nullptr, stream);
      }
    }
  }

  DataType getOutputDataType(int32_t, DataType const* types, int32_t) const noexcept override { return types[0]; }
  char const* getPluginType() const noexcept override { return NAMES[a.operation]; }
  char const* getPluginVersion() const noexcept override { return VERSION; }
  int32_t getNbOutputs() const noexcept override { return 1 + a.added; }
  int32_t initialize() noexcept override { return 0; }
  void terminate() noexcept override {}
  size_t getSerializationSize() const noexcept override { return sizeof a; }
  void serialize(void* bytes) const noexcept override { std::memcpy(bytes, &a, sizeof a); }
  void destroy() noexcept override { delete this; }
  void setPluginNamespace(char const* name) noexcept override { space = name; }
  char const* getPluginNamespace() const noexcept override { return space.c_str(); }

 private:
  Attributes const a;
  std::string space;
};

class Creator final : public IPluginCreator {
 public:
  explicit Creator(Operation made) : operation(made) {}

  char const* getPluginName() const noexcept override { return NAMES[operation]; }
  char const* getPluginVersion() const noexcept override { return VERSION; }
  PluginFieldCollection const* getFieldNames() noexcept override { return &fields; }
  IPluginV2* createPlugin(char const*, PluginFieldCollection const* given) noexcept override {
    if (given->nbFields != 1) return nullptr;
    return deserializePlugin("", given->fields[0].data, static_cast<size_t>(given->fields[0].length));
  }
  IPluginV2* deserializePlugin(char const*, void const* bytes, size_t size) noexcept override {
    Attributes a;
    if (size != sizeof a) return nullptr;
    std::memcpy(&a, bytes, size);
    return a.operation == operation ? new Plugin(a) : nullptr;
  }
  void setPluginNamespace(char const* name) noexcept override { space = name; }
  char const* getPluginNamespace() const noexcept override { return space.c_str(); }

 private:
  Operation const operation;
  PluginField field{"attributes", nullptr, PluginFieldType::kCHAR, sizeof(Attributes)};
  PluginFieldCollection fields{1, &field};
  std::string space;
};

Creator creators[] = {Creator(WRITE_KV), Creator(ATTENTION), Creator(PRODUCT), Creator(NORM), Creator(SILU_GATE), Creator(ALL_REDUCE)};

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// Registers the plugins with TensorRT, once a process. Returns whether it took them.
API int pensieve_register_plugins() {
  for (Creator& creator : creators)
    if (!getPluginRegistry()->registerCreator(creator, "")) return 0;
  return 1;
}

API void pensieve_run_on(PensieveKernels* kernels, PensieveStep const* step, int layer) {
  kernels_of_thread = kernels;
  step_of_thread = step;
  layer_of_thread = layer;
}
