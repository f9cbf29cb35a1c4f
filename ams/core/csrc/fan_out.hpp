// Very large requests on several threads: the rows of one request are distinct, so that slices of it never touch the same row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <system_error>
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
  const auto run = [&work, slices, count](int64_t slice) {
    work(count * slice / slices, count * (slice + 1) / slices, slice);
  };
  int64_t started = 1;
  try {
    for (; started < slices; ++started) helpers.emplace_back(run, started);
  } catch (const std::system_error&) {
    // No thread to be had: a request that has begun is finished here, slice by slice, rather than left half done.
  }
  run(0);
  for (int64_t slice = started; slice < slices; ++slice) run(slice);
  return slices;
}

}  // namespace geartrain
