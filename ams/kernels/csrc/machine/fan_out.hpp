// Very large requests on several threads: the rows of one request are distinct, so that slices of it never touch the same row.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

namespace geartrain {

// Below this a second thread costs more than it takes over.
inline constexpr size_t kFanOutBytes = size_t{2} << 20;

// As many as let a late thread find work, and so few that each still streams.
inline constexpr int64_t kSlicesOfAThread = 16;

// Runs run(0) on this thread and run(1), ... run(threads - 1) beside it; fewer where the system has no more threads to give.
// `run` must not throw.
template <class Run>
void beside_each_other(int64_t threads, const Run& run) {
  std::vector<std::jthread> helpers;
  try {
    helpers.reserve(static_cast<size_t>(threads));
    for (int64_t thread = 1; thread < threads; ++thread) helpers.emplace_back(std::cref(run), thread);
  } catch (const std::exception&) {
    // No thread to be had, or no memory for one: those that there are do all of the work. A request that has begun is finished.
  }
  run(0);
}

// Calls work(piece, thread) for the pieces 0 .. count-1 on up to `threads` threads; who is free takes the next one. A thread
// may be milliseconds late where its core slept, and one that is busy elsewhere holds up no more than a piece.
// `work` must not throw.
template <class Work>
void deal_out(int64_t count, int64_t threads, const Work& work) {
  std::atomic<int64_t> next{0};
  beside_each_other(std::clamp<int64_t>(threads, 1, std::max<int64_t>(count, 1)), [&](int64_t thread) {
    for (int64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(piece, thread);
  });
}

// Calls work(begin, end, thread) for slices that cover 0 .. count-1, dealt out to up to `threads` threads; for few bytes it is
// one slice. `work` must not throw.
template <class Work>
void fan_out(int64_t count, size_t bytes, int64_t threads, const Work& work) {
  const int64_t hands = std::clamp<int64_t>(static_cast<int64_t>(bytes / kFanOutBytes), 1, threads);
  const int64_t slices = hands == 1 ? 1 : std::clamp<int64_t>(count, 1, hands * kSlicesOfAThread);
  deal_out(slices, hands, [&](int64_t slice, int64_t thread) {
    work(count * slice / slices, count * (slice + 1) / slices, thread);
  });
}

}  // namespace geartrain
