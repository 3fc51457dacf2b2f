#include "ledger.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace virtual_gpu {

namespace {
constexpr int32_t kFirstExternalPid = 4194305;  // above PID_MAX_LIMIT (include/linux/threads.h), so of no real process

// Returns the start time of a process in clock ticks, or 0 if it has ended. A zombie has: the driver has taken back its
// memory. Fields 3 (state) and 22 (start time) of /proc/PID/stat, proc(5).
uint64_t start_time_of(int pid) {
  char path[32], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  const ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  if (length <= 0) return 0;
  text[length] = '\0';
  const char *position = strrchr(text, ')');  // ends the name, which may hold spaces
  if (position == nullptr) return 0;
  position += 2;
  if (*position == 'Z' || *position == 'X') return 0;
  for (int field = 3; field < 22 && position != nullptr; ++field) {
    position = strchr(position, ' ');
    if (position != nullptr) ++position;
  }
  return position == nullptr ? 0 : std::max<uint64_t>(strtoull(position, nullptr, 10), 1);
}

bool has_ended(const Process &process) {
  return process.pid != 0 && !process.is_external && start_time_of(process.pid) != process.start_time;
}

void initialize_mutex(pthread_mutex_t *mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
}
}  // namespace

// Locks the ledger, and takes back the memory of processes that have ended.
class LedgerLock {
 public:
  explicit LedgerLock(LedgerFile *file) : file_(file) {
    if (pthread_mutex_lock(&file_->mutex) == EOWNERDEAD) pthread_mutex_consistent(&file_->mutex);
    for (Process &process : file_->processes)
      if (has_ended(process)) process = Process{};
  }
  ~LedgerLock() { pthread_mutex_unlock(&file_->mutex); }
  LedgerLock(const LedgerLock &) = delete;
  LedgerLock &operator=(const LedgerLock &) = delete;

 private:
  LedgerFile *file_;
};

