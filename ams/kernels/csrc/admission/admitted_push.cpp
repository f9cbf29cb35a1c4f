#include "admission/admitted_push.hpp"

#include <utility>

namespace geartrain {

AdmittedPush admit(Admission& admission, const int64_t* ids, const BatchFacts& batch,
                   const RowPlaces<const char>& gradients, const RowPlaces<char>* after,
                   std::vector<int64_t>& positions, std::vector<int64_t>& missing) {
  const auto count = static_cast<int64_t>(positions.size());
  std::vector<uint32_t> occurrences;
  occurrences.reserve(missing.size());
  for (int64_t i = 0; i < count; ++i)
    if (positions[static_cast<size_t>(i)] < 0) occurrences.push_back(batch.occurrences_of(i));
  AdmittedPush push;
  push.decision = admission.decide(missing, occurrences);
  std::vector<int64_t> left;
  for (size_t i = 0; i < missing.size(); ++i)
    if (push.decision.admits(i)) left.push_back(missing[i]);
  if (left.size() == missing.size()) return push;
  push.is_all = false;
  const size_t num_refused = missing.size() - left.size(), num_left = positions.size() - num_refused;
  for (auto* numbers : {&push.ids, &push.gradients}) numbers->reserve(num_left);
  if (after != nullptr) {
    push.rows.reserve(num_left);
    push.refused.reserve(num_refused);
  }
  size_t candidate = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = positions[static_cast<size_t>(i)];
    if (position < 0 && !push.decision.admits(candidate++)) {
      if (after != nullptr) push.refused.push_back(i);
      continue;
    }
    positions[push.ids.size()] = position;
    push.ids.push_back(ids[i]);
    push.gradients.push_back(gradients.number(i));
    if (batch.occurrences != nullptr) push.occurrences.push_back(batch.occurrences_of(i));
    if (after != nullptr) push.rows.push_back(after->number(i));
  }
  positions.resize(num_left);
  missing = std::move(left);
  return push;
}

}  // namespace geartrain
