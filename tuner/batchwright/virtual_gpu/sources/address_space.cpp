// Addresses of device memory are addresses of this process: one private region, which the kernel backs page by page when
// something is written. So the CPU can compute on device memory, and memory that no one writes to costs nothing.
#include <sys/mman.h>

#include <algorithm>
#include <bitset>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

#include "virtual_gpu.h"

namespace virtual_gpu {

namespace {
constexpr size_t kRangeBytes = size_t{32} << 20;  // of addresses, as seen on an H100 with driver 580
constexpr size_t kRegionBytes = size_t{4} << 40;  // more than the memory of kMostGpus of the largest cards
constexpr size_t kPageBytes = 4096;
constexpr size_t kPagesPerGranule = kGranularity / kPageBytes;
constexpr size_t kDroppedBytes = size_t{64} << 10;  // larger ranges are set to zero by returning their pages

constexpr uintptr_t round_up(uintptr_t value, size_t unit) { return (value + unit - 1) / unit * unit; }
constexpr uintptr_t round_down(uintptr_t value, size_t unit) { return value / unit * unit; }

// The pages of device memory that this process has written to.
class BackedPages {
 public:
  // Count the pages of a range as written, unless more than `limit_bytes` would be. Returns whether they are.
  bool add(uintptr_t begin, uintptr_t end, size_t limit_bytes) {
    size_t missing = 0;
    for_each_granule(begin, end, [&](auto &pages, size_t first, size_t last) {
      for (size_t page = first; page < last; ++page) missing += !pages[page];
    });
    if ((count_ + missing) * kPageBytes > limit_bytes) return false;
    for_each_granule(begin, end, [&](auto &pages, size_t first, size_t last) { set(pages, first, last, true); });
    count_ += missing;
    return true;
  }

  // Return the whole pages of a range to the kernel: they read as zero from now on.
  void drop(uintptr_t begin, uintptr_t end) {
    madvise(reinterpret_cast<void *>(begin), end - begin, MADV_DONTNEED);
    for_each_granule(begin, end, [&](auto &pages, size_t first, size_t last) {
      for (size_t page = first; page < last; ++page) count_ -= pages[page];
      set(pages, first, last, false);
    });
  }

 private:
  using Pages = std::bitset<kPagesPerGranule>;

  static void set(Pages &pages, size_t first, size_t last, bool value) {
    for (size_t page = first; page < last; ++page) pages[page] = value;
  }

  template <typename Function>
  void for_each_granule(uintptr_t begin, uintptr_t end, Function function) {
    for (uintptr_t granule = round_down(begin, kGranularity); granule < end; granule += kGranularity) {
      const uintptr_t from = std::max(begin, granule), to = std::min(end, granule + kGranularity);
      function(granules_[granule], (from - granule) / kPageBytes, round_up(to - granule, kPageBytes) / kPageBytes);
    }
  }

