// libcudart: kernels, which are registered when torch's libraries are loaded, and their launches.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "cudart.h"

using namespace virtual_gpu;

namespace {
struct LaunchConfiguration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<LaunchConfiguration> configurations;

// Size of the elements that a kernel of `tensor.fill_(value)` writes, by its mangled name (aten/src/ATen/native/cuda/
// FillKernel.cu); 0 for any other kernel, and for complex numbers.
size_t fill_element_bytes(const char *name) {
  if (strstr(name, "vectorized_elementwise_kernel") == nullptr) return 0;
  constexpr char functor[] = "11FillFunctorI";
  const char *type = strstr(name, functor);
  if (type == nullptr) return 0;
  type += sizeof functor - 1;
  if (strchr("bha", *type) != nullptr) return 1;
  if (strchr("fi", *type) != nullptr) return 4;
  if (strchr("dlx", *type) != nullptr) return 8;
  const bool is_half = strncmp(type, "N3c104HalfE", 11) == 0 || strncmp(type, "N3c108BFloat16E", 15) == 0;
  return *type == 's' || is_half ? 2 : 0;
}

// Never destroyed: libraries unregister themselves while the process ends.
struct Registry {
  std::mutex mutex;
  std::unordered_map<const void *, size_t> fill_kernels;  // by host function: the size of their elements
  std::unordered_map<const void *, size_t> symbols;       // by host variable: the size of the variable on the GPU
  std::unordered_map<const void *, void *> symbol_memory;
};
Registry &registry() {
  static auto *instance = new Registry;
  return *instance;
}

constexpr size_t kLargestFill = size_t{64} << 10;

// Counters, scales and flags then hold what they should, without the computation of operators.
void run_fill(const void *kernel, void **arguments) {
  size_t element_bytes = 0;
  {
    std::lock_guard lock(registry().mutex);
    const auto found = registry().fill_kernels.find(kernel);
    if (found == registry().fill_kernels.end()) return;
    element_bytes = found->second;
  }
  const int count = *static_cast<int *>(arguments[0]);
  const auto *value = static_cast<const char *>(arguments[1]);
  if (count <= 0 || count * element_bytes > kLargestFill) return;
  std::string contents;
  for (int i = 0; i < count; ++i) contents.append(value, element_bytes);
  copy(*static_cast<void **>(arguments[2]), contents.data(), contents.size());
}

Status check_configuration(dim3 grid, dim3 block, size_t shared_bytes) {
  const int ordinal = current_ordinal();
  const auto limit = [ordinal](cudaDeviceAttr number) { return static_cast<size_t>(*attribute(number, ordinal)); };
  const size_t threads = size_t{block.x} * block.y * block.z, blocks = size_t{grid.x} * grid.y * grid.z;
  const bool is_valid = threads > 0 && blocks > 0 && threads <= limit(cudaDevAttrMaxThreadsPerBlock) &&
                        block.z <= limit(cudaDevAttrMaxBlockDimZ) && grid.x <= limit(cudaDevAttrMaxGridDimX) &&
                        grid.y <= limit(cudaDevAttrMaxGridDimY) && grid.z <= limit(cudaDevAttrMaxGridDimZ);
  if (!is_valid) return kInvalidConfiguration;
  return shared_bytes > limit(cudaDevAttrMaxSharedMemoryPerBlockOptin) ? kInvalidValue : kSuccess;
}

// Of the architectures that torch 2.13 is compiled for (`torch.cuda.get_arch_list()`), the one whose code runs on a GPU:
// CUB looks up its settings by it, and fails for any other.
int kernel_architecture(const Gpu &gpu) {
  const int own = static_cast<int>(gpu.compute_capability_major * 10 + gpu.compute_capability_minor);
  int found = own;
  for (const int compiled : {75, 80, 86, 90, 100, 120})
    if (compiled <= own) found = compiled;
  return found;
}

cudaError_t launch_kernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes) {
  REQUIRE(launch());
  REQUIRE(check_configuration(grid, block, shared_bytes));
  if (arguments != nullptr) run_fill(kernel, arguments);
  return cudaSuccess;
}
}  // namespace

EXPORT void **__cudaRegisterFatBinary(void *) {
  static void *handle = nullptr;
  return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **) {}
