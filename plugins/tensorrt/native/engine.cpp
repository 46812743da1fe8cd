#include "engine.h"

#include <NvInfer.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "error.h"
#include "launch.h"
#include "versions.h"

namespace {

using namespace nvinfer1;
using pensieve::guarded;

std::atomic<PensieveHear> hear{nullptr};

class Logger final : public ILogger {
 public:
  void log(Severity severity, char const* text) noexcept override {
    if (severity <= Severity::kERROR) {
      std::lock_guard<std::mutex> hold(lock);
      if (!errors.empty()) errors += "; ";
      if (errors.size() < MOST_TEXT) errors += text;
    }
    if (PensieveHear const listener = hear) listener(static_cast<int>(severity), text);
  }
  std::string take() {
    std::lock_guard<std::mutex> hold(lock);
    std::string const text = errors;
    errors.clear();
    return text;
  }

 private:
  std::mutex lock;
  static constexpr size_t MOST_TEXT = 1000;
  std::string errors;  // since they were taken
} logger;

void require(bool done, std::string const& what) {
  if (done) return;
  std::string const said = logger.take();
  throw std::runtime_error("TensorRT cannot " + what + (said.empty() ? "" : ": " + said));
}

template <class T>
T* made(T* object, std::string const& what) {
  require(object != nullptr, what);
  return object;
}

DataType type_of(int type) {
  DataType result{};
  if (!pensieve::find_type(type, result)) throw std::runtime_error("this version of TensorRT has no type " + std::to_string(type));
  return result;
}

Dims dims_of(int rank, int64_t const* shape) {
  Dims dims{};
  if (rank > Dims::MAX_DIMS) throw std::runtime_error("TensorRT has at most " + std::to_string(Dims::MAX_DIMS) + " dimensions");
  dims.nbDims = rank;
  for (int i = 0; i < rank; i++) dims.d[i] = static_cast<std::remove_reference_t<decltype(dims.d[i])>>(shape[i]);
  return dims;
}

}  // namespace

struct PensieveNetwork {
  std::unique_ptr<IBuilder> builder{made(createInferBuilder(logger), "make a builder")};
  std::unique_ptr<INetworkDefinition> network;
  std::unique_ptr<IBuilderConfig> config{made(builder->createBuilderConfig(), "make a builder's settings")};
  std::vector<ITensor*> tensors;
  std::vector<IOptimizationProfile*> profiles;  // the builder owns them

  PensieveNetwork() {
    uint32_t const flags = pensieve::configure(*config);
    config->clearFlag(BuilderFlag::kTF32);  // float32 is float32
    config->setTacticSources(0);            // cuDNN and cuBLAS need not be installed
    network.reset(made(builder->createNetworkV2(flags), "make a network"));
  }

  int add(ITensor* tensor) {
    tensors.push_back(tensor);
    return static_cast<int>(tensors.size()) - 1;
  }

  ITensor* typed(ILayer* layer, std::string const& name, DataType type) {
    made(layer, "add the layer " + name)->setName(name.c_str());
    ITensor* const out = layer->getOutput(0);
    out->setName((name + ".out").c_str());
    pensieve::set_precision(*layer, type);
    return out;
  }

  ITensor* cast(ITensor* x, std::string const& name, DataType type) {
    ILayer* const layer = pensieve::add_cast(*network, *x, type);
    made(layer, "add the layer " + name)->setName(name.c_str());
    layer->getOutput(0)->setName((name + ".out").c_str());
    return layer->getOutput(0);
  }

  ITensor* layer(std::string const& name, int kind, DataType type, std::vector<ITensor*> const& in, int count, int64_t const* numbers) {
    auto const two = [&](ElementWiseOperation operation) { return typed(network->addElementWise(*in.at(0), *in.at(1), operation), name, type); };
    auto const one = [&](UnaryOperation operation) { return typed(network->addUnary(*in.at(0), operation), name, type); };
    auto const active = [&](ActivationType operation) { return typed(network->addActivation(*in.at(0), operation), name, type); };
    switch (kind) {
      case PENSIEVE_ADD: return two(ElementWiseOperation::kSUM);
      case PENSIEVE_MULTIPLY: return two(ElementWiseOperation::kPROD);
      case PENSIEVE_DIVIDE: return two(ElementWiseOperation::kDIV);
      case PENSIEVE_SQRT: return one(UnaryOperation::kSQRT);
      case PENSIEVE_ERF: return one(UnaryOperation::kERF);
      case PENSIEVE_SIGMOID: return active(ActivationType::kSIGMOID);
      case PENSIEVE_TANH: return active(ActivationType::kTANH);
      case PENSIEVE_MEAN: {
        uint32_t const last = 1U << (in.at(0)->getDimensions().nbDims - 1);
        return typed(network->addReduce(*in[0], ReduceOperation::kAVG, last, true), name, type);
      }
      case PENSIEVE_CAST: return cast(in.at(0), name, type);
      case PENSIEVE_RESHAPE: {
        IShuffleLayer* const shuffle = made(network->addShuffle(*in.at(0)), "add the layer " + name);
        shuffle->setReshapeDimensions(dims_of(count, numbers));
        return typed(shuffle, name, type);
      }
      default: throw std::runtime_error("there is no kind of layer " + std::to_string(kind));
    }
  }

