// Admitted part of a push.
#pragma once

#include <cstdint>
#include <vector>

#include "admission/admission.hpp"
#include "base/row_places.hpp"
#include "calls/call.hpp"

namespace geartrain {

struct AdmittedPush {
  Admission::Decision decision;  // on the ids without a row
  bool is_all = true;            // no id is refused, and the rest is empty
  std::vector<int64_t> ids;      // ids that have a row, or get one
  std::vector<int64_t> gradients, rows;  // numbers of their gradients, and of their destinations
  std::vector<uint32_t> occurrences;     // their occurrences, if the push has any
  std::vector<int64_t> refused;          // places of refused ids in the push, if rows have a destination
};

// Removes refused ids from a push of `ids` with rows at `positions` (-1: none), of which `missing` have none. `after`:
// destination of the updated rows, or null. Throws std::bad_alloc; nothing has changed then.
AdmittedPush admit(Admission& admission, const int64_t* ids, const BatchFacts& batch,
                   const RowPlaces<const char>& gradients, const RowPlaces<char>* after,
                   std::vector<int64_t>& positions, std::vector<int64_t>& missing);

}  // namespace geartrain
