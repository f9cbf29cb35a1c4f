// Parallel work on very large requests: the rows of one request are distinct, so slices of it never touch the same row.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "machine/pauses.hpp"

namespace geartrain {

// Size below which a second thread costs more than it saves.
inline constexpr size_t kFanOutBytes = size_t{2} << 20;

// Enough that a late thread finds work, and so few that each slice still streams.
inline constexpr int64_t kSlicesOfAThread = 16;

// Runs run(0) on this thread and run(1), ... run(threads - 1) on others; fewer if the system has no more threads. `run`
// must not throw.
template <class Run>
void beside_each_other(int64_t threads, const Run& run) {
  std::vector<std::jthread> helpers;
  try {
    helpers.reserve(static_cast<size_t>(threads));
    for (int64_t thread = 1; thread < threads; ++thread) helpers.emplace_back(std::cref(run), thread);
  } catch (const std::exception&) {
    // Without another thread, or memory for one, the existing ones do all of the work: a request that was started is
    // finished.
  }
  run(0);
}

// Stops helpers between two pieces of work.
class Gate {
 public:
  // Called by a helper before and after each piece.
  void enter() {
    for (;;) {
      while (is_closed_) is_closed_.wait(true);
      ++inside_;
      if (!is_closed_) return;
      leave();
    }
  }
  void leave() {
    if (--inside_ == 0 && is_closed_) inside_.notify_one();
  }
  // Called by the thread being helped: runs act() while no helper is inside.
  template <class Act>
  void closed(const Act& act) {
    is_closed_ = true;
    for (int inside; (inside = inside_) != 0;) inside_.wait(inside);
    act();
    is_closed_ = false;
    is_closed_.notify_all();
  }

 private:
  std::atomic<bool> is_closed_{false};
  std::atomic<int> inside_{0};
};

// Calls work(piece, thread) for the pieces 0 .. count-1 on up to `threads` threads; a free thread takes the next piece.
// A thread may be milliseconds late if its core slept, and one that is busy elsewhere delays only one piece. `work`
// must not throw. With `pauses` this thread pauses between pieces on request.
template <class Work>
void deal_out(int64_t count, int64_t threads, const Work& work, Pauses* pauses = nullptr) {
  std::atomic<int64_t> next{0};
  Gate gate;
  beside_each_other(std::clamp<int64_t>(threads, 1, std::max<int64_t>(count, 1)), [&](int64_t thread) {
    const bool is_helper = thread != 0;
    for (;;) {
      if (!is_helper && pauses != nullptr && pauses->are_wanted()) gate.closed([pauses] { pauses->pause(); });
      if (is_helper) gate.enter();
      const int64_t piece = next.fetch_add(1, std::memory_order_relaxed);
      if (piece < count) work(piece, thread);
      if (is_helper) gate.leave();
      if (piece >= count) return;
    }
  });
}

// Calls work(begin, end, thread) for slices that cover 0 .. count-1, spread over up to `threads` threads; few bytes are
// one slice. `work` must not throw. With `pauses` slices are no larger than a block.
template <class Work>
void fan_out(int64_t count, size_t bytes, int64_t threads, const Work& work, Pauses* pauses = nullptr) {
  const int64_t hands = std::clamp<int64_t>(static_cast<int64_t>(bytes / kFanOutBytes), 1, threads);
  int64_t slices = hands == 1 ? 1 : hands * kSlicesOfAThread;
  if (pauses != nullptr) slices = std::max(slices, static_cast<int64_t>(bytes / kBlockBytes));
  slices = std::clamp<int64_t>(slices, 1, std::max<int64_t>(count, 1));
  deal_out(
      slices, hands,
      [&](int64_t slice, int64_t thread) { work(count * slice / slices, count * (slice + 1) / slices, thread); },
      pauses);
}

}  // namespace geartrain
