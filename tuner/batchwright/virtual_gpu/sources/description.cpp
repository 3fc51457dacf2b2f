// The description of the session's host, written by session.py: lines "key value", a line "gpu" before those of each GPU.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <vector>

#include "virtual_gpu.h"

namespace virtual_gpu {

namespace {
struct Host {
  std::vector<Gpu> gpus;
  std::vector<int> visible;  // the GPU of each ordinal
  size_t host_memory_bytes = 0;
};

const std::map<std::string, int64_t Gpu::*> kFigures = {
    {"compute_capability_major", &Gpu::compute_capability_major},
    {"compute_capability_minor", &Gpu::compute_capability_minor},
    {"total_bytes", &Gpu::total_bytes},
    {"nvml_total_bytes", &Gpu::nvml_total_bytes},
    {"context_bytes", &Gpu::context_bytes},
    {"multiprocessors", &Gpu::multiprocessors},
    {"clock_khz", &Gpu::clock_khz},
    {"l2_cache_bytes", &Gpu::l2_cache_bytes},
    {"threads_per_multiprocessor", &Gpu::threads_per_multiprocessor},
    {"blocks_per_multiprocessor", &Gpu::blocks_per_multiprocessor},
    {"shared_memory_per_multiprocessor_bytes", &Gpu::shared_memory_per_multiprocessor_bytes},
    {"shared_memory_per_block_bytes", &Gpu::shared_memory_per_block_bytes},
    {"cudnn_workspace_bytes", &Gpu::cudnn_workspace_bytes},
};

std::array<uint8_t, 16> parse_uuid(const std::string &hexadecimal) {
  std::array<uint8_t, 16> bytes{};
  for (size_t i = 0; i < bytes.size() && 2 * i + 1 < hexadecimal.size(); ++i)
    bytes[i] = static_cast<uint8_t>(strtoul(hexadecimal.substr(2 * i, 2).c_str(), nullptr, 16));
  return bytes;
}

bool read_line(Host &host, const std::string &key, const std::string &value) {
  if (key == "gpu") {
    host.gpus.emplace_back();
  } else if (key == "host_memory_bytes") {
    host.host_memory_bytes = strtoull(value.c_str(), nullptr, 10);
  } else if (host.gpus.empty()) {
    return false;
  } else if (key == "name") {
    host.gpus.back().name = value;
  } else if (key == "uuid") {
    host.gpus.back().uuid = parse_uuid(value);
  } else if (const auto figure = kFigures.find(key); figure != kFigures.end()) {
    host.gpus.back().*(figure->second) = strtoll(value.c_str(), nullptr, 10);
  } else {
    return false;
  }
  return true;
}

// Returns whether the file was read; the reason why not has been reported.
bool read_description(Host &host, const std::string &path) {
  std::ifstream file(path);
  if (!file) {
    report("cannot read " + path + ": the session has ended");
    return false;
  }
  for (std::string line; std::getline(file, line);) {
    const size_t space = std::min(line.find(' '), line.size());
    const std::string value = space < line.size() ? line.substr(space + 1) : "";
    if (!read_line(host, line.substr(0, space), value)) {
      report(path + ": unknown line: " + line);
      return false;
    }
  }
  return true;
}

int find_gpu(const std::vector<Gpu> &gpus, const std::string &entry) {
  const auto has_prefix = [&](const Gpu &gpu) { return uuid_text(gpu).rfind(entry, 0) == 0; };
  if (entry.rfind("GPU-", 0) == 0) {
    const auto found = std::find_if(gpus.begin(), gpus.end(), has_prefix);
    return found == gpus.end() ? -1 : static_cast<int>(found - gpus.begin());
  }
  if (entry.empty() || entry.find_first_not_of("0123456789") != std::string::npos) return -1;
  const unsigned long index = strtoul(entry.c_str(), nullptr, 10);
  return index < gpus.size() ? static_cast<int>(index) : -1;
}

// CUDA_VISIBLE_DEVICES: indices or the beginnings of UUIDs; the first invalid entry ends the list (CUDA C++ Programming
// Guide, "CUDA Environment Variables").
std::vector<int> visible_gpus(const std::vector<Gpu> &gpus) {
  std::vector<int> visible;
  const char *chosen = getenv("CUDA_VISIBLE_DEVICES");
  if (chosen == nullptr) {
    for (size_t gpu = 0; gpu < gpus.size(); ++gpu) visible.push_back(static_cast<int>(gpu));
    return visible;
  }
  std::istringstream entries(chosen);
  for (std::string entry; std::getline(entries, entry, ',');) {
    entry.erase(std::remove(entry.begin(), entry.end(), ' '), entry.end());
    const int gpu = find_gpu(gpus, entry);
    if (gpu < 0 || std::find(visible.begin(), visible.end(), gpu) != visible.end()) break;
    visible.push_back(gpu);
  }
  return visible;
}

Host *read_host() {
  auto *host = new Host;
  if (session_folder().empty()) {
    report("VIRTUAL_GPU_SESSION is not set: there is no GPU");
  } else if (!read_description(*host, session_folder() + "/description")) {
    host->gpus.clear();
  }
  return host;
}

// CUDA_VISIBLE_DEVICES is read when CUDA is first asked for its devices, which may be long after NVML was.
const Host &host() {
  static const Host *instance = read_host();
  return *instance;
}
const std::vector<int> &visible() {
  static const auto *instance = new std::vector<int>(visible_gpus(host().gpus));
  return *instance;
}
}  // namespace

const std::string &session_folder() {
  static const auto *folder = [] {
    const char *value = getenv("VIRTUAL_GPU_SESSION");
    return new std::string(value == nullptr ? "" : value);
  }();
  return *folder;
}

int gpu_count() { return static_cast<int>(host().gpus.size()); }
const Gpu *gpu_at(int gpu) { return gpu >= 0 && gpu < gpu_count() ? &host().gpus[gpu] : nullptr; }
size_t host_memory_limit() { return host().host_memory_bytes; }
int visible_count() { return static_cast<int>(visible().size()); }
int gpu_of_ordinal(int ordinal) { return ordinal >= 0 && ordinal < visible_count() ? visible()[ordinal] : -1; }
const Gpu *visible_gpu(int ordinal) { return gpu_at(gpu_of_ordinal(ordinal)); }

std::string uuid_text(const Gpu &gpu) {
  static const char digits[] = "0123456789abcdef";
  std::string text = "GPU-";
  for (size_t i = 0; i < gpu.uuid.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += digits[gpu.uuid[i] >> 4];
    text += digits[gpu.uuid[i] & 15];
  }
  return text;
}

}  // namespace virtual_gpu
