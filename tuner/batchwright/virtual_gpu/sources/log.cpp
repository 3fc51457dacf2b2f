// The log of a session, and errors of its set-up.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <mutex>
#include <set>

#include "virtual_gpu.h"

namespace virtual_gpu {

namespace {
// Never destroyed: threads and destructors of torch may call us while the process ends.
struct Written {
  std::mutex mutex;
  std::set<std::string> lines;
};
Written &written() {
  static auto *instance = new Written;
  return *instance;
}

bool is_first(const std::string &line) {
  std::lock_guard lock(written().mutex);
  return written().lines.insert(line).second;
}
}  // namespace

void log_once(std::string_view kind, std::string_view name) {
  const std::string line = std::string(kind) + " " + std::string(name) + "\n";
  if (session_folder().empty() || !is_first(line)) return;
  const int file = open((session_folder() + "/log").c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return;  // the session has ended
  [[maybe_unused]] const ssize_t length = write(file, line.data(), line.size());
  close(file);
}

void report(const std::string &message) {
  if (is_first(message)) fprintf(stderr, "virtual GPU: %s\n", message.c_str());
}

}  // namespace virtual_gpu