EXPORT void __cudaUnregisterFatBinary(void **) {}
EXPORT char __cudaInitModule(void **) { return 1; }

EXPORT void __cudaRegisterVar(void **, char *variable, char *, const char *, int, size_t size, int, int) {
  std::lock_guard lock(registry().mutex);
  registry().symbols[variable] = size;
}

EXPORT void __cudaRegisterManagedVar(void **, void **, char *, const char *, int, size_t, int, int) {}

EXPORT void __cudaRegisterFunction(void **, const char *kernel, char *, const char *name, int, uint3 *, uint3 *, dim3 *,
                                   dim3 *, int *) {
  const size_t element_bytes = fill_element_bytes(name);
  if (element_bytes == 0) return;
  std::lock_guard lock(registry().mutex);
  registry().fill_kernels[kernel] = element_bytes;
}

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, CUstream_st *stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
  if (configurations.empty()) return result(cudaErrorMissingConfiguration);
  const LaunchConfiguration &top = configurations.back();
  *grid = top.grid;
  *block = top.block;
  *shared_bytes = top.shared_bytes;
  *static_cast<cudaStream_t *>(stream) = top.stream;
  configurations.pop_back();
  return cudaSuccess;
}

// A handle of a kernel is its host function.
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void *>(function));
  return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                                      cudaStream_t) {
  return launch_kernel(kernel, grid, block, arguments, shared_bytes);
}

EXPORT cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                                    cudaStream_t) {
  return launch_kernel(kernel, grid, block, arguments, shared_bytes);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments,
                                               size_t shared_bytes, cudaStream_t) {
  return launch_kernel(kernel, grid, block, arguments, shared_bytes);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *kernel, void **arguments) {
  return launch_kernel(kernel, configuration->gridDim, configuration->blockDim, arguments,
                       configuration->dynamicSmemBytes);
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  REQUIRE(require_current_context());
  const Gpu *gpu = visible_gpu(current_ordinal());
  *attributes = {};
  attributes->maxThreadsPerBlock = *attribute(cudaDevAttrMaxThreadsPerBlock, current_ordinal());
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = kernel_architecture(*gpu);
  attributes->maxDynamicSharedSizeBytes = *attribute(cudaDevAttrMaxSharedMemoryPerBlock, current_ordinal());
  return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute number, int value) {
  REQUIRE(require_current_context());
  const bool is_shared_memory = number == cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (is_shared_memory && value > visible_gpu(current_ordinal())->shared_memory_per_block_bytes)
    return result(cudaErrorInvalidValue);
  return cudaSuccess;
}

EXPORT cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }

// Bounded by threads, shared memory and the most resident blocks; registers are not known.
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int block_threads,
                                                                          size_t shared_bytes, unsigned) {
  REQUIRE(require_current_context());
  const Gpu *gpu = visible_gpu(current_ordinal());
  const int reserved = *attribute(cudaDevAttrReservedSharedMemoryPerBlock, current_ordinal());
  const int64_t by_threads = block_threads > 0 ? gpu->threads_per_multiprocessor / block_threads : 0;
  const int64_t by_shared = gpu->shared_memory_per_multiprocessor_bytes / (static_cast<int64_t>(shared_bytes) + reserved);
  *blocks = static_cast<int>(std::min({by_threads, by_shared, gpu->blocks_per_multiprocessor}));
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int block_threads,
                                                                 size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, block_threads, shared_bytes, 0);
}

// Variables of modules lie in host memory: the context's memory covers them.
EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
  REQUIRE(require_current_context());
  std::lock_guard lock(registry().mutex);
  const auto size = registry().symbols.find(symbol);
  if (size == registry().symbols.end()) return result(cudaErrorInvalidSymbol);
  void *&memory = registry().symbol_memory[symbol];
  if (memory == nullptr) memory = calloc(1, size->second);
  *address = memory;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *source, size_t bytes, size_t offset,
                                      cudaMemcpyKind) {
  void *address = nullptr;
  if (const cudaError_t error = cudaGetSymbolAddress(&address, symbol)) return error;
  memcpy(static_cast<char *>(address) + offset, source, bytes);
  return cudaSuccess;
}
