// TensorRT's builder and runtime, of any version from 8.5 on, behind C functions.
//
// Functions return 0 or a tensor's number (from 0), and 1, -1 or null where they fail: pensieve_error says why, with
// TensorRT's last error. All calls for one object are made by one thread at a time.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

enum PensieveType { PENSIEVE_FLOAT32, PENSIEVE_FLOAT16, PENSIEVE_BFLOAT16, PENSIEVE_INT32 };

// Of pensieve_layer. Its numbers, where it has any:
enum PensieveLayer {
  PENSIEVE_ADD, PENSIEVE_MULTIPLY, PENSIEVE_DIVIDE,  // of two tensors of one rank
  PENSIEVE_SQRT, PENSIEVE_ERF, PENSIEVE_SIGMOID, PENSIEVE_TANH,
  PENSIEVE_MEAN,       // over the last dimension, which is kept
  PENSIEVE_CAST,
  PENSIEVE_RESHAPE,    // numbers: the new shape, one of them -1 at most
};

// Hears what TensorRT says: severity 0 (internal error) to 4 (verbose). Called by TensorRT's threads too.
typedef void (*PensieveHear)(int severity, char const* text);
void pensieve_hear(PensieveHear hear);

// The TensorRT that is loaded: 1000 major + 100 minor + patch before version 10, 10000 major + 100 minor + patch since.
int pensieve_tensorrt_version();

struct PensieveNetwork* pensieve_network_new();
void pensieve_network_free(struct PensieveNetwork* network);
int pensieve_input(struct PensieveNetwork* network, char const* name, int type, int rank, int64_t const* shape);
// `data` must stay until the network is built.
int pensieve_constant(struct PensieveNetwork* network, char const* name, int type, int rank, int64_t const* shape, void const* data);
// `type` is that of the result. Names of layers must differ.
int pensieve_layer(struct PensieveNetwork* network, char const* name, int kind, int type, int inputs, int const* tensors, int count, int64_t const* numbers);
// A plugin of plugin.cpp, by its name and the bytes of its attributes. Returns the number of its first output; the numbers
// of the others follow.
int pensieve_plugin(struct PensieveNetwork* network, char const* name, char const* plugin, void const* attributes, int size, int inputs, int const* tensors);
int pensieve_output(struct PensieveNetwork* network, int tensor, int type, char const* name);
// Begins another optimization profile; then the sizes of each input in it.
int pensieve_profile(struct PensieveNetwork* network);
int pensieve_profile_input(struct PensieveNetwork* network, char const* name, int rank, int64_t const* least, int64_t const* usual, int64_t const* most);

struct PensieveBytes {
  void const* data;
  size_t size;
  void* owner;
};
void pensieve_bytes_free(struct PensieveBytes* bytes);

// Builds the plan. workspace: most bytes of GPU memory that one layer may take for itself, 0 for all there is. cache: of
// an earlier build on this GPU, or null; its successor goes to `new_cache`.
int pensieve_build(struct PensieveNetwork* network, size_t workspace, void const* cache, size_t cache_size, struct PensieveBytes* plan, struct PensieveBytes* new_cache);

struct PensieveEngine* pensieve_engine_load(void const* plan, size_t size);
void pensieve_engine_free(struct PensieveEngine* engine);
// Writes the sizes of an input or output, -1 for those known at run time, into shape, which has room for `most`. Returns how
// many it has, or -1: the plan has no such tensor, or it has more.
int pensieve_engine_shape(struct PensieveEngine* engine, char const* name, int most, int64_t* shape);
// Bytes of memory that a context works in; contexts that run one after the other can share them.
size_t pensieve_engine_memory(struct PensieveEngine* engine);
// A context for one optimization profile. It must be freed before the engine.
struct PensieveContext* pensieve_context_new(struct PensieveEngine* engine, int profile, void* memory, void* stream);
void pensieve_context_free(struct PensieveContext* context);
int pensieve_set_shape(struct PensieveContext* context, char const* name, int rank, int64_t const* shape);
int pensieve_set_address(struct PensieveContext* context, char const* name, void* address);
// Enqueues the plan once for each layer, with the kernels and the memory of the step (launch.h). The inputs `names` of
// layer i are at weights[i * count], weights[i * count + 1], ... The layers' input and output "x" and "y" alternate between
// two buffers: the result is in `x` after an even number of layers, in `y` after an odd one.
int pensieve_enqueue_layers(struct PensieveContext* context, struct PensieveKernels* kernels, struct PensieveStep const* step, int layers, int count, char const* const* names, void* const* weights, void* x, void* y, void* stream);
}
