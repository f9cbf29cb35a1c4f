// Clocks of a shard, in seconds.
#pragma once

#include <time.h>

#include <functional>

namespace geartrain {

using Clock = std::function<double()>;

inline double clock_seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// As time.monotonic().
inline double monotonic_seconds() { return clock_seconds(CLOCK_MONOTONIC); }

// Seconds since the machine started. Continues during a suspend, where the system has such a clock.
inline double boot_seconds() {
#ifdef CLOCK_BOOTTIME
  return clock_seconds(CLOCK_BOOTTIME);
#else
  return monotonic_seconds();
#endif
}

}  // namespace geartrain
