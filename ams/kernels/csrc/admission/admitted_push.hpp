// Admitted part of a push.
#pragma once

#include <cstdint>
#include <vector>

#include "admission/admission.hpp"
#include "base/row_places.hpp"
#include "calls/call.hpp"

namespace geartrain {

struct AdmittedPush {
  Admission::Decision decision;  // of the ids that have no row
  bool is_all = true;            // none is refused, and the rest is empty
  std::vector<int64_t> ids;      // those that have a row, or get one
  std::vector<int64_t> gradients, rows;  // numbers of theirs, where they lie and where they go
  std::vector<uint32_t> occurrences;     // of them, if the push says any
  std::vector<int64_t> refused;          // places of the others in the push, if rows go anywhere
};

// Removes refused ids from a push of `ids` with rows at `positions` (-1: none), of which `missing` have none. `after`:
// destination of the updated rows, or null. Throws std::bad_alloc; nothing has changed then.
AdmittedPush admit(Admission& admission, const int64_t* ids, const BatchFacts& batch, const RowPlaces<const char>& gradients,
                      const RowPlaces<char>* after, std::vector<int64_t>& positions, std::vector<int64_t>& missing);

}  // namespace geartrain
