// What differs between the versions of TensorRT. No other source asks for the version.
//
//                      8.5                          8.6                 10                           11
//   types              float32, float16             the same            and bfloat16                 the same
//   typing             weak: each layer is told     the same            strong: TensorRT derives it  the same
//   cast               identity with another type   layer of its own    the same                     the same
//   dynamic shapes     a preview, switched on       always              always                       always
//   auxiliary streams  none                         set to none         the same                     the same
//   plugins            IPluginV2DynamicExt          the same            the same, deprecated         the same, deprecated
//   find a plugin      getPluginCreator             the same            the same                     getCreator
//   context's memory   ...WithoutDeviceMemory       the same            kUSER_MANAGED                the same
//   size of it         getDeviceMemorySize          the same            ...V2, since 10.1            the same
//   lean runtime       none                         not used: the plans are not built version-compatible
//
// IPluginV3 is not needed: 11 still has IPluginV2DynamicExt. Python refuses older and newer versions (installation.py).
#pragma once

#include <NvInfer.h>

#include <cstddef>
#include <cstdint>

#include "engine.h"

namespace pensieve {

// Whether there is this PensieveType, and TensorRT's name for it.
inline bool find_type(int32_t type, nvinfer1::DataType& result) {
  switch (type) {
    case PENSIEVE_FLOAT32: result = nvinfer1::DataType::kFLOAT; return true;
    case PENSIEVE_FLOAT16: result = nvinfer1::DataType::kHALF; return true;
    case PENSIEVE_INT32: result = nvinfer1::DataType::kINT32; return true;
#if NV_TENSORRT_MAJOR >= 10
    case PENSIEVE_BFLOAT16: result = nvinfer1::DataType::kBF16; return true;
#endif
    default: return false;
  }
}

// Makes the settings of a builder those of our networks. Returns the flags of a network.
inline uint32_t configure(nvinfer1::IBuilderConfig& config) {
  using namespace nvinfer1;
#if NV_TENSORRT_MAJOR > 8 || NV_TENSORRT_MINOR >= 6
  config.setMaxAuxStreams(0);  // our operations are ordered by the one stream
#else
  config.setPreviewFeature(PreviewFeature::kFASTER_DYNAMIC_SHAPES_0805, true);
  config.setPreviewFeature(PreviewFeature::kDISABLE_EXTERNAL_TACTIC_SOURCES_FOR_CORE_0805, true);
#endif
#if NV_TENSORRT_MAJOR >= 10
  return 1U << static_cast<int>(NetworkDefinitionCreationFlag::kSTRONGLY_TYPED);
#else
  config.setFlag(BuilderFlag::kFP16);
  config.setFlag(BuilderFlag::kOBEY_PRECISION_CONSTRAINTS);
  return 1U << static_cast<int>(NetworkDefinitionCreationFlag::kEXPLICIT_BATCH);
#endif
}

// Has a layer compute in this type, where layers are told.
inline void set_precision(nvinfer1::ILayer& layer, nvinfer1::DataType type) {
#if NV_TENSORRT_MAJOR < 10
  layer.setPrecision(type);
  layer.setOutputType(0, type);
#else
  static_cast<void>(layer);
  static_cast<void>(type);
#endif
}

// Has an output of the network this type, where it is not that of its layer: else it is float32.
inline void set_output_type(nvinfer1::ITensor& output, nvinfer1::DataType type) {
#if NV_TENSORRT_MAJOR < 10
  output.setType(type);
#else
  static_cast<void>(output);
  static_cast<void>(type);
#endif
}

// Null if TensorRT cannot add it.
inline nvinfer1::ILayer* add_cast(nvinfer1::INetworkDefinition& network, nvinfer1::ITensor& x, nvinfer1::DataType type) {
#if NV_TENSORRT_MAJOR > 8 || NV_TENSORRT_MINOR >= 6
  nvinfer1::ILayer* const layer = network.addCast(x, type);
#else
  nvinfer1::ILayer* const layer = network.addIdentity(x);
#endif
#if NV_TENSORRT_MAJOR < 10
  if (layer) layer->setOutputType(0, type);
#endif
  return layer;
}

// Null if there is none.
inline nvinfer1::IPluginCreator* find_creator(char const* plugin, char const* version) {
#if NV_TENSORRT_MAJOR >= 11
  return static_cast<nvinfer1::IPluginCreator*>(getPluginRegistry()->getCreator(plugin, version, ""));
#else
  return getPluginRegistry()->getPluginCreator(plugin, version, "");
#endif
}

inline size_t context_memory(nvinfer1::ICudaEngine& engine) {
#if NV_TENSORRT_MAJOR > 10 || (NV_TENSORRT_MAJOR == 10 && NV_TENSORRT_MINOR >= 1)
  return static_cast<size_t>(engine.getDeviceMemorySizeV2());
#else
  return engine.getDeviceMemorySize();
#endif
}

// A context whose memory is given to it later. Null if TensorRT cannot make it.
inline nvinfer1::IExecutionContext* new_context(nvinfer1::ICudaEngine& engine) {
#if NV_TENSORRT_MAJOR >= 10
  return engine.createExecutionContext(nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED);
#else
  return engine.createExecutionContextWithoutDeviceMemory();
#endif
}

}  // namespace pensieve
