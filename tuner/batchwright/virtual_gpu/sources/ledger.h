// The ledger of a session: which process holds how much memory of which GPU, and the failures to come. A file that all
// processes of the session map, under a mutex that survives the death of its holder.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

#include "virtual_gpu.h"

namespace virtual_gpu {

constexpr int kMostGpus = 16;       // MOST_GPUS of description.py
constexpr int kMostProcesses = 512;
constexpr int kMostEvents = 64;

// The numbers are those of session.py.
enum EventKind : int32_t {
  kNoEvent = 0,
  kAllocationFailure = 1,
  kLastingAllocationFailure = 2,
  kMemoryTaken = 3,
  kDeviceLost = 4,
  kEccError = 5,
  kSlowKernels = 6,
};

struct Event {
  int32_t kind;
  int32_t gpu;
  int64_t allocations_left;  // until the event happens
  int64_t amount;            // bytes of kMemoryTaken, microseconds of kSlowKernels
};

struct Process {
  int32_t pid;          // 0: a free entry
  int32_t is_external;  // not a process of this host: it never dies
  uint64_t start_time;  // of the process, which tells it from a later one with its number
  int64_t used_bytes[kMostGpus];
};

// The failures in force, which every call reads without the mutex.
struct Failures {
  std::atomic<int32_t> is_lost;
  std::atomic<int32_t> ecc_errors;
  std::atomic<int64_t> launch_pause_microseconds;
  int32_t allocations_fail;
};

struct LedgerFile {
  pthread_mutex_t mutex;
  int64_t total_bytes[kMostGpus];
  Failures failures[kMostGpus];
  Event events[kMostEvents];
  Process processes[kMostProcesses];
};

class Ledger {
 public:
  // Map the ledger at `path`. Returns nullptr, with errno set, if there is none.
  static Ledger *open(const char *path);
  // Make a new one. Returns nullptr, with errno set, if it cannot be written.
  static Ledger *create(const char *path);
  ~Ledger();

  int64_t used_bytes(int gpu);
  int processes(int gpu, ProcessUse *uses, int capacity);
  // Take memory for this process: of its context, or an allocation, which may be made to fail.
  Status charge_context(int gpu, int64_t bytes);
  Status charge_allocation(int gpu, int64_t bytes);
  void release(int gpu, int64_t bytes);

  const Failures &failures(int gpu) const { return file_->failures[gpu]; }

  // By the owner of the session.
  void set_total(int gpu, int64_t bytes);
  int occupy(int gpu, int64_t bytes);          // returns the number of a new external process, 0 if there is no room
  Status vacate(int pid);
  Status add_event(const Event &event);        // kInvalidValue if there are too many
  void clear_failures(int gpu);

 private:
  explicit Ledger(LedgerFile *file) : file_(file) {}
  static Ledger *map(const char *path, int flags);

  friend class LedgerLock;
  int64_t sum(int gpu) const;
  Status take(Process *process, int gpu, int64_t bytes);
  Process *own_process();
  Process *free_process();
  int add_external(int gpu, int64_t bytes);
  bool count_allocation(int gpu);
  bool happen(const Event &event);

  LedgerFile *file_;
  Process *own_ = nullptr;
  int32_t own_pid_ = 0;
};

}  // namespace virtual_gpu