  std::vector<ITensor*> chosen(int inputs, int const* numbers) const {
    std::vector<ITensor*> in;
    for (int i = 0; i < inputs; i++) in.push_back(tensors.at(static_cast<size_t>(numbers[i])));
    return in;
  }
};

struct PensieveEngine {
  std::unique_ptr<IRuntime> runtime{made(createInferRuntime(logger), "make a runtime")};
  std::unique_ptr<ICudaEngine> engine;
};

struct PensieveContext {
  std::unique_ptr<IExecutionContext> context;
};

#define API extern "C" __attribute__((visibility("default")))

API void pensieve_hear(PensieveHear listener) { hear = listener; }

API int pensieve_tensorrt_version() { return getInferLibVersion(); }

API PensieveNetwork* pensieve_network_new() {
  PensieveNetwork* network = nullptr;
  guarded([&] { network = new PensieveNetwork; });
  return network;
}

API void pensieve_network_free(PensieveNetwork* network) { delete network; }

API int pensieve_input(PensieveNetwork* network, char const* name, int type, int rank, int64_t const* shape) {
  int number = -1;
  guarded([&] {
    ITensor* const input = made(network->network->addInput(name, type_of(type), dims_of(rank, shape)), std::string("add the input ") + name);
    input->setAllowedFormats(1U << static_cast<int>(TensorFormat::kLINEAR));
    number = network->add(input);
  });
  return number;
}

API int pensieve_constant(PensieveNetwork* network, char const* name, int type, int rank, int64_t const* shape, void const* data) {
  int number = -1;
  guarded([&] {
    int64_t count = 1;
    for (int i = 0; i < rank; i++) count *= shape[i];
    Weights const weights{type_of(type), data, count};
    number = network->add(network->typed(network->network->addConstant(dims_of(rank, shape), weights), name, weights.type));
  });
  return number;
}

API int pensieve_layer(PensieveNetwork* network, char const* name, int kind, int type, int inputs, int const* tensors, int count, int64_t const* numbers) {
  int number = -1;
  guarded([&] { number = network->add(network->layer(name, kind, type_of(type), network->chosen(inputs, tensors), count, numbers)); });
  return number;
}

API int pensieve_plugin(PensieveNetwork* network, char const* name, char const* plugin, void const* attributes, int size, int inputs, int const* tensors) {
  int number = -1;
  guarded([&] {
    auto* const creator = pensieve::find_creator(plugin, "1");
    require(creator != nullptr, std::string("find the plugin ") + plugin);
    PluginField field("attributes", attributes, PluginFieldType::kCHAR, size);
    PluginFieldCollection const fields{1, &field};
    IPluginV2* const one = made(creator->createPlugin(name, &fields), std::string("make the plugin ") + name);
    auto const in = network->chosen(inputs, tensors);
    ILayer* const layer = network->network->addPluginV2(in.data(), inputs, *one);  // which copies it
    one->destroy();
    made(layer, std::string("add the plugin ") + name)->setName(name);
    number = static_cast<int>(network->tensors.size());
    for (int i = 0; i < layer->getNbOutputs(); i++) {
      layer->getOutput(i)->setName((std::string(name) + ".out" + std::to_string(i)).c_str());
      network->add(layer->getOutput(i));
    }
  });
  return number;
}

API int pensieve_output(PensieveNetwork* network, int tensor, int type, char const* name) {
  return guarded([&] {
    ITensor* const output = network->tensors.at(static_cast<size_t>(tensor));
    output->setName(name);
    network->network->markOutput(*output);
    pensieve::set_output_type(*output, type_of(type));
    output->setAllowedFormats(1U << static_cast<int>(TensorFormat::kLINEAR));
  });
}

API int pensieve_profile(PensieveNetwork* network) {
  return guarded([&] { network->profiles.push_back(made(network->builder->createOptimizationProfile(), "make an optimization profile")); });
}

API int pensieve_profile_input(PensieveNetwork* network, char const* name, int rank, int64_t const* least, int64_t const* usual, int64_t const* most) {
  return guarded([&] {
    auto* const profile = network->profiles.at(network->profiles.size() - 1);
    bool const taken = profile->setDimensions(name, OptProfileSelector::kMIN, dims_of(rank, least)) &&
                       profile->setDimensions(name, OptProfileSelector::kOPT, dims_of(rank, usual)) &&
                       profile->setDimensions(name, OptProfileSelector::kMAX, dims_of(rank, most));
    require(taken, std::string("take the sizes of ") + name);
  });
}

