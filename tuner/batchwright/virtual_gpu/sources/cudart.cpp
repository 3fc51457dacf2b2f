// libcudart: the runtime that torch links to. Memory is accounted for, launches are checked, and no kernel runs, but for
// fills of small tensors. Every call completes at once, so streams and events order nothing.
// This file: errors, devices, functions of the driver.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "cudart.h"

using namespace virtual_gpu;

namespace {
thread_local cudaError_t last_error = cudaSuccess;
}  // namespace

cudaError_t result(int status) {
  if (status != kSuccess) last_error = static_cast<cudaError_t>(status);
  return static_cast<cudaError_t>(status);
}

// --- errors and versions ---

EXPORT cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }
EXPORT const char *cudaGetErrorName(cudaError_t error) { return error_text(error).runtime_name; }
EXPORT const char *cudaGetErrorString(cudaError_t error) { return error_text(error).text; }

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
  *version = kDriverVersion;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

// --- devices ---

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
  *count = 0;
  REQUIRE(initialize());
  *count = visible_count();
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int *device) {
  REQUIRE(initialize());
  *device = current_ordinal();
  return cudaSuccess;
}

// Makes the context, as since CUDA 12 (CUDA C++ Programming Guide, "Initialization").
EXPORT cudaError_t cudaSetDevice(int device) {
  REQUIRE(initialize());
  if (visible_gpu(device) == nullptr) return result(cudaErrorInvalidDevice);
  set_current_ordinal(device);
  return result(require_current_context());
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr number, int device) {
  REQUIRE(initialize());
  if (visible_gpu(device) == nullptr) return result(cudaErrorInvalidDevice);
  const auto found = attribute(number, device);
  if (!found) log_once("unknown device attribute", std::to_string(static_cast<int>(number)));
  *value = found.value_or(0);
  return cudaSuccess;
}

namespace {
// The properties that have an attribute of the same meaning.
void set_attributes(cudaDeviceProp *properties, int device) {
  const auto value = [device](cudaDeviceAttr number) { return attribute(number, device).value_or(0); };
  properties->sharedMemPerBlock = value(cudaDevAttrMaxSharedMemoryPerBlock);
  properties->regsPerBlock = value(cudaDevAttrMaxRegistersPerBlock);
  properties->warpSize = value(cudaDevAttrWarpSize);
  properties->memPitch = value(cudaDevAttrMaxPitch);
  properties->maxThreadsPerBlock = value(cudaDevAttrMaxThreadsPerBlock);
  for (int axis = 0; axis < 3; ++axis) {
    properties->maxThreadsDim[axis] = value(static_cast<cudaDeviceAttr>(cudaDevAttrMaxBlockDimX + axis));
    properties->maxGridSize[axis] = value(static_cast<cudaDeviceAttr>(cudaDevAttrMaxGridDimX + axis));
  }
  properties->totalConstMem = value(cudaDevAttrTotalConstantMemory);
  properties->major = value(cudaDevAttrComputeCapabilityMajor);
  properties->minor = value(cudaDevAttrComputeCapabilityMinor);
  properties->textureAlignment = value(cudaDevAttrTextureAlignment);
  properties->texturePitchAlignment = value(cudaDevAttrTexturePitchAlignment);
  properties->multiProcessorCount = value(cudaDevAttrMultiProcessorCount);
  properties->canMapHostMemory = value(cudaDevAttrCanMapHostMemory);
  properties->concurrentKernels = value(cudaDevAttrConcurrentKernels);
  properties->pciBusID = value(cudaDevAttrPciBusId);
  properties->asyncEngineCount = value(cudaDevAttrAsyncEngineCount);
  properties->unifiedAddressing = value(cudaDevAttrUnifiedAddressing);
  properties->l2CacheSize = value(cudaDevAttrL2CacheSize);
  properties->maxThreadsPerMultiProcessor = value(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties->streamPrioritiesSupported = value(cudaDevAttrStreamPrioritiesSupported);
  properties->globalL1CacheSupported = value(cudaDevAttrGlobalL1CacheSupported);
  properties->localL1CacheSupported = value(cudaDevAttrLocalL1CacheSupported);
  properties->sharedMemPerMultiprocessor = value(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  properties->regsPerMultiprocessor = value(cudaDevAttrMaxRegistersPerMultiprocessor);
  properties->managedMemory = value(cudaDevAttrManagedMemory);
  properties->concurrentManagedAccess = value(cudaDevAttrConcurrentManagedAccess);
  properties->computePreemptionSupported = value(cudaDevAttrComputePreemptionSupported);
  properties->canUseHostPointerForRegisteredMem = value(cudaDevAttrCanUseHostPointerForRegisteredMem);
  properties->cooperativeLaunch = value(cudaDevAttrCooperativeLaunch);
  properties->sharedMemPerBlockOptin = value(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  properties->maxBlocksPerMultiProcessor = value(cudaDevAttrMaxBlocksPerMultiprocessor);
  properties->reservedSharedMemPerBlock = value(cudaDevAttrReservedSharedMemoryPerBlock);
  properties->hostRegisterSupported = value(cudaDevAttrHostRegisterSupported);
  properties->clusterLaunch = value(cudaDevAttrClusterLaunch);
}
}  // namespace

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
  REQUIRE(initialize());
  const Gpu *gpu = visible_gpu(device);
  if (gpu == nullptr) return result(cudaErrorInvalidDevice);
  *properties = {};
  snprintf(properties->name, sizeof properties->name, "%s", gpu->name.c_str());
  memcpy(properties->uuid.bytes, gpu->uuid.data(), sizeof properties->uuid.bytes);
  properties->totalGlobalMem = gpu->total_bytes;
  set_attributes(properties, device);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
  REQUIRE(initialize());
  if (visible_gpu(device) == nullptr) return result(cudaErrorInvalidDevice);
  snprintf(text, length, "0000:%02X:00.0", attribute(cudaDevAttrPciBusId, device).value_or(0));
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can_access, int, int) {
  REQUIRE(initialize());
  *can_access = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  REQUIRE(require_current_context());
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;  // as on every GPU since compute capability 7.0
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() { return result(require_current_context()); }
EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

// --- functions of the driver ---

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                                    unsigned long long flags,
                                                    cudaDriverEntryPointQueryResult *found) {
  using GetProcAddress = int (*)(const char *, void **, int, unsigned long long, int *);
  static const auto get_address = [] {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    return driver == nullptr ? nullptr : reinterpret_cast<GetProcAddress>(dlsym(driver, "cuGetProcAddress_v2"));
  }();
  *function = nullptr;
  if (found != nullptr) *found = cudaDriverEntryPointSymbolNotFound;
  if (get_address == nullptr) return result(cudaErrorNotSupported);
  int status = 0;
  get_address(symbol, function, static_cast<int>(version), flags, &status);
  if (*function == nullptr) return result(cudaErrorSymbolNotFound);
  if (found != nullptr) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                           cudaDriverEntryPointQueryResult *found) {
  return cudaGetDriverEntryPointByVersion(symbol, function, CUDART_VERSION, flags, found);
}
