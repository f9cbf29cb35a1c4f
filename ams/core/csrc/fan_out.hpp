// Very large requests on several threads: the rows of one request are distinct, so that slices of it never touch the same row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace geartrain {

// Below this a second thread costs more than it takes over.
inline constexpr size_t kFanOutBytes = size_t{2} << 20;

// Calls work(begin, end, slice) for up to `threads` slices that cover 0 .. count-1, side by side; slice 0 on this thread.
// `work` must not throw. Returns the number of slices.
template <class Work>
int64_t fan_out(int64_t count, size_t bytes, int64_t threads, Work&& work) {
  const int64_t slices = std::clamp<int64_t>(static_cast<int64_t>(bytes / kFanOutBytes), 1, threads);
  std::vector<std::jthread> helpers;
  helpers.reserve(static_cast<size_t>(slices));
  for (int64_t slice = 1; slice < slices; ++slice)
    helpers.emplace_back([&work, slice, slices, count] { work(count * slice / slices, count * (slice + 1) / slices, slice); });
  work(0, count / slices, 0);
  return slices;
}

}  // namespace geartrain
