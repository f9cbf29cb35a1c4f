// One rank's part of a synchronous write, and the joint write of all ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fingerprint.hpp"
#include "calls/call.hpp"

namespace geartrain {

// Inputs of a hosted model, which computes the gradients; opaque to a group.
class HostedWrite {
 public:
  virtual ~HostedWrite() = default;
  // Fingerprint of the inputs.
  virtual Fingerprint fingerprint(Fingerprint begin) const = 0;
  // Bytes of their arrays.
  virtual size_t bytes() const = 0;
};

// Gradients, or the inputs of a hosted model.
struct RankWrite {
  PushRequest push;                           // has a `group`; without arrays if `hosted` is set
  std::shared_ptr<const HostedWrite> hosted;  // or null
  std::shared_ptr<const void> arrays;         // keeps the arrays of `push` alive; null: the caller does
};

// Bytes of its arrays.
size_t bytes_of(const RankWrite& write);

// Copy, in memory of its own.
RankWrite copied(const RankWrite& write);

// Fingerprint of one rank's part of a step: of all that changes the rows.
Fingerprint fingerprint_of(const RankWrite& write);

// Whether hosted models make the gradients of all ranks. Throws the Fault StepMismatch if only of some.
bool are_hosted(const std::string& table, const std::vector<const RankWrite*>& writes);

// The joint push, equal to those of all ranks together.
struct JointPush {
  std::vector<int64_t> ids;            // [N] distinct
  std::unique_ptr<float[]> gradients;  // [N, D]
  std::vector<uint32_t> occurrences;   // [N]; empty: not counted
  PushRequest push;                    // refers to these arrays; other numbers are those of the first rank
};

// Joins writes in rank order, all of one width: an id occurs as often as on all ranks together, and step and time are
// the latest; pulled_at is left out, as each rank has pulled its own. Each rank's gradient is the mean over its
// samples, so the joint mean is the sum weighted by sample counts, in rank order.
JointPush joint_push(const std::vector<const RankWrite*>& writes, bool counts_occurrences);

}  // namespace geartrain
