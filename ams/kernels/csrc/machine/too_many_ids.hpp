// The refusal of more ids than an index can number.
#pragma once

#include <cstdint>
#include <new>
#include <string>

namespace geartrain {

// A std::bad_alloc, as OverBudget: so that whoever changes nothing when memory runs out does so here, too.
struct TooManyIds : std::bad_alloc {
  TooManyIds(int64_t asked_ids, int64_t used_ids, int64_t most_ids) : asked(asked_ids), used(used_ids), most(most_ids) {}
  const char* what() const noexcept override { return "more ids than an index can number"; }
  // What its caller is told.
  std::string words() const {
    return "a shard holds at most " + std::to_string(most) + " rows of a hashed table; it has " + std::to_string(used) + ", and " +
           std::to_string(asked) +
           " more were to come. Nothing was changed. Spread the table over more shards: take a snapshot and restore it on a "
           "cluster of more, or let rows expire";
  }
  int64_t asked, used, most;
};

}  // namespace geartrain
