// The order of streams, events and the host, by vector clocks.
//
// Kernels run at once, in the order in which the host launches them; what they may read is decided here. Bytes that
// another stream has written and the reader's stream has not waited for are poison to the reader. A copy to pinned
// memory is poison to the host until it has waited for it. A collective writes when somebody waits for it.
#pragma once

#include <chrono>
#include <deque>
#include <memory>

#include "memory.h"

namespace simulated {

using Clock = std::vector<uint64_t>;  // by number of stream: how much of its work is known to have finished
using Instant = std::chrono::steady_clock::time_point;
using Ranges = std::vector<std::pair<size_t, size_t>>;

// Work of a communication stream, which finishes when something waits for it.
struct Unfinished {
  virtual ~Unfinished() = default;
  virtual void finish() = 0;
};

struct CopyToHost {
  int64_t stream;
  uint64_t at;
  Instant due;
  char* target;
  std::vector<char> bytes;
};

// The source of a copy from pinned memory: the host must not write it before the copy has run.
struct CopyFromHost {
  int64_t stream;
  uint64_t at;
  const char* source;
  std::vector<char> bytes;
  std::shared_ptr<void> held;
};

struct Event {
  Clock clock;
  Instant when;
};

class Order {
 public:
  int64_t new_stream() {
    std::lock_guard<std::mutex> lock(mutex_);
    clocks_.emplace_back();
    return int64_t(clocks_.size()) - 1;
  }

  // Notes that `stream` reads or writes these bytes of a block; returns what is poison to it.
  Ranges touch(Block* block, size_t low, size_t high, bool write, int64_t stream, const std::string& what) {
    Ranges stale;
    if (!block || low >= high) return stale;
    const char* race = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Clock& mine = caught_up(stream);
      const uint64_t now = ++mine[stream];
      auto& accesses = block->accesses;
      size_t kept = 0;
      for (size_t i = 0; i < accesses.size(); i++) {
        const Access a = accesses[i];
        const bool overlaps = a.low < high && low < a.high;
        const bool ordered = a.stream == stream || at(mine, a.stream) >= a.at;
        if (overlaps && !ordered && (write || a.write)) {
          race = !write ? "read after write" : a.write ? "write after write" : "write after read";
          if (a.write) stale.emplace_back(std::max(a.low, low), std::min(a.high, high));
        }
        const bool covered = low <= a.low && a.high <= high;
        const bool superseded = covered && ordered && (write || (a.stream == stream && !a.write));
        if (!superseded) accesses[kept++] = a;
      }
      accesses.resize(kept);
      accesses.push_back({stream, now, low, high, write});
    }
    if (race) {
      counters.races++;
      report("race", std::string(race) + " in " + what);
    }
    return stale;
  }

  void forget(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    block->accesses.clear();
  }

  // ---- events and waits

  void record(Event& event, int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    Clock& mine = caught_up(stream);
    ++mine[stream];
    event.clock = mine;
    event.when = std::chrono::steady_clock::now();
    counters.events++;
  }

  void stream_waits(const Event& event, int64_t stream) {
    if (faults.skips(skip_stream_wait)) return;
    finish_works(event.clock);
    std::lock_guard<std::mutex> lock(mutex_);
    join(caught_up(stream), event.clock);
  }

