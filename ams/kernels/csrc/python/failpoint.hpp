// Failpoints of ams/observe/failpoints.py in C++: places with a name at which a test makes the process die, wait or fail.
#pragma once

#include <atomic>

namespace geartrain {

// Whether any failpoint of this process is armed. failpoints.py says so.
extern std::atomic<bool> failpoints_armed;

// Takes the interpreter lock and does what is armed there. Throws the Fault that it is to fail with.
void reach_failpoint(const char* name);

// Says that the place called `name` is reached. One load unless something is armed.
inline void failpoint(const char* name) {
  if (failpoints_armed.load(std::memory_order_relaxed)) reach_failpoint(name);
}

}  // namespace geartrain
