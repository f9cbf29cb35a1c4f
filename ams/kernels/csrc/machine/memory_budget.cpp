#include "machine/memory_budget.hpp"

#include <atomic>

namespace geartrain {
namespace {

std::atomic<int64_t> limit{INT64_MAX};
std::atomic<int64_t> used{0};

}  // namespace

std::string OverBudget::words() const {
  return "rows need " + std::to_string(asked) + " more bytes; the rows of this process take " + std::to_string(used) +
         " of at most " + std::to_string(limit) +
         " bytes (server.memory_bytes). Nothing was changed. Add shards on other machines, drop tables, or give the "
         "server more memory";
}

void set_memory_limit(int64_t bytes) { limit = bytes; }
int64_t memory_limit() { return limit; }
int64_t memory_used() { return used; }

void charge_memory(int64_t bytes) {
  int64_t before = used;
  do {
    const int64_t most = limit;
    if (bytes > most - before) throw OverBudget(bytes, before, most);
  } while (!used.compare_exchange_weak(before, before + bytes));
}

void release_memory(int64_t bytes) noexcept { used -= bytes; }

}  // namespace geartrain
