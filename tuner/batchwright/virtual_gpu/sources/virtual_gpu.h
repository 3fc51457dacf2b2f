// The virtual GPUs of this process: what the libraries that stand in for CUDA's (libcudart, libcuda, NVML, cuBLAS, cuDNN,
// NCCL) share. A "GPU" is numbered over the whole host, as NVML does; an "ordinal" counts what CUDA_VISIBLE_DEVICES leaves.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#pragma GCC visibility push(default)
namespace virtual_gpu {

// Results, with the numbers that cudaError_t and CUresult share.
enum Status : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,  // cudaErrorInitializationError, CUDA_ERROR_NOT_INITIALIZED
  kInvalidConfiguration = 9,
  kDevicesUnavailable = 46,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kEccUncorrectable = 214,
  kInvalidHandle = 400,
  kNotSupported = 801,
};

constexpr size_t kGranularity = size_t{2} << 20;  // of device memory: cuMemGetAllocationGranularity of every recent GPU
constexpr int kDriverVersion = 13000;             // CUDA 13.0, of the wheels that torch 2.13 depends on
constexpr const char *kDriverRelease = "580.65.06";  // the first driver of CUDA 13.0, by its release notes

struct Gpu {
  std::string name;
  std::array<uint8_t, 16> uuid{};
  int64_t compute_capability_major = 0, compute_capability_minor = 0;
  int64_t total_bytes = 0;       // as cudaMemGetInfo reports it
  int64_t nvml_total_bytes = 0;  // and as NVML does, which includes the driver's reserve
  int64_t context_bytes = 0;     // of the context of one process
  int64_t multiprocessors = 0, clock_khz = 0, l2_cache_bytes = 0;
  int64_t threads_per_multiprocessor = 0, blocks_per_multiprocessor = 0;
  int64_t shared_memory_per_multiprocessor_bytes = 0, shared_memory_per_block_bytes = 0;
  int64_t cudnn_workspace_bytes = 0;
};

// --- description.cpp: the host of this session ---
int gpu_count();                           // of the host; 0 without a session
const Gpu *gpu_at(int gpu);                // nullptr if there is none
std::string uuid_text(const Gpu &gpu);     // GPU-xxxxxxxx-xxxx-...
size_t host_memory_limit();                // bytes of this host with which a process may back device memory
const std::string &session_folder();       // empty without a session
int visible_count();                       // GPUs that CUDA_VISIBLE_DEVICES leaves
int gpu_of_ordinal(int ordinal);           // -1 if there is none
const Gpu *visible_gpu(int ordinal);       // nullptr if there is none

// --- device.cpp: contexts and memory of this process ---
int current_ordinal();                     // of this thread
void set_current_ordinal(int ordinal);
Status initialize();                       // cuInit: kNotInitialized in a child forked after its parent's call
Status require_context(int ordinal);       // make the context of this process if there is none; report injected failures
bool has_context(int ordinal);
Status require_current_context();
Status charge(int ordinal, size_t bytes);  // take physical memory
void release(int ordinal, size_t bytes);
Status allocate(int ordinal, size_t bytes, void **address);  // cudaMalloc
Status deallocate(void *address);                            // cudaFree
size_t free_bytes(int ordinal);
Status launch();                           // a kernel: require a context, pause if kernels are slow
bool is_lost(int gpu);                     // as NVML sees it
int64_t used_bytes(int gpu);               // by all processes
struct ProcessUse {
  unsigned pid;
  uint64_t used_bytes;
};
int processes(int gpu, ProcessUse *uses, int capacity);  // those that hold memory; returns how many there are

// --- address_space.cpp: addresses of device memory, and its contents ---
size_t rounded(size_t bytes);                                   // to kGranularity
void *reserve_addresses(size_t bytes, size_t alignment);        // nullptr if there are none
void return_addresses(void *address, size_t bytes);
void map_memory(void *address, size_t bytes, int ordinal);      // these addresses have physical memory now
size_t unmap_memory(void *address);                             // of one mapping; returns its bytes, 0 if there is none
void unmap_range(void *address, size_t bytes);                  // all mappings that begin in it
int owner_of(const void *address);                              // ordinal of a mapped address, else -1
void copy(void *destination, const void *source, size_t bytes);
void fill(void *destination, int value, size_t bytes);

// --- attributes.cpp ---
std::optional<int> attribute(int number, int ordinal);  // of cudaDeviceGetAttribute and cuDeviceGetAttribute

// --- errors.cpp ---
struct ErrorText {
  int number;
  const char *runtime_name, *driver_name, *text;
};
const ErrorText &error_text(int number);

// --- log.cpp: what a developer of the virtual card wants to know ---
// Add a line to the file `log` of the session, once per process.
void log_once(std::string_view kind, std::string_view name);
// Tell the user why there is no virtual GPU, on stderr, once per process.
void report(const std::string &message);

}  // namespace virtual_gpu
#pragma GCC visibility pop

// Exported under its C name; everything else is hidden (-fvisibility=hidden), but for the functions above.
#define EXPORT extern "C" __attribute__((visibility("default")))
