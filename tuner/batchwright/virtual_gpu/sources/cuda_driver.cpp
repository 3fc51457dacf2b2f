// libcuda: what torch takes from the driver. Virtual memory management (expandable segments), contexts, and modules
// (Triton, NVRTC), of which any image loads and no kernel runs.
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

#include "virtual_gpu.h"

using namespace virtual_gpu;

#define REQUIRE(call)                                                            \
  do {                                                                           \
    if (const Status failed = (call)) return static_cast<CUresult>(failed);      \
  } while (false)

namespace {
CUresult result(Status status) { return static_cast<CUresult>(status); }

// The primary context of a GPU is its ordinal and one.
CUcontext context_of(int ordinal) { return reinterpret_cast<CUcontext>(static_cast<intptr_t>(ordinal) + 1); }
int ordinal_of(CUcontext context) { return static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1; }

void *pointer(CUdeviceptr address) { return reinterpret_cast<void *>(address); }
}  // namespace

// --- errors, versions, devices ---

EXPORT CUresult cuInit(unsigned) { return result(initialize()); }

EXPORT CUresult cuDriverGetVersion(int *version) {
  *version = kDriverVersion;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error_text(error).text;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **name) {
  *name = error_text(error).driver_name;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
  REQUIRE(initialize());
  *count = visible_count();
  return CUDA_SUCCESS;
}

namespace {
// A device of the driver is its ordinal.
Status check_device(CUdevice device) {
  const Status status = initialize();
  return status == kSuccess && visible_gpu(device) == nullptr ? kInvalidDevice : status;
}
}  // namespace

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  REQUIRE(check_device(ordinal));
  *device = ordinal;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
  REQUIRE(check_device(device));
  snprintf(name, length, "%s", visible_gpu(device)->name.c_str());
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  REQUIRE(check_device(device));
  memcpy(uuid->bytes, visible_gpu(device)->uuid.data(), sizeof uuid->bytes);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
  REQUIRE(check_device(device));
  *bytes = visible_gpu(device)->total_bytes;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute number, CUdevice device) {
  REQUIRE(check_device(device));
  const auto found = attribute(number, device);
  if (!found) log_once("unknown device attribute", std::to_string(static_cast<int>(number)));
  *value = found.value_or(0);
  return CUDA_SUCCESS;
}

