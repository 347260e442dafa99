// Device memory that the host cannot read, and pinned host memory.
//
// A device address is a number in a region mapped PROT_NONE: a host read of it is a segmentation fault with a line that
// says so. The bytes lie in a shadow region at a constant distance, which only the device's kernels use.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "counters.h"

namespace simulated {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr size_t kArena = 16ull << 30;
constexpr unsigned char kPoison = 0xFF;  // NaN in every floating type, -1 in every signed integer

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local int64_t current_stream = 0;

// One access of a stream to a range of bytes, as the order between streams needs it.
struct Access {
  int64_t stream;
  uint64_t at;
  size_t low, high;
  bool write;
};

struct Block {
  size_t offset, bytes;
  int64_t stream;                 // on which it was allocated, and on which alone it is used again
  std::vector<Access> accesses;   // guarded by order.h's lock
  std::atomic<bool> shared{false};  // record_stream: the allocator waits for other streams before it reuses the block
};

inline char* device_base = nullptr;
inline char* shadow_base = nullptr;
inline struct sigaction previous_action;

inline char* shadow(const void* p) { return p ? shadow_base + (static_cast<const char*>(p) - device_base) : nullptr; }

inline void on_fault(int, siginfo_t* info, void*) {
  // A handler before this one (faulthandler's) passes the signal on without the address; the access that caused it is
  // repeated when this returns, and brings it.
  static std::atomic<bool> passed_on{false};
  if (info->si_code <= 0 && !passed_on.exchange(true)) return;
  const char* p = static_cast<const char*>(info->si_addr);
  if (p >= device_base && p < device_base + kArena) {
    static const char line[] = "simulated device: the host read or wrote device memory directly\n";
    (void)!write(2, line, sizeof line - 1);
  }
  sigaction(SIGSEGV, &previous_action, nullptr);  // returning repeats the access, now without this handler
}

inline void map_memory() {
  static std::once_flag once;
  std::call_once(once, [] {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    device_base = static_cast<char*>(mmap(nullptr, kArena, PROT_NONE, flags, -1, 0));
    shadow_base = static_cast<char*>(mmap(nullptr, kArena, PROT_READ | PROT_WRITE, flags, -1, 0));
    TORCH_CHECK(device_base != MAP_FAILED && shadow_base != MAP_FAILED, "simulated device: no address space");
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &previous_action);
  });
}

class Arena {
 public:
  Block* take(size_t wanted, int64_t stream) {
    map_memory();
    size_t bytes = (wanted + 511) & ~size_t(511);
    if (bytes > (1 << 20)) bytes = (bytes + (1 << 20) - 1) & ~size_t((1 << 20) - 1);
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t limit = memory_limit > 0 ? size_t(memory_limit.load()) : kArena;
    if (live_ + bytes > limit) fail(wanted, limit);
    auto& free = free_[{stream, bytes}];
    Block* block;
    if (!free.empty()) {
      block = free.back();
      free.pop_back();
    } else {
      if (top_ + bytes > kArena) fail(wanted, kArena);
      block = new Block{top_, bytes, stream};
      top_ += bytes;
    }
    live_ += bytes;
    peak_ = std::max(peak_, live_);
    counters.allocations++;
    return block;
  }

  void give_back(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    live_ -= block->bytes;
    free_[{block->stream, block->bytes}].push_back(block);
  }

  std::pair<int64_t, int64_t> live_and_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {int64_t(live_), int64_t(peak_)};
  }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = live_;
  }

 private:
  struct Hash {
    size_t operator()(const std::pair<int64_t, size_t>& key) const { return size_t(key.first) * 1000003 ^ key.second; }
  };

  void fail(size_t wanted, size_t limit) const {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory (simulated). Tried to allocate ", wanted, " bytes; ",
                     live_, " of ", limit, " in use");
  }

  std::mutex mutex_;
  size_t top_ = 512, live_ = 0, peak_ = 0;
  std::unordered_map<std::pair<int64_t, size_t>, std::vector<Block*>, Hash> free_;
};
inline Arena& arena = *new Arena;  // never destroyed: tensors outlive the end of main

void forget_accesses(Block* block);  // order.h

inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!block) return;
  // Reused on its own stream without a wait for others: what they did to it stays a hazard, unless they were recorded.
  if (block->shared.exchange(false)) forget_accesses(block);
  arena.give_back(block);
}

inline Block* block_of(const c10::StorageImpl* storage) {
  const auto& data = storage->data_ptr();
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context()) : nullptr;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    const c10::Device device(kDevice, current_device);
    if (!n) return {nullptr, nullptr, &free_block, device};
    Block* block = arena.take(n, current_stream);
    return {device_base + block->offset, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(shadow(to), shadow(from), n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream) override {
    if (auto* block = static_cast<Block*>(data.get_context())) block->shared = true;
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { arena.reset_peak(); }
};
inline Allocator allocator;

inline void resize_storage(c10::StorageImpl* storage, size_t n) {
  auto data = allocator.allocate(n);
  const size_t kept = std::min(n, storage->nbytes());
  if (kept && storage->data()) memcpy(shadow(data.get()), shadow(storage->data()), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(n);
}

// ---- pinned host memory

inline auto& pinned_ranges = *new std::map<uintptr_t, size_t>;
inline auto& pinned_mutex = *new std::mutex;
inline const std::thread::id main_thread = std::this_thread::get_id();

void drop_copies_to(uintptr_t low, uintptr_t high);  // order.h: their target is gone

inline void free_pinned(void* p) {
  if (!p) return;
  size_t bytes = 0;
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    auto found = pinned_ranges.find(reinterpret_cast<uintptr_t>(p));
    if (found != pinned_ranges.end()) {
      bytes = found->second;
      pinned_ranges.erase(found);
    }
  }
  drop_copies_to(reinterpret_cast<uintptr_t>(p), reinterpret_cast<uintptr_t>(p) + bytes);
  free(p);
}

inline bool is_pinned(const void* p) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto found = pinned_ranges.upper_bound(reinterpret_cast<uintptr_t>(p));
  return found != pinned_ranges.begin() && (--found, reinterpret_cast<uintptr_t>(p) < found->first + found->second);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    TORCH_CHECK(!gap_pin_memory_threads || std::this_thread::get_id() == main_thread,
                "simulated device: pin_memory off the main thread is not supported (gap pin_memory_threads)");
    if (!n) return {nullptr, nullptr, &free_pinned, c10::Device(c10::kCPU)};
    void* p = aligned_alloc(64, (n + 63) & ~size_t(63));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_ranges[reinterpret_cast<uintptr_t>(p)] = n;
    return {p, p, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline PinnedAllocator pinned_allocator;

}  // namespace simulated
