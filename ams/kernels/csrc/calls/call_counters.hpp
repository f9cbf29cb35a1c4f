// Counters of a shard's row calls: number, durations and bytes.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace geartrain {

enum class Carrier : uint8_t { ring, tcp };
// Operation of a frame; `several` at once, or `unread`.
enum class CallKind : uint8_t { pull, push, assign, several, unread };

// Thread-safe. A successful call takes no lock.
class CallCounters {
 public:
  using Duration = std::chrono::steady_clock::duration;
  // Counts of calls by duration: at most 10 us, 40 us, ... 10 s, and longer.
  static constexpr size_t kNumBounds = 11;
  static constexpr double kFirstBoundSeconds = 10e-6;
  static constexpr int kGrowth = 4;

  struct Counted {
    Carrier carrier;
    CallKind kind;
    std::array<int64_t, kNumBounds + 1> by_seconds;
    double seconds;
    int64_t bytes_in, bytes_out;
    std::map<std::string, int64_t> faults;  // by name; all other calls succeeded
  };

  // `fault`: name of the error; null: success.
  void add(Carrier carrier, CallKind kind, Duration took, size_t bytes_in, size_t bytes_out,
           const std::string* fault) noexcept {
    // Counted with its fault in one step: a reader in between would see another success, which later disappears.
    std::unique_lock lock(mutex_, std::defer_lock);
    if (fault != nullptr) {
      lock.lock();
      add_fault(index_of(carrier, kind), *fault);
    }
    Cell& cell = cells_[index_of(carrier, kind)];
    size_t bucket = 0;
    for (int64_t bound = kFirstBound; bucket < kNumBounds && nanos_of(took) > bound; bound *= kGrowth) ++bucket;
    add_to(cell.by_seconds[bucket], 1);
    add_to(cell.nanos, nanos_of(took));
    add_to(cell.bytes_in, static_cast<int64_t>(bytes_in));
    add_to(cell.bytes_out, static_cast<int64_t>(bytes_out));
  }
  // Adds the time that a thread worked on calls.
  void add_busy(Duration worked) noexcept { add_to(busy_nanos_, nanos_of(worked)); }

  // Counters of the kinds that occurred.
  std::vector<Counted> read() const {
    std::vector<Counted> all;
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < cells_.size(); ++i) {
      const Cell& cell = cells_[i];
      Counted counted{static_cast<Carrier>(i / kNumKinds),
                      static_cast<CallKind>(i % kNumKinds),
                      {},
                      seconds_of(cell.nanos),
                      cell.bytes_in,
                      cell.bytes_out,
                      {}};
      std::copy(cell.by_seconds.begin(), cell.by_seconds.end(), counted.by_seconds.begin());
      if (std::all_of(counted.by_seconds.begin(), counted.by_seconds.end(), [](int64_t count) { return count == 0; }))
        continue;
      for (const auto& [key, count] : faults_)
        if (key.first == i) counted.faults.emplace(key.second, count);
      all.push_back(std::move(counted));
    }
    return all;
  }
  double busy_seconds() const { return seconds_of(busy_nanos_); }

 private:
  using Count = std::atomic<int64_t>;
  struct Cell {
    std::array<Count, kNumBounds + 1> by_seconds{};
    Count nanos{0}, bytes_in{0}, bytes_out{0};
  };
  static constexpr size_t kNumCarriers = 2, kNumKinds = 5;
  static constexpr int64_t kFirstBound = static_cast<int64_t>(kFirstBoundSeconds * 1e9);

  void add_fault(size_t cell, const std::string& name) noexcept {
    try {
      ++faults_[{cell, name}];
    } catch (...) {  // no memory for the fault's name
    }
  }
  static size_t index_of(Carrier carrier, CallKind kind) {
    return static_cast<size_t>(carrier) * kNumKinds + static_cast<size_t>(kind);
  }
  static void add_to(Count& count, int64_t more) { count.fetch_add(more, std::memory_order_relaxed); }
  static int64_t nanos_of(Duration duration) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
  }
  static double seconds_of(int64_t nanos) { return static_cast<double>(nanos) * 1e-9; }

  std::array<Cell, kNumCarriers * kNumKinds> cells_;
  Count busy_nanos_{0};
  mutable std::mutex mutex_;
  std::map<std::pair<size_t, std::string>, int64_t> faults_;
};

}  // namespace geartrain
