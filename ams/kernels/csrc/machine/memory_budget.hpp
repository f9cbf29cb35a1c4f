// How much memory all rows of this process may take, their slots and indexes included.
//
// Their pages are mapped without being reserved: past what the container has, the system would not refuse them but end the
// process when they are written. So what is about to be written is counted here first, in the huge pages that it touches.
#pragma once

#include <cstdint>
#include <new>
#include <string>

namespace geartrain {

// A refusal of the budget: a std::bad_alloc, so that whoever changes nothing when memory runs out does so here, too.
struct OverBudget : std::bad_alloc {
  OverBudget(int64_t asked_bytes, int64_t used_bytes, int64_t limit_bytes)
      : asked(asked_bytes), used(used_bytes), limit(limit_bytes) {}
  const char* what() const noexcept override { return "over the memory budget"; }
  // What its caller is told.
  std::string words() const;
  int64_t asked, used, limit;
};

// Any thread.
void set_memory_limit(int64_t bytes);
int64_t memory_limit();
int64_t memory_used();
// Throws OverBudget, and then nothing has changed.
void charge_memory(int64_t bytes);
void release_memory(int64_t bytes) noexcept;

}  // namespace geartrain
