// Failpoints: named places at which a test makes the process die, wait or fail.
#pragma once

#include <atomic>

namespace geartrain {

// Whether any failpoint of this process is armed, and the action at the place called `name`: it may throw the Fault
// with which the place fails. The bindings set both, for ams/observe/failpoints.py.
inline std::atomic<bool> failpoints_armed{false};
inline void (*reach_failpoint)(const char* name) = nullptr;

// Reports that the place called `name` is reached. One load unless something is armed.
inline void failpoint(const char* name) {
  if (failpoints_armed.load(std::memory_order_relaxed)) reach_failpoint(name);
}

}  // namespace geartrain