  void host_waits_for(const Clock& clock) {
    finish_works(clock);
    Instant last{};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& copy : to_host_)
        if (at(clock, copy.stream) >= copy.at) last = std::max(last, copy.due);
    }
    std::this_thread::sleep_until(last);
    std::vector<CopyFromHost> over;  // freed after the lock: freeing pinned memory takes it again
    std::lock_guard<std::mutex> lock(mutex_);
    over = arrived(clock);
  }

  void host_waits_for_stream(int64_t stream) {
    Clock clock;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      clock = caught_up(stream);
    }
    host_waits_for(clock);
  }

  void host_waits_for_all() {
    Clock clock;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = 0; i < clocks_.size(); i++) join(clock, caught_up(int64_t(i)));
    }
    host_waits_for(clock);
  }

  // Whether all work before the clock is done. An answer of yes is as good as a wait.
  bool query(const Clock& clock) {
    std::vector<CopyFromHost> over;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    for (auto& work : works_)
      if (at(clock, work.stream) >= work.at) return false;
    for (auto& copy : to_host_)
      if (at(clock, copy.stream) >= copy.at && copy.due > now) return false;
    over = arrived(clock);
    return true;
  }

  Clock clock_of(int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    return caught_up(stream);
  }

  // ---- copies under way

  void copy_to_host(char* target, const char* source, size_t n, int64_t stream) {
    CopyToHost copy{stream, 0, {}, target, std::vector<char>(source, source + n)};
    memset(target, kPoison, n);
    copy.due = std::chrono::steady_clock::now() + std::chrono::microseconds(copy_microseconds.load());
    std::lock_guard<std::mutex> lock(mutex_);
    copy.at = ++caught_up(stream)[stream];
    to_host_.push_back(std::move(copy));
  }

  void copy_from_host(const char* source, size_t n, int64_t stream, std::shared_ptr<void> held) {
    std::shared_ptr<void> over;
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t number = ++caught_up(stream)[stream];
    from_host_.push_back({stream, number, source, std::vector<char>(source, source + n), std::move(held)});
    if (from_host_.size() > 256) {  // a job that never waits; on a real device this one would have run by now
      check_source(from_host_.front());
      over = std::move(from_host_.front().held);
      from_host_.pop_front();
    }
  }

  void drop_copies(uintptr_t low, uintptr_t high) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto copy = to_host_.begin(); copy != to_host_.end();) {
      const auto p = reinterpret_cast<uintptr_t>(copy->target);
      copy = p >= low && p < high ? to_host_.erase(copy) : copy + 1;
    }
  }

  size_t copies_under_way() {
    std::lock_guard<std::mutex> lock(mutex_);
    return to_host_.size();
  }

  // ---- collectives under way

  void started(std::shared_ptr<Unfinished> work, int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    works_.push_back({stream, ++caught_up(stream)[stream], std::move(work)});
  }

 private:
  struct Started {
    int64_t stream;
    uint64_t at;
    std::shared_ptr<Unfinished> work;
  };

  static uint64_t at(const Clock& clock, int64_t stream) {
    return size_t(stream) < clock.size() ? clock[stream] : 0;
  }

  static void join(Clock& mine, const Clock& other) {
    if (mine.size() < other.size()) mine.resize(other.size());
    for (size_t i = 0; i < other.size(); i++) mine[i] = std::max(mine[i], other[i]);
  }

  // A stream's clock, with what the host knew when it launched.
  Clock& caught_up(int64_t stream) {
    if (size_t(stream) >= clocks_.size()) clocks_.resize(stream + 1);
    Clock& mine = clocks_[stream];
    if (mine.size() < clocks_.size()) mine.resize(clocks_.size());
    if (seen_.size() < clocks_.size()) seen_.resize(clocks_.size());
    if (seen_[stream] != host_version_) {
      join(mine, host_);
      seen_[stream] = host_version_;
    }
    return mine;
  }

  void finish_works(const Clock& clock) {
    std::vector<std::shared_ptr<Unfinished>> due;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& work : works_)
        if (at(clock, work.stream) >= work.at) due.push_back(work.work);
    }
    for (auto& work : due) work->finish();  // waits for other processes: never under the lock
    std::lock_guard<std::mutex> lock(mutex_);
    works_.erase(std::remove_if(works_.begin(), works_.end(),
                                [&](const Started& w) { return at(clock, w.stream) >= w.at; }),
                 works_.end());
  }

  // Delivers what the host has now waited for; returns the copies from the host whose source may be freed.
  std::vector<CopyFromHost> arrived(const Clock& clock) {
    std::vector<CopyFromHost> over;
    join(host_, clock);
    ++host_version_;
    for (auto copy = to_host_.begin(); copy != to_host_.end();) {
      if (at(host_, copy->stream) >= copy->at) {
        memcpy(copy->target, copy->bytes.data(), copy->bytes.size());
        copy = to_host_.erase(copy);
      } else {
        ++copy;
      }
    }
    for (auto copy = from_host_.begin(); copy != from_host_.end();) {
      if (at(host_, copy->stream) >= copy->at) {
        check_source(*copy);
        over.push_back(std::move(*copy));
        copy = from_host_.erase(copy);
      } else {
        ++copy;
      }
    }
    return over;
  }

  void check_source(const CopyFromHost& copy) {
    if (memcmp(copy.source, copy.bytes.data(), copy.bytes.size()) != 0) counters.races++;
  }

  std::mutex mutex_;
  std::vector<Clock> clocks_{1};
  Clock host_;
  uint64_t host_version_ = 0;
  std::vector<uint64_t> seen_;
  std::deque<CopyToHost> to_host_;
  std::deque<CopyFromHost> from_host_;
  std::vector<Started> works_;
};
inline Order& order = *new Order;  // never destroyed: tensors outlive the end of main

inline void forget_accesses(Block* block) { order.forget(block); }
inline void drop_copies_to(uintptr_t low, uintptr_t high) { order.drop_copies(low, high); }

}  // namespace simulated