Ledger *Ledger::map(const char *path, int flags) {
  const int descriptor = ::open(path, O_RDWR | O_CLOEXEC | flags, 0600);
  if (descriptor < 0) return nullptr;
  void *mapped = MAP_FAILED;
  if (flags == 0 || ftruncate(descriptor, sizeof(LedgerFile)) == 0)
    mapped = mmap(nullptr, sizeof(LedgerFile), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  const int error = errno;
  close(descriptor);
  errno = error;
  return mapped == MAP_FAILED ? nullptr : new Ledger(static_cast<LedgerFile *>(mapped));
}

Ledger *Ledger::open(const char *path) { return map(path, 0); }

Ledger *Ledger::create(const char *path) {
  Ledger *ledger = map(path, O_CREAT | O_EXCL);
  if (ledger != nullptr) initialize_mutex(&ledger->file_->mutex);
  return ledger;
}

Ledger::~Ledger() { munmap(file_, sizeof(LedgerFile)); }

int64_t Ledger::sum(int gpu) const {
  int64_t bytes = 0;
  for (const Process &process : file_->processes) bytes += process.used_bytes[gpu];
  return bytes;
}

int64_t Ledger::used_bytes(int gpu) {
  LedgerLock lock(file_);
  return sum(gpu);
}

int Ledger::processes(int gpu, ProcessUse *uses, int capacity) {
  LedgerLock lock(file_);
  int count = 0;
  for (const Process &process : file_->processes) {
    if (process.used_bytes[gpu] == 0) continue;
    if (count < capacity)
      uses[count] = {static_cast<unsigned>(process.pid), static_cast<uint64_t>(process.used_bytes[gpu])};
    ++count;
  }
  return count;
}

Process *Ledger::free_process() {
  for (Process &process : file_->processes)
    if (process.pid == 0) return &process;
  return nullptr;
}

// The entry of this process. What the program held that this process ran before an exec() is free.
Process *Ledger::own_process() {
  const int32_t pid = getpid();
  if (own_ != nullptr && own_pid_ == pid) return own_;
  for (Process &process : file_->processes)
    if (process.pid == pid) process = Process{};
  own_ = free_process();
  own_pid_ = pid;
  if (own_ != nullptr) *own_ = Process{pid, 0, start_time_of(pid), {}};
  return own_;
}

Status Ledger::take(Process *process, int gpu, int64_t bytes) {
  if (process == nullptr || sum(gpu) + bytes > file_->total_bytes[gpu]) return kOutOfMemory;
  process->used_bytes[gpu] += bytes;
  return kSuccess;
}

Status Ledger::charge_context(int gpu, int64_t bytes) {
  LedgerLock lock(file_);
  return take(own_process(), gpu, bytes);
}

Status Ledger::charge_allocation(int gpu, int64_t bytes) {
  LedgerLock lock(file_);
  return count_allocation(gpu) ? take(own_process(), gpu, bytes) : kOutOfMemory;
}

void Ledger::release(int gpu, int64_t bytes) {
  LedgerLock lock(file_);
  if (Process *process = own_process(); process != nullptr) process->used_bytes[gpu] -= bytes;
}

// Let the events happen that this allocation brings about. Returns whether it may succeed.
bool Ledger::count_allocation(int gpu) {
  bool succeeds = true;
  for (Event &event : file_->events) {
    if (event.kind == kNoEvent || event.gpu != gpu || --event.allocations_left > 0) continue;
    succeeds = happen(event) && succeeds;
    event = Event{};
  }
  return succeeds && !file_->failures[gpu].allocations_fail;
}

// Returns whether the allocation of this moment may succeed.
bool Ledger::happen(const Event &event) {
  Failures &failures = file_->failures[event.gpu];
  switch (event.kind) {
    case kAllocationFailure: return false;
    case kLastingAllocationFailure: failures.allocations_fail = 1; return false;
    case kMemoryTaken: add_external(event.gpu, event.amount); return true;
    case kDeviceLost: failures.is_lost = 1; return true;
    case kEccError: ++failures.ecc_errors; return true;
    case kSlowKernels: failures.launch_pause_microseconds = event.amount; return true;
    default: return true;
  }
}

// An external process that takes `bytes`, or all that is free. Returns its number, or 0 if nothing is free.
int Ledger::add_external(int gpu, int64_t bytes) {
  const int64_t available = file_->total_bytes[gpu] - sum(gpu);
  Process *process = free_process();
  if (process == nullptr || available <= 0) return 0;
  int32_t pid = kFirstExternalPid;
  for (const Process &other : file_->processes) pid = std::max(pid, other.pid + 1);
  *process = Process{pid, 1, 0, {}};
  process->used_bytes[gpu] = std::min(bytes, available);
  return pid;
}

void Ledger::set_total(int gpu, int64_t bytes) {
  LedgerLock lock(file_);
  file_->total_bytes[gpu] = bytes;
}

int Ledger::occupy(int gpu, int64_t bytes) {
  LedgerLock lock(file_);
  return sum(gpu) + bytes > file_->total_bytes[gpu] ? 0 : add_external(gpu, bytes);
}

Status Ledger::vacate(int pid) {
  LedgerLock lock(file_);
  for (Process &process : file_->processes) {
    if (process.pid != pid || !process.is_external) continue;
    process = Process{};
    return kSuccess;
  }
  return kInvalidValue;
}

Status Ledger::add_event(const Event &event) {
  LedgerLock lock(file_);
  if (event.allocations_left == 0 && event.kind != kAllocationFailure) {
    happen(event);
    return kSuccess;
  }
  for (Event &entry : file_->events) {
    if (entry.kind != kNoEvent) continue;
    entry = event;
    return kSuccess;
  }
  return kInvalidValue;
}

void Ledger::clear_failures(int gpu) {
  LedgerLock lock(file_);
  Failures &failures = file_->failures[gpu];
  failures.is_lost = 0;
  failures.launch_pause_microseconds = 0;
  failures.allocations_fail = 0;
  for (Event &event : file_->events)
    if (event.gpu == gpu) event = Event{};
}

}  // namespace virtual_gpu

// --- for session.py, by ctypes ---

using virtual_gpu::Ledger;

EXPORT Ledger *virtual_gpu_ledger_create(const char *path) { return Ledger::create(path); }
EXPORT void virtual_gpu_ledger_close(Ledger *ledger) { delete ledger; }
EXPORT void virtual_gpu_ledger_set_total(Ledger *ledger, int gpu, int64_t bytes) { ledger->set_total(gpu, bytes); }
EXPORT int64_t virtual_gpu_ledger_used_bytes(Ledger *ledger, int gpu) { return ledger->used_bytes(gpu); }
EXPORT int virtual_gpu_ledger_occupy(Ledger *ledger, int gpu, int64_t bytes) { return ledger->occupy(gpu, bytes); }
EXPORT int virtual_gpu_ledger_vacate(Ledger *ledger, int pid) { return ledger->vacate(pid); }
EXPORT void virtual_gpu_ledger_clear_failures(Ledger *ledger, int gpu) { ledger->clear_failures(gpu); }

EXPORT int virtual_gpu_ledger_processes(Ledger *ledger, int gpu, virtual_gpu::ProcessUse *uses, int capacity) {
  return ledger->processes(gpu, uses, capacity);
}

EXPORT int virtual_gpu_ledger_add_event(Ledger *ledger, int gpu, int kind, int64_t at_allocation, int64_t amount) {
  return ledger->add_event({kind, gpu, at_allocation, amount});
}
