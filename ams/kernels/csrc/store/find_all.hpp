// Lookup of the rows of many ids with prefetch of the index lines.
#pragma once

#include <algorithm>
#include <cstdint>
#include <variant>

#include "index/directory.hpp"

namespace geartrain {

enum class Find { position, item };

// found[i] = the position, or the item, of ids[i], or -1. Calls between(begin, end) for bursts of ids, to use the time
// in which the index lines arrive.
template <Find what, class Between>
void find_all(const Directory& any_directory, const int64_t* ids, int64_t count, int64_t* found, Between&& between) {
  std::visit(
      [&](const auto& directory) {
        for (int64_t i = 0; i < std::min(count, kBurst); ++i) directory.prefetch(ids[i]);
        for (int64_t begin = 0; begin < count; begin += kBurst) {
          const int64_t end = std::min(count, begin + kBurst), next = std::min(count, end + kBurst);
          for (int64_t i = end; i < next; ++i) directory.prefetch(ids[i]);
          between(begin, end);
          for (int64_t i = begin; i < end; ++i) {
            if constexpr (what == Find::item)
              found[i] = directory.find_item(ids[i]);
            else
              found[i] = directory.find(ids[i]);
          }
        }
      },
      any_directory);
}

}  // namespace geartrain
