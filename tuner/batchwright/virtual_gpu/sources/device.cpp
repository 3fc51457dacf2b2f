// Contexts and memory of this process.
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "ledger.h"

namespace virtual_gpu {

namespace {
struct Context {
  std::atomic<int> ecc_errors = 0;  // of the GPU when the context was made: later ones concern it
  std::atomic<bool> exists = false;
};

std::mutex mutex;
Context contexts[kMostGpus];
std::atomic<pid_t> initialized_by = 0;
thread_local int current = 0;

Ledger *open_ledger() {
  const std::string path = session_folder() + "/ledger";
  Ledger *opened = Ledger::open(path.c_str());
  if (opened == nullptr) report("cannot open " + path + ": " + strerror(errno));
  return opened;
}

// nullptr without a session.
Ledger *ledger() {
  static Ledger *instance = gpu_count() == 0 ? nullptr : open_ledger();
  return instance;
}

// Failures that a process with a context meets in every call.
Status injected_failure(int gpu) {
  const Failures &failures = ledger()->failures(gpu);
  if (failures.is_lost) return kDevicesUnavailable;
  if (contexts[gpu].exists && failures.ecc_errors > contexts[gpu].ecc_errors) return kEccUncorrectable;
  return kSuccess;
}

Status make_context(int gpu) {
  std::lock_guard lock(mutex);
  if (contexts[gpu].exists) return kSuccess;
  if (const Status status = ledger()->charge_context(gpu, gpu_at(gpu)->context_bytes)) return status;
  contexts[gpu].ecc_errors = ledger()->failures(gpu).ecc_errors.load();
  contexts[gpu].exists = true;
  return kSuccess;
}
}  // namespace

int current_ordinal() { return current; }
void set_current_ordinal(int ordinal) { current = ordinal; }

Status initialize() {
  if (visible_count() == 0 || ledger() == nullptr) return kNoDevice;
  pid_t none = 0;
  const pid_t pid = getpid();
  return initialized_by.compare_exchange_strong(none, pid) || none == pid ? kSuccess : kNotInitialized;
}

Status require_context(int ordinal) {
  if (const Status status = initialize()) return status;
  const int gpu = gpu_of_ordinal(ordinal);
  if (gpu < 0) return kInvalidDevice;
  if (const Status status = injected_failure(gpu)) return status;
  return contexts[gpu].exists ? kSuccess : make_context(gpu);
}

Status require_current_context() { return require_context(current); }

bool has_context(int ordinal) {
  const int gpu = gpu_of_ordinal(ordinal);
  return gpu >= 0 && initialized_by == getpid() && contexts[gpu].exists;
}

Status charge(int ordinal, size_t bytes) {
  if (const Status status = require_context(ordinal)) return status;
  if (const Status status = ledger()->charge_allocation(gpu_of_ordinal(ordinal), static_cast<int64_t>(bytes)))
    return status;
  return injected_failure(gpu_of_ordinal(ordinal));  // this allocation may have brought one about
}

void release(int ordinal, size_t bytes) {
  ledger()->release(gpu_of_ordinal(ordinal), static_cast<int64_t>(bytes));
}

Status allocate(int ordinal, size_t bytes, void **address) {
  *address = nullptr;
  if (const Status status = require_context(ordinal)) return status;
  if (bytes == 0) return kSuccess;
  bytes = rounded(bytes);
  if (const Status status = charge(ordinal, bytes)) return status;
  *address = reserve_addresses(bytes, kGranularity);
  if (*address == nullptr) {
    release(ordinal, bytes);
    return kOutOfMemory;
  }
  map_memory(*address, bytes, ordinal);
  return kSuccess;
}

Status deallocate(void *address) {
  if (const Status status = initialize()) return status;
  if (address == nullptr) return kSuccess;
  const int ordinal = owner_of(address);
  const size_t bytes = ordinal < 0 ? 0 : unmap_memory(address);
  if (bytes == 0) return kInvalidValue;
  release(ordinal, bytes);
  return_addresses(address, bytes);
  return kSuccess;
}

size_t free_bytes(int ordinal) {
  const int gpu = gpu_of_ordinal(ordinal);
  const int64_t available = gpu_at(gpu)->total_bytes - used_bytes(gpu);
  return available > 0 ? static_cast<size_t>(available) : 0;
}

Status launch() {
  if (const Status status = require_current_context()) return status;
  const int64_t pause = ledger()->failures(gpu_of_ordinal(current)).launch_pause_microseconds;
  if (pause > 0) std::this_thread::sleep_for(std::chrono::microseconds(pause));
  return kSuccess;
}

bool is_lost(int gpu) { return ledger() != nullptr && ledger()->failures(gpu).is_lost; }

int64_t used_bytes(int gpu) { return ledger() == nullptr ? 0 : ledger()->used_bytes(gpu); }

int processes(int gpu, ProcessUse *uses, int capacity) {
  return ledger() == nullptr ? 0 : ledger()->processes(gpu, uses, capacity);
}

}  // namespace virtual_gpu
