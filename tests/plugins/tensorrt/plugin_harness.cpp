// Enqueues a plugin as TensorRT does: made from its field, serialised, made anew, copied, given descriptions and addresses.
#include "../../../plugins/tensorrt/native/plugin.cpp"

#include <algorithm>
#include <type_traits>

extern "C" {

// TensorRT's own registry is not needed: creators are used directly.
nvinfer1::IPluginRegistry* getPluginRegistry() noexcept {
  static nvinfer1::IPluginRegistry* volatile none = nullptr;
  return none;
}

// attributes: of `Attributes`. shapes: rank and sizes of each input. Returns what enqueue returns, or -1: a type was refused.
__attribute__((visibility("default"))) int harness_enqueue(int32_t const* attributes, int inputs, int64_t const* shapes, void const* const* in, void* out, void* stream) {
  bool const writes = attributes[0] == WRITE_KV;
  Creator& creator = writes ? write_kv_creator : attention_creator;
  PluginField field("attributes", attributes, PluginFieldType::kCHAR, sizeof(Attributes));
  PluginFieldCollection const fields{1, &field};
  auto* const first = static_cast<IPluginV2DynamicExt*>(creator.createPlugin("", &fields));
  std::string bytes(first->getSerializationSize(), '\0');
  first->serialize(&bytes[0]);
  first->destroy();
  auto* const again = static_cast<IPluginV2DynamicExt*>(creator.deserializePlugin("", bytes.data(), bytes.size()));
  auto* const plugin = again->clone();
  again->destroy();
  PluginTensorDesc described[4]{};
  for (int i = 0; i < inputs; i++) {
    described[i].dims.nbDims = static_cast<int32_t>(*shapes++);
    for (int j = 0; j < described[i].dims.nbDims; j++) described[i].dims.d[j] = static_cast<std::remove_reference_t<decltype(described[i].dims.d[j])>>(*shapes++);
    bool const angles = writes && inputs == 3 && i == 1;
    described[i].type = i == 0 ? DataType::kHALF : angles ? DataType::kFLOAT : DataType::kINT32;
    described[i].format = TensorFormat::kLINEAR;
  }
  described[inputs] = described[0];
  int result = 0;
  for (int i = 0; i <= inputs; i++) {
    if (!plugin->supportsFormatCombination(i, described, inputs, 1)) result = -1;
    PluginTensorDesc wrong[4];
    std::copy(described, described + 4, wrong);
    wrong[i].type = DataType::kINT8;
    if (plugin->supportsFormatCombination(i, wrong, inputs, 1)) result = -1;
  }
  void* const outputs[]{out};
  if (!result) result = plugin->enqueue(described, described + inputs, in, outputs, nullptr, static_cast<cudaStream_t>(stream));
  plugin->destroy();
  return result;
}
}
