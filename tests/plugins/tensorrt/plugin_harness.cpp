// Enqueues a plugin as TensorRT does: made from its field, serialised, made anew, copied, given descriptions and addresses.
#include "../../../plugins/tensorrt/native/plugin.cpp"

#include <algorithm>
#include <type_traits>
#include <vector>

extern "C" {

// TensorRT's own registry is not needed: creators are used directly.
nvinfer1::IPluginRegistry* getPluginRegistry() noexcept {
  static nvinfer1::IPluginRegistry* volatile none = nullptr;
  return none;
}

// attributes: of `Attributes`. shapes: rank and sizes of each input. Returns what enqueue returns, or -1: a type was refused.
__attribute__((visibility("default"))) int harness_enqueue(int32_t const* attributes, int inputs, int64_t const* shapes, void const* const* in, void* const* out, void* stream) {
  int32_t const operation = attributes[0], type = attributes[1];
  Creator& creator = creators[operation];
  PluginField field("attributes", attributes, PluginFieldType::kCHAR, sizeof(Attributes));
  PluginFieldCollection const fields{1, &field};
  auto* const first = static_cast<IPluginV2DynamicExt*>(creator.createPlugin("", &fields));
  std::string bytes(first->getSerializationSize(), '\0');
  first->serialize(&bytes[0]);
  first->destroy();
  auto* const again = static_cast<IPluginV2DynamicExt*>(creator.deserializePlugin("", bytes.data(), bytes.size()));
  auto* const plugin = again->clone();
  again->destroy();
  PluginTensorDesc described[6]{};
  for (int i = 0; i < inputs; i++) {
    described[i].dims.nbDims = static_cast<int32_t>(*shapes++);
    for (int j = 0; j < described[i].dims.nbDims; j++) described[i].dims.d[j] = static_cast<std::remove_reference_t<decltype(described[i].dims.d[j])>>(*shapes++);
    bool const value = i == 0 || operation >= PRODUCT;
    bool const angles = operation == WRITE_KV && inputs == 3 && i == 1;
    described[i].type = value ? type_of(type) : angles ? DataType::kFLOAT : DataType::kINT32;
    described[i].format = TensorFormat::kLINEAR;
  }
  int const all = inputs + plugin->getNbOutputs();
  for (int i = inputs; i < all; i++) described[i] = described[0];
  int result = 0;
  for (int i = 0; i < all; i++) {
    if (!plugin->supportsFormatCombination(i, described, inputs, all - inputs)) result = -1;
    PluginTensorDesc wrong[6];
    std::copy(described, described + 6, wrong);
    wrong[i].type = DataType::kINT8;
    if (plugin->supportsFormatCombination(i, wrong, inputs, all - inputs)) result = -1;
  }
  std::vector<char> workspace(plugin->getWorkspaceSize(described, inputs, described + inputs, all - inputs));
  if (!result) result = plugin->enqueue(described, described + inputs, in, out, workspace.data(), static_cast<cudaStream_t>(stream));
  plugin->destroy();
  return result;
}
}
