// Life of a row in a table with expiry or eviction: last push, on the clock of pushes, and number of occurrences.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>

namespace geartrain {

// Largest step and time of any push. No system clock is read here.
struct LifeClock {
  int64_t step = 0;
  int64_t seconds = 0;  // since 1970

  void advance(const LifeClock& other) {
    step = std::max(step, other.step);
    seconds = std::max(seconds, other.seconds);
  }
};

// Layout in memory, and in the arrays that Python reads.
struct RowLife {
  int64_t step;      // last seen
  uint32_t seconds;  // last seen, since 1970
  uint32_t count;    // occurrences; saturates at 2**32 - 1
};
static_assert(sizeof(RowLife) == 16);

// Candidate for eviction: rows seen least often go first, of these the ones seen longest ago, then lower ids.
struct Candidate {
  RowLife life;
  int64_t id;
  int64_t place;  // its position, or for a new row -1 - its index in the request

  bool operator<(const Candidate& other) const {
    const auto key = [](const Candidate& candidate) {
      return std::tuple(candidate.life.count, candidate.life.step, candidate.life.seconds, candidate.id);
    };
    return key(*this) < key(other);
  }
};

}  // namespace geartrain
