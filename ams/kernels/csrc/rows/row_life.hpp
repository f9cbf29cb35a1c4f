// What a table that lets rows go knows of each: when it was last pushed, on the clock that pushes carry, and how often.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>

namespace geartrain {

// The largest step and time that pushes said. Nobody looks at a clock here.
struct LifeClock {
  int64_t step = 0;
  int64_t seconds = 0;  // since 1970

  void advance(const LifeClock& other) {
    step = std::max(step, other.step);
    seconds = std::max(seconds, other.seconds);
  }
};

// As it lies in memory, and in the arrays that Python reads.
struct RowLife {
  int64_t step;      // last seen
  uint32_t seconds;  // the same, since 1970
  uint32_t count;    // occurrences; ends at 2**32 - 1
};
static_assert(sizeof(RowLife) == 16);

// A row that may have to go: those that were seen least go first, then those that were seen longest ago, then the lower ids.
struct Candidate {
  RowLife life;
  int64_t id;
  int64_t place;  // its position, or of a row that is not there yet -1 - its place in the request

  bool operator<(const Candidate& other) const {
    const auto key = [](const Candidate& candidate) { return std::tuple(candidate.life.count, candidate.life.step, candidate.life.seconds, candidate.id); };
    return key(*this) < key(other);
  }
};

}  // namespace geartrain