// --- contexts ---

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
  REQUIRE(check_device(device));
  if (flags != nullptr) *flags = 0;
  *is_active = has_context(device);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  REQUIRE(require_context(device));
  *context = context_of(device);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
  REQUIRE(initialize());
  *context = has_context(current_ordinal()) ? context_of(current_ordinal()) : nullptr;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  REQUIRE(initialize());
  if (context != nullptr) set_current_ordinal(ordinal_of(context));
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
  REQUIRE(initialize());
  *device = current_ordinal();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) { return cuCtxSetCurrent(context); }

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) {
  if (context != nullptr) *context = context_of(current_ordinal());
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize() { return result(require_current_context()); }

// --- memory ---

EXPORT CUresult cuMemGetInfo_v2(size_t *available, size_t *total) {
  REQUIRE(require_current_context());
  *available = free_bytes(current_ordinal());
  *total = visible_gpu(current_ordinal())->total_bytes;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
  return result(allocate(current_ordinal(), bytes, reinterpret_cast<void **>(address)));
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) { return result(deallocate(pointer(address))); }

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr destination, const void *source, size_t bytes) {
  REQUIRE(require_current_context());
  copy(pointer(destination), source, bytes);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyDtoH_v2(void *destination, CUdeviceptr source, size_t bytes) {
  REQUIRE(require_current_context());
  copy(destination, pointer(source), bytes);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream) {
  REQUIRE(require_current_context());
  if (value == 0) {
    fill(pointer(address), 0, count * sizeof value);
    return CUDA_SUCCESS;
  }
  for (size_t i = 0; i < count; ++i) copy(pointer(address + i * sizeof value), &value, sizeof value);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute number, CUdeviceptr address) {
  REQUIRE(initialize());
  const int owner = owner_of(pointer(address));
  if (number == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
    *static_cast<CUdeviceptr *>(value) = address;
    return CUDA_SUCCESS;
  }
  if (owner < 0) return CUDA_ERROR_INVALID_VALUE;
  switch (number) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<CUcontext *>(value) = context_of(owner); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *static_cast<unsigned *>(value) = CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int *>(value) = owner; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

// --- virtual memory management ---

namespace {
// What a CUmemGenericAllocationHandle stands for. torch unmaps memory before it releases it.
struct PhysicalMemory {
  size_t bytes;
  int ordinal;
};
PhysicalMemory *memory_of(CUmemGenericAllocationHandle handle) { return reinterpret_cast<PhysicalMemory *>(handle); }
}  // namespace

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *,
                                              CUmemAllocationGranularity_flags) {
  REQUIRE(initialize());
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr,
                                    unsigned long long) {
  REQUIRE(initialize());
  *address = reinterpret_cast<CUdeviceptr>(reserve_addresses(bytes, alignment));
  return *address == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  return_addresses(pointer(address), bytes);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                            unsigned long long) {
  if (bytes % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  REQUIRE(charge(properties->location.id, bytes));
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new PhysicalMemory{bytes, properties->location.id});
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  REQUIRE(initialize());
  PhysicalMemory *memory = memory_of(handle);
  release(memory->ordinal, memory->bytes);
  delete memory;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                         unsigned long long) {
  REQUIRE(initialize());
  map_memory(pointer(address), bytes, memory_of(handle)->ordinal);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  unmap_range(pointer(address), bytes);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) { return CUDA_SUCCESS; }

// --- modules: a function is its name ---

namespace {
const char *interned(const char *name) {
  static auto *names = new std::set<std::string>;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  return names->insert(name).first->c_str();
}

CUresult load(CUmodule *module) {
  REQUIRE(require_current_context());
  static int loaded = 0;
  *module = reinterpret_cast<CUmodule>(&loaded);
  return CUDA_SUCCESS;
}
}  // namespace

EXPORT CUresult cuModuleLoad(CUmodule *module, const char *) { return load(module); }
EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *) { return load(module); }
EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *, unsigned, CUjit_option *, void **) {
  return load(module);
}
EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *name) {
  *function = reinterpret_cast<CUfunction>(const_cast<char *>(interned(name)));
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute number, CUfunction) {
  *value = number == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : number == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

EXPORT CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                               void **, void **) {
  return result(launch());
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *, CUfunction, void **, void **) { return result(launch()); }

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction, int, size_t) {
  *blocks = 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                       const cuuint64_t *, const cuuint32_t *, const cuuint32_t *,
                                       CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill) {
  memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}

// --- functions by name ---

namespace {
// Functions of which a later release changed the arguments: their second version is for CUDA 13 (cudaTypedefs.h), which
// torch does not ask for.
const std::set<std::string> kChangedInCuda13 = {"cuCtxGetDevice", "cuCtxSynchronize"};

void *find_function(const std::string &name, int version) {
  static void *const self = dlopen("libcuda.so.1", RTLD_NOW);
  const bool wants_first = kChangedInCuda13.count(name) != 0 && version < 13000;
  void *function = wants_first ? nullptr : dlsym(self, (name + "_v2").c_str());
  return function != nullptr ? function : dlsym(self, name.c_str());
}
}  // namespace

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t,
                                    CUdriverProcAddressQueryResult *found) {
  *function = find_function(symbol, version);
  const bool is_found = *function != nullptr;
  if (!is_found) log_once("unknown function of the driver", symbol);
  if (found != nullptr) *found = is_found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return is_found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// A libcudart that is linked statically (cuFFT's, cuSOLVER's) asks for tables that only the real driver has.
EXPORT CUresult cuGetExportTable(const void **, const CUuuid *) { return CUDA_ERROR_NOT_FOUND; }
