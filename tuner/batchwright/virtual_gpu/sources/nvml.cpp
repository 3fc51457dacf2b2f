// NVML (libnvidia-ml): all GPUs of the host, whatever CUDA_VISIBLE_DEVICES says. No wheel has nvml.h, so the types are
// declared here, as in nvidia-ml-py (pynvml.py) and the NVML API reference: https://docs.nvidia.com/deploy/nvml-api/
#include <atomic>
#include <cstdio>
#include <cstring>
#include <vector>

#include "virtual_gpu.h"

using namespace virtual_gpu;

namespace {
enum nvmlReturn_t : int {
  NVML_SUCCESS = 0,
  NVML_ERROR_UNINITIALIZED = 1,
  NVML_ERROR_INVALID_ARGUMENT = 2,
  NVML_ERROR_NOT_SUPPORTED = 3,
  NVML_ERROR_NOT_FOUND = 6,
  NVML_ERROR_INSUFFICIENT_SIZE = 7,
  NVML_ERROR_DRIVER_NOT_LOADED = 9,
  NVML_ERROR_GPU_IS_LOST = 15,
};

struct nvmlMemory_t {
  unsigned long long total, free, used;
};
struct nvmlMemory_v2_t {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
struct nvmlProcessInfo_v1_t {
  unsigned pid;
  unsigned long long used_gpu_memory;
};
struct nvmlProcessInfo_t {
  unsigned pid;
  unsigned long long used_gpu_memory;
  unsigned gpu_instance_id, compute_instance_id;
};
struct nvmlPciInfo_t {
  char bus_id_legacy[16];
  unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
  char bus_id[32];
};
struct nvmlUtilization_t {
  unsigned gpu, memory;
};
struct nvmlGpuFabricInfo_t {  // the part that the second and the third version share
  unsigned version;
  unsigned char cluster_uuid[16];
  nvmlReturn_t status;
  unsigned clique_id;
  unsigned char state;
};
using nvmlDevice_t = void *;  // the GPU and one

constexpr unsigned kNoInstance = 0xFFFFFFFF;  // of a GPU without MIG
constexpr unsigned char kFabricNotSupported = 0;  // NVML_GPU_FABRIC_STATE_NOT_SUPPORTED

std::atomic<int> initializations = 0;

int gpu_of(nvmlDevice_t device) { return static_cast<int>(reinterpret_cast<intptr_t>(device)) - 1; }
nvmlDevice_t device_of(int gpu) { return reinterpret_cast<nvmlDevice_t>(static_cast<intptr_t>(gpu) + 1); }

nvmlReturn_t check_initialized() { return initializations > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED; }

nvmlReturn_t check_device(nvmlDevice_t device) {
  if (initializations <= 0) return NVML_ERROR_UNINITIALIZED;
  if (gpu_at(gpu_of(device)) == nullptr) return NVML_ERROR_INVALID_ARGUMENT;
  return is_lost(gpu_of(device)) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

nvmlReturn_t put_text(const std::string &text, char *buffer, unsigned length) {
  if (text.size() >= length) return NVML_ERROR_INSUFFICIENT_SIZE;
  memcpy(buffer, text.c_str(), text.size() + 1);
  return NVML_SUCCESS;
}
}  // namespace

#define REQUIRE(call)                                 \
  do {                                                \
    if (const nvmlReturn_t failed = (call)) return failed; \
  } while (false)

// --- the library ---

EXPORT nvmlReturn_t nvmlInit_v2() {
  if (gpu_count() == 0) return NVML_ERROR_DRIVER_NOT_LOADED;
  ++initializations;
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlInit() { return nvmlInit_v2(); }
EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned) { return nvmlInit_v2(); }

EXPORT nvmlReturn_t nvmlShutdown() {
  REQUIRE(check_initialized());
  --initializations;
  return NVML_SUCCESS;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t error) {
  switch (error) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
  }
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned length) {
  REQUIRE(check_initialized());
  return put_text(kDriverRelease, text, length);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *text, unsigned length) {
  REQUIRE(check_initialized());
  return put_text(std::string("13.") + kDriverRelease, text, length);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = kDriverVersion;
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

// --- handles ---

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
  REQUIRE(check_initialized());
  *count = gpu_count();
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
  REQUIRE(check_device(device_of(static_cast<int>(index))));
  *device = device_of(static_cast<int>(index));
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
  REQUIRE(check_initialized());
  for (int gpu = 0; gpu < gpu_count(); ++gpu) {
    if (uuid_text(*gpu_at(gpu)) != uuid) continue;
    *device = device_of(gpu);
    return check_device(*device);
  }
  return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvmlDevice_t *device) {
  REQUIRE(check_initialized());
  unsigned domain = 0, bus = 0;  // the bus of a GPU is its number and one
  if (sscanf(text, "%x:%x", &domain, &bus) != 2 || gpu_at(static_cast<int>(bus) - 1) == nullptr)
    return NVML_ERROR_NOT_FOUND;
  *device = device_of(static_cast<int>(bus) - 1);
  return check_device(*device);
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned length) {
  REQUIRE(check_device(device));
  return put_text(uuid_text(*gpu_at(gpu_of(device))), text, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned length) {
  REQUIRE(check_device(device));
  return put_text(gpu_at(gpu_of(device))->name, text, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
  REQUIRE(check_device(device));
  *index = gpu_of(device);
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *minor) {
  return nvmlDeviceGetIndex(device, minor);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info) {
  REQUIRE(check_device(device));
  *info = {};
  info->bus = gpu_of(device) + 1;
  snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "0000:%02X:00.0", info->bus & 0xFF);
  snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus & 0xFF);
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
  REQUIRE(check_device(device));
  *major = static_cast<int>(gpu_at(gpu_of(device))->compute_capability_major);
  *minor = static_cast<int>(gpu_at(gpu_of(device))->compute_capability_minor);
  return NVML_SUCCESS;
}

// --- memory and processes ---

// The driver's reserve is what CUDA does not count: free and used are the same here as for cudaMemGetInfo.
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
  REQUIRE(check_device(device));
  const Gpu *gpu = gpu_at(gpu_of(device));
  memory->total = gpu->nvml_total_bytes;
  memory->reserved = gpu->nvml_total_bytes - gpu->total_bytes;
  memory->used = used_bytes(gpu_of(device));
  memory->free = gpu->total_bytes - memory->used;
  return NVML_SUCCESS;
}

