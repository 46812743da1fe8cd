// Stands for NVIDIA's driver where there is none: writes down what it is asked to launch. Modules are numbered from 1 in
// the order of their loads; a function is its module's number.
#include <cuda.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

static std::ostringstream record;
static std::vector<int> parameters;  // of each module's kernel
static intptr_t loaded = 0;
static bool refuses_cubins = false, capturing = false;

extern "C" {

void fake_reset(int refuse_cubins, int is_capturing) { record.str(""); loaded = 0; parameters.clear(); refuses_cubins = refuse_cubins; capturing = is_capturing; }
void fake_parameters(int count) { parameters.push_back(count); }
char const* fake_record() { static std::string text; text = record.str(); record.str(""); return text.c_str(); }

CUresult cuModuleLoadData(CUmodule* module, void const* image) {
  bool const cubin = static_cast<char const*>(image)[0] == 127;
  if (cubin && refuses_cubins) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  *module = reinterpret_cast<CUmodule>(++loaded);
  record << "load " << (cubin ? "cubin" : "ptx") << "\n";
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { record << "unload " << reinterpret_cast<intptr_t>(module) << "\n"; return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, char const* name) {
  *function = reinterpret_cast<CUfunction>(module);
  record << "function " << name << "\n";
  return CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  record << "attribute " << reinterpret_cast<intptr_t>(function) << " " << attribute << " " << value << "\n";
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  record << "wait " << reinterpret_cast<intptr_t>(stream) << " " << reinterpret_cast<intptr_t>(event) << " " << flags << "\n";
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(CUlaunchConfig const* c, CUfunction function, void** arguments, void**) {
  intptr_t const number = reinterpret_cast<intptr_t>(function);
  unsigned dependent = c->numAttrs;
  for (unsigned i = 0; i < c->numAttrs; i++)
    if (c->attrs[i].id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION || !c->attrs[i].value.programmaticStreamSerializationAllowed) return CUDA_ERROR_INVALID_VALUE;
  record << "launch " << number << " " << c->gridDimX << " " << c->gridDimY << " " << c->gridDimZ << " " << c->blockDimX * c->blockDimY * c->blockDimZ << " " << c->sharedMemBytes << " " << dependent << " " << reinterpret_cast<intptr_t>(c->hStream);
  for (int i = 0; i < parameters.at(static_cast<size_t>(number) - 1); i++) record << " " << *static_cast<uint64_t*>(arguments[i]);
  record << "\n";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, char const** text) { *text = "refused by the fake"; return CUDA_SUCCESS; }
}