API void pensieve_bytes_free(PensieveBytes* bytes) {
  delete static_cast<IHostMemory*>(bytes->owner);
  *bytes = {};
}

API int pensieve_build(PensieveNetwork* network, size_t workspace, void const* cache, size_t cache_size, PensieveBytes* plan, PensieveBytes* new_cache) {
  return guarded([&] {
    auto& config = *network->config;
    if (workspace) config.setMemoryPoolLimit(MemoryPoolType::kWORKSPACE, workspace);
    for (auto* profile : network->profiles) require(config.addOptimizationProfile(profile) >= 0, "take an optimization profile");
    std::unique_ptr<ITimingCache> times(config.createTimingCache(cache, cache_size));
    if (!times || !config.setTimingCache(*times, false)) {  // of another GPU or version: measured anew
      times.reset(made(config.createTimingCache(nullptr, 0), "make a timing cache"));
      require(config.setTimingCache(*times, false), "use a timing cache");
    }
    IHostMemory* const built = made(network->builder->buildSerializedNetwork(*network->network, config), "build the engine");
    *plan = {built->data(), built->size(), built};
    IHostMemory* const measured = made(config.getTimingCache()->serialize(), "give its timing cache");
    *new_cache = {measured->data(), measured->size(), measured};
  });
}

API PensieveEngine* pensieve_engine_load(void const* plan, size_t size) {
  PensieveEngine* loaded = nullptr;
  guarded([&] {
    auto engine = std::make_unique<PensieveEngine>();
    engine->engine.reset(made(engine->runtime->deserializeCudaEngine(plan, size), "read the plan"));
    loaded = engine.release();
  });
  return loaded;
}

API void pensieve_engine_free(PensieveEngine* engine) { delete engine; }

API int pensieve_engine_shape(PensieveEngine* engine, char const* name, int most, int64_t* shape) {
  for (int i = 0; i < engine->engine->getNbIOTensors(); i++) {
    if (std::strcmp(engine->engine->getIOTensorName(i), name)) continue;
    Dims const dims = engine->engine->getTensorShape(name);
    if (dims.nbDims > most) return -1;
    std::copy(dims.d, dims.d + dims.nbDims, shape);
    return dims.nbDims;
  }
  return -1;
}

API size_t pensieve_engine_memory(PensieveEngine* engine) {
  return pensieve::context_memory(*engine->engine);
}

API PensieveContext* pensieve_context_new(PensieveEngine* engine, int profile, void* memory, void* stream) {
  PensieveContext* context = nullptr;
  guarded([&] {
    std::unique_ptr<IExecutionContext> one(pensieve::new_context(*engine->engine));
    require(one != nullptr, "make an execution context");
    one->setDeviceMemory(memory);
    require(one->setOptimizationProfileAsync(profile, static_cast<cudaStream_t>(stream)), "choose profile " + std::to_string(profile));
    context = new PensieveContext{std::move(one)};
  });
  return context;
}

API void pensieve_context_free(PensieveContext* context) { delete context; }

API int pensieve_set_shape(PensieveContext* context, char const* name, int rank, int64_t const* shape) {
  return guarded([&] { require(context->context->setInputShape(name, dims_of(rank, shape)), std::string("take the shape of ") + name); });
}

API int pensieve_set_address(PensieveContext* context, char const* name, void* address) {
  return guarded([&] { require(context->context->setTensorAddress(name, address), std::string("take the address of ") + name); });
}

API int pensieve_enqueue_layers(PensieveContext* context, PensieveKernels* kernels, PensieveStep const* step, int layers, int count, char const* const* names, void* const* weights, void* x, void* y, void* stream) {
  int const failed = guarded([&] {
    auto& one = *context->context;
    pensieve::last_error().clear();
    for (int layer = 0; layer < layers; layer++, std::swap(x, y)) {
      for (int i = 0; i < count; i++) require(one.setTensorAddress(names[i], *weights++), std::string("take the address of ") + names[i]);
      require(one.setTensorAddress("x", x) && one.setTensorAddress("y", y), "take the addresses of x and y");
      pensieve_run_on(kernels, step, layer);
      bool const enqueued = one.enqueueV3(static_cast<cudaStream_t>(stream));
      require(enqueued, "run layer " + std::to_string(layer) + (pensieve::last_error().empty() ? "" : " (" + pensieve::last_error() + ")"));
    }
  });
  pensieve_run_on(nullptr, nullptr, 0);
  return failed;
}