// The first version counts the reserve as used.
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
  nvmlMemory_v2_t second{};
  REQUIRE(nvmlDeviceGetMemoryInfo_v2(device, &second));
  *memory = {second.total, second.free, second.used + second.reserved};
  return NVML_SUCCESS;
}

namespace {
// Both versions return the number of processes in `count`, even if there is no room for them.
template <typename Info, typename Convert>
nvmlReturn_t list_processes(nvmlDevice_t device, unsigned *count, Info *infos, Convert convert) {
  REQUIRE(check_device(device));
  std::vector<ProcessUse> uses(*count);
  const int found = processes(gpu_of(device), uses.data(), static_cast<int>(uses.size()));
  *count = found;
  if (found > static_cast<int>(uses.size())) return NVML_ERROR_INSUFFICIENT_SIZE;
  for (int i = 0; i < found; ++i) infos[i] = convert(uses[i]);
  return NVML_SUCCESS;
}
}  // namespace

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                            nvmlProcessInfo_t *infos) {
  return list_processes(device, count, infos, [](const ProcessUse &use) {
    return nvmlProcessInfo_t{use.pid, use.used_bytes, kNoInstance, kNoInstance};
  });
}

// The first version, which torch calls for the text of an out-of-memory error (c10/cuda/CUDACachingAllocator.cpp).
EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count,
                                                         nvmlProcessInfo_v1_t *infos) {
  return list_processes(device, count, infos,
                        [](const ProcessUse &use) { return nvmlProcessInfo_v1_t{use.pid, use.used_bytes}; });
}

EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                             nvmlProcessInfo_t *) {
  REQUIRE(check_device(device));
  *count = 0;
  return NVML_SUCCESS;
}

// --- what a virtual GPU has no figure of ---

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
  REQUIRE(check_device(device));
  *rates = {};
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t, int, unsigned *) { return NVML_ERROR_NOT_SUPPORTED; }
EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t, unsigned *) { return NVML_ERROR_NOT_SUPPORTED; }
EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t, unsigned *, unsigned *) { return NVML_ERROR_NOT_SUPPORTED; }
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t, unsigned, int *) {
  return NVML_ERROR_NOT_SUPPORTED;
}
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t, unsigned, nvmlPciInfo_t *) {
  return NVML_ERROR_NOT_SUPPORTED;
}

// No fabric. torch asks before it makes an expandable segment, and takes no other answer.
EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_t *info) {
  REQUIRE(check_device(device));
  info->status = NVML_SUCCESS;
  info->state = kFabricNotSupported;
  return NVML_SUCCESS;
}
