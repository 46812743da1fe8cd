// Launches the kernels that plugins/tensorrt/kernels.py has compiled. Needs CUDA's driver only, opened at run time.
#pragma once
#include <cstdint>

extern "C" {

enum { PENSIEVE_MOST_CLASSES = 3 };

// Adds the ranks' x [tokens, size] into sum, on the stream. Returns 0, or 1 if it failed. All ranks call it in the same order.
typedef int (*PensieveAllReduce)(void const* x, void* sum, int tokens, void* stream);

// One step's memory on the device: a KV pool and the list of the step's attention (plugins/attention/work_list.py).
struct PensieveStep {
  void* pool;
  void* partial;
  void* lse;
  void* counters;
  void* covered;
  void* items[PENSIEVE_MOST_CLASSES];     // of each class of tiles
  void* arrivals[PENSIEVE_MOST_CLASSES];  // of each class of tiles
  void* const* gates;                     // CUevent of each layer, or null: the layer has no gate. Null: no layer has one
  int32_t longest;                        // queries of the longest segment, or more
  PensieveAllReduce all_reduce;           // null: one rank
};

// Loads a folder of kernels into the current context. Null if it cannot; pensieve_error says why.
struct PensieveKernels* pensieve_load_kernels(char const* folder);
void pensieve_unload_kernels(struct PensieveKernels* kernels);

// Rotates and writes the KV of `tokens` rows of qkv [tokens, (heads + 2 kv_heads) head_dim] into a layer, once the layer's
// gate is open. rotary [tokens, R] float32, null where R = 0; slots [tokens] int32; rotated [tokens, heads head_dim].
// Returns 0, or 1: pensieve_error says why. The work is enqueued on the CUstream, which may be capturing.
int pensieve_write_kv(struct PensieveKernels* kernels, struct PensieveStep const* step, int layer, int tokens, void const* qkv,
                      void const* rotary, void const* slots, void* rotated, void* stream);

// The layer's norm of x [tokens, size] into normed, or, where y is not null, of x + y, and that sum into total. weight and
// bias [size], null where the kernels were compiled without. Returns as pensieve_write_kv.
int pensieve_norm(struct PensieveKernels* kernels, int tokens, void const* x, void const* y, void const* weight,
                  void const* bias, void* normed, void* total, void* stream);

// silu of the left half of x [tokens, 2 width] times the right half, into out [tokens, width]. Returns as pensieve_write_kv.
int pensieve_silu_gate(struct PensieveKernels* kernels, int tokens, void const* x, void* out, void* stream);

// Attention of q [tokens, heads head_dim] over the layer, as the step's list says, into o of the same shape.
// block_table [seats, blocks] int32. Returns as pensieve_write_kv.
int pensieve_attend(struct PensieveKernels* kernels, struct PensieveStep const* step, int layer, int tokens, int blocks,
                    void const* q, void const* block_table, void* o, void* stream);

// The plugins that this thread enqueues from now on launch these kernels for this layer of the step. Null: none. (plugin.cpp)
void pensieve_run_on(struct PensieveKernels* kernels, struct PensieveStep const* step, int layer);

// Why the last call of this thread failed.
char const* pensieve_error();
}
