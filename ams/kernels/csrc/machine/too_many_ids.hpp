// Refusals of more ids than an index can number, and of more rows than a table may have.
#pragma once

#include <cstdint>
#include <new>
#include <string>
#include <utility>

#include "base/text.hpp"

namespace geartrain {

// A std::bad_alloc, as OverBudget: code that is safe when memory runs out is safe here, too.
struct TooManyIds : std::bad_alloc {
  TooManyIds(int64_t asked_ids, int64_t used_ids, int64_t max_ids) : asked(asked_ids), used(used_ids), most(max_ids) {}
  const char* what() const noexcept override { return "more ids than an index can number"; }
  // Message for the caller.
  std::string words() const {
    return "a shard holds at most " + std::to_string(most) + " rows of a hashed table; it has " + std::to_string(used) +
           ", and the call adds " + std::to_string(asked) +
           ". Nothing was changed. Take a snapshot and restore it on a cluster with more shards, or let rows expire";
  }
  int64_t asked, used, most;
};

// A std::bad_alloc for the same reason.
struct TooManyRows : std::bad_alloc {
  TooManyRows(int64_t new_rows, int64_t other_rows, int64_t max_rows, int64_t most_bytes, int64_t wanted_bytes,
              std::string name)
      : coming(new_rows),
        staying(other_rows),
        most(max_rows),
        bytes(most_bytes),
        wanted(wanted_bytes),
        table(std::move(name)) {}
  const char* what() const noexcept override { return "more rows than the table's max_bytes has room for"; }
  std::string words() const {
    const std::string name = quoted(table), room = std::to_string(wanted);
    return "the write has " + std::to_string(coming) + " new rows and " + std::to_string(staying) +
           " existing ones; this shard's share of the table's max_bytes, " + std::to_string(bytes) +
           " bytes, has room for " + std::to_string(most) +
           " rows, and no row of a write is evicted for another. Nothing was changed. Write fewer rows at once, or "
           "raise max_bytes: geartrain table alter " +
           name + " --max-bytes " + room + " (in Python cluster.alter_table(" + name + ", max_bytes=" + room + "))";
  }
  int64_t coming, staying, most, bytes, wanted;
  std::string table;
};

}  // namespace geartrain
