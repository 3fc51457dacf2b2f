// libcudart: memory, streams and events.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "cudart.h"

using namespace virtual_gpu;

namespace {
// Pinned memory of the host: begin and size.
struct PinnedMemory {
  std::mutex mutex;
  std::map<uintptr_t, size_t> ranges;

  bool contains(const void *address) {
    std::lock_guard lock(mutex);
    auto range = ranges.upper_bound(reinterpret_cast<uintptr_t>(address));
    if (range == ranges.begin()) return false;
    --range;
    return reinterpret_cast<uintptr_t>(address) < range->first + range->second;
  }
  void add(void *address, size_t bytes) {
    std::lock_guard lock(mutex);
    ranges[reinterpret_cast<uintptr_t>(address)] = bytes;
  }
  bool remove(void *address) {
    std::lock_guard lock(mutex);
    return ranges.erase(reinterpret_cast<uintptr_t>(address)) != 0;
  }
};
PinnedMemory &pinned() {
  static auto *instance = new PinnedMemory;
  return *instance;
}
}  // namespace

EXPORT cudaError_t cudaMalloc(void **address, size_t bytes) {
  return result(allocate(current_ordinal(), bytes, address));
}

EXPORT cudaError_t cudaFree(void *address) {
  REQUIRE(require_current_context());
  return result(deallocate(address));
}

EXPORT cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  REQUIRE(require_current_context());
  *available = free_bytes(current_ordinal());
  *total = visible_gpu(current_ordinal())->total_bytes;
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned) {
  REQUIRE(require_current_context());
  if (posix_memalign(address, 4096, std::max<size_t>(bytes, 1)) != 0) return result(cudaErrorMemoryAllocation);
  pinned().add(*address, bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMallocHost(void **address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }

EXPORT cudaError_t cudaFreeHost(void *address) {
  if (address == nullptr) return cudaSuccess;
  if (!pinned().remove(address)) return result(cudaErrorInvalidValue);
  free(address);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned) {
  REQUIRE(require_current_context());
  pinned().add(address, bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void *address) {
  return pinned().remove(address) ? cudaSuccess : result(cudaErrorHostMemoryNotRegistered);
}

EXPORT cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) {
  *device = host;
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address) {
  REQUIRE(initialize());
  void *pointer = const_cast<void *>(address);
  *attributes = {};
  attributes->device = current_ordinal();
  if (const int owner = owner_of(address); owner >= 0) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = owner;
    attributes->devicePointer = pointer;
    return cudaSuccess;
  }
  attributes->type = pinned().contains(address) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  attributes->hostPointer = pointer;
  if (attributes->type == cudaMemoryTypeHost) attributes->devicePointer = pointer;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void *destination, const void *source, size_t bytes, cudaMemcpyKind) {
  REQUIRE(require_current_context());
  copy(destination, source, bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(void *destination, const void *source, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t) {
  return cudaMemcpy(destination, source, bytes, kind);
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *destination, int, const void *source, int, size_t bytes, cudaStream_t) {
  return cudaMemcpy(destination, source, bytes, cudaMemcpyDeviceToDevice);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *destination, size_t destination_pitch, const void *source,
                                     size_t source_pitch, size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  REQUIRE(require_current_context());
  for (size_t row = 0; row < height; ++row)
    copy(static_cast<char *>(destination) + row * destination_pitch,
         static_cast<const char *>(source) + row * source_pitch, width);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void *address, int value, size_t bytes) {
  REQUIRE(require_current_context());
  fill(address, value, bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(address, value, bytes);
}

// --- streams and events ---

namespace {
struct Stream {
  int priority = 0;
};

struct Event {
  std::chrono::steady_clock::time_point recorded_at;
  bool is_recorded = false;
};

// 0, cudaStreamLegacy and cudaStreamPerThread are streams that no one creates.
Stream *created(cudaStream_t stream) {
  return stream <= cudaStreamPerThread ? nullptr : reinterpret_cast<Stream *>(stream);
}
}  // namespace

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int priority) {
  REQUIRE(require_current_context());
  *stream = reinterpret_cast<cudaStream_t>(new Stream{priority});
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete created(stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = created(stream) == nullptr ? 0 : created(stream)->priority;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t) { return result(require_current_context()); }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) { return result(require_current_context()); }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return result(require_current_context());
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned) {
  callback(stream, cudaSuccess, data);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *data) {
  function(data);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
  REQUIRE(require_current_context());
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status, unsigned long long *id,
                                            cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                            const cudaGraphEdgeData **edges, size_t *dependency_count) {
  *status = cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 0;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (dependency_count != nullptr) *dependency_count = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(current, *mode);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  REQUIRE(require_current_context());
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event *>(event);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  REQUIRE(require_current_context());
  *reinterpret_cast<Event *>(event) = {std::chrono::steady_clock::now(), true};
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t) { return result(require_current_context()); }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) { return result(require_current_context()); }

// Time of the host, since no kernel runs: it says nothing of a GPU.
EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const auto *first = reinterpret_cast<Event *>(start), *last = reinterpret_cast<Event *>(end);
  if (!first->is_recorded || !last->is_recorded) return result(cudaErrorInvalidResourceHandle);
  *milliseconds = std::chrono::duration<float, std::milli>(last->recorded_at - first->recorded_at).count();
  return cudaSuccess;
}