  std::unordered_map<uintptr_t, Pages> granules_;
  size_t count_ = 0;
};

struct Mapping {
  size_t bytes;
  int ordinal;
};

struct AddressSpace {
  std::mutex mutex;
  uintptr_t begin = 0, end = 0;
  std::map<uintptr_t, size_t> gaps;         // begin and size of what is not reserved
  std::map<uintptr_t, Mapping> mappings;    // addresses with physical memory
  BackedPages backed;
};

// Reserve the region. Without it there is no device memory: every allocation fails.
AddressSpace *make_address_space() {
  auto *space = new AddressSpace;
  void *region =
      mmap(nullptr, kRegionBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (region == MAP_FAILED) {
    report(std::string("cannot reserve 4 TiB of addresses for device memory: ") + strerror(errno));
    return space;
  }
  madvise(region, kRegionBytes, MADV_NOHUGEPAGE);  // a byte that is written costs 4 KiB, not 2 MiB
  madvise(region, kRegionBytes, MADV_DONTDUMP);
  space->begin = round_up(reinterpret_cast<uintptr_t>(region), kGranularity);
  space->end = round_down(reinterpret_cast<uintptr_t>(region) + kRegionBytes, kRangeBytes);
  space->gaps[space->begin] = space->end - space->begin;
  return space;
}

AddressSpace &address_space() {
  static AddressSpace *space = make_address_space();
  return *space;
}

bool is_device_memory(uintptr_t address) { return address >= address_space().begin && address < address_space().end; }

// Returns whether this process may write to these addresses: host memory, or device memory within the limit.
bool may_write(uintptr_t begin, size_t bytes) {
  if (!is_device_memory(begin)) return true;
  std::lock_guard lock(address_space().mutex);
  if (address_space().backed.add(begin, begin + bytes, host_memory_limit())) return true;
  log_once("left out", "a copy or fill of device memory, beyond the limit of host memory");
  return false;
}

// Take bytes of a gap from `address` on, and leave what is before it and behind it.
void split_gap(std::map<uintptr_t, size_t> &gaps, std::map<uintptr_t, size_t>::iterator gap, uintptr_t address,
               size_t bytes) {
  const auto [begin, size] = *gap;
  gaps.erase(gap);
  if (address > begin) gaps[begin] = address - begin;
  if (address + bytes < begin + size) gaps[address + bytes] = begin + size - address - bytes;
}

// In the lowest gap with room above the last range, else in a new range below all others, as drivers do. Returns 0 if
// there is no such gap.
uintptr_t take_gap(std::map<uintptr_t, size_t> &gaps, size_t bytes, size_t alignment) {
  if (gaps.empty()) return 0;
  for (auto gap = std::next(gaps.begin()); gap != gaps.end(); ++gap) {
    const uintptr_t address = round_up(gap->first, alignment);
    if (address + bytes > gap->first + gap->second) continue;
    split_gap(gaps, gap, address, bytes);
    return address;
  }
  const auto last = gaps.begin();
  const uintptr_t end = round_down(last->first + last->second, std::max(alignment, kRangeBytes));
  const size_t range = round_up(bytes, std::max(alignment, kRangeBytes));
  if (end < last->first + range) return 0;
  split_gap(gaps, last, end - range, bytes);
  return end - range;
}

// Return a gap, and join it with its neighbours.
void put_gap(std::map<uintptr_t, size_t> &gaps, uintptr_t begin, size_t bytes) {
  auto next = gaps.lower_bound(begin);
  if (next != gaps.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      begin = before->first;
      bytes += before->second;
      gaps.erase(before);
    }
  }
  if (next != gaps.end() && begin + bytes == next->first) {
    bytes += next->second;
    gaps.erase(next);
  }
  gaps[begin] = bytes;
}
}  // namespace

size_t rounded(size_t bytes) { return round_up(bytes, kGranularity); }

void *reserve_addresses(size_t bytes, size_t alignment) {
  AddressSpace &space = address_space();
  std::lock_guard lock(space.mutex);
  return reinterpret_cast<void *>(take_gap(space.gaps, rounded(bytes), std::max(alignment, kGranularity)));
}

void return_addresses(void *address, size_t bytes) {
  AddressSpace &space = address_space();
  std::lock_guard lock(space.mutex);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  space.backed.drop(begin, begin + rounded(bytes));
  put_gap(space.gaps, begin, rounded(bytes));
}

void map_memory(void *address, size_t bytes, int ordinal) {
  std::lock_guard lock(address_space().mutex);
  address_space().mappings[reinterpret_cast<uintptr_t>(address)] = {bytes, ordinal};
}

size_t unmap_memory(void *address) {
  AddressSpace &space = address_space();
  std::lock_guard lock(space.mutex);
  const auto found = space.mappings.find(reinterpret_cast<uintptr_t>(address));
  if (found == space.mappings.end()) return 0;
  const size_t bytes = found->second.bytes;
  space.mappings.erase(found);
  return bytes;
}

void unmap_range(void *address, size_t bytes) {
  AddressSpace &space = address_space();
  std::lock_guard lock(space.mutex);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  space.backed.drop(begin, begin + bytes);
  space.mappings.erase(space.mappings.lower_bound(begin), space.mappings.lower_bound(begin + bytes));
}

int owner_of(const void *address) {
  AddressSpace &space = address_space();
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  if (!is_device_memory(wanted)) return -1;
  std::lock_guard lock(space.mutex);
  auto mapping = space.mappings.upper_bound(wanted);
  if (mapping == space.mappings.begin()) return -1;
  --mapping;
  return wanted < mapping->first + mapping->second.bytes ? mapping->second.ordinal : -1;
}

void copy(void *destination, const void *source, size_t bytes) {
  if (bytes != 0 && may_write(reinterpret_cast<uintptr_t>(destination), bytes)) memmove(destination, source, bytes);
}

void fill(void *destination, int value, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(destination), end = begin + bytes;
  if (value != 0 || bytes < kDroppedBytes || !is_device_memory(begin)) {
    if (bytes != 0 && may_write(begin, bytes)) memset(destination, value, bytes);
    return;
  }
  const uintptr_t first = round_up(begin, kPageBytes), last = round_down(end, kPageBytes);
  memset(destination, 0, first - begin);
  memset(reinterpret_cast<void *>(last), 0, end - last);
  std::lock_guard lock(address_space().mutex);
  address_space().backed.drop(first, last);
}

}  // namespace virtual_gpu
