// Memory limit of all rows of this process, with their slots and indexes.
//
// Their pages are mapped without reservation: beyond the container's memory the system would not refuse them but kill
// the process on a write. So memory about to be written is counted here first, in the huge pages that it touches.
#pragma once

#include <cstdint>
#include <new>
#include <string>

namespace geartrain {

// Refusal by the budget: a std::bad_alloc, so that code that is safe when memory runs out is safe here, too.
struct OverBudget : std::bad_alloc {
  OverBudget(int64_t asked_bytes, int64_t used_bytes, int64_t limit_bytes)
      : asked(asked_bytes), used(used_bytes), limit(limit_bytes) {}
  const char* what() const noexcept override { return "over the memory budget"; }
  // Message for the caller.
  std::string words() const;
  int64_t asked, used, limit;
};

// Thread-safe.
void set_memory_limit(int64_t bytes);
int64_t memory_limit();
int64_t memory_used();
// Throws OverBudget, and then nothing has changed.
void charge_memory(int64_t bytes);
void release_memory(int64_t bytes) noexcept;

}  // namespace geartrain
