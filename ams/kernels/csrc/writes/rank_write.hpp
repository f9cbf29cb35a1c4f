// One rank's part of a synchronous write, and what the parts of all ranks are together.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fingerprint.hpp"
#include "calls/call.hpp"

namespace geartrain {

// The inputs of a hosted model, which makes the gradients: whoever hosts it knows them, a group does not.
class HostedWrite {
 public:
  virtual ~HostedWrite() = default;
  // What tells these inputs from others.
  virtual Fingerprint fingerprint(Fingerprint begin) const = 0;
  // Of their arrays.
  virtual size_t bytes() const = 0;
};

// Gradients, or the inputs of a hosted model.
struct RankWrite {
  PushRequest push;                           // its `group` is given; without arrays where `hosted` is given
  std::shared_ptr<const HostedWrite> hosted;  // or null
  std::shared_ptr<const void> arrays;         // what keeps those of `push` alive; null: its caller does
};

// What its arrays take.
size_t bytes_of(const RankWrite& write);

// The same, in memory of its own.
RankWrite copied(const RankWrite& write);

// What tells one rank's part of a step from another: of all that the rows are changed by.
Fingerprint fingerprint_of(const RankWrite& write);

// Whether hosted models make the gradients of all ranks. Throws the Fault StepMismatch if they do so for some of them.
bool are_hosted(const std::string& table, const std::vector<const RankWrite*>& writes);

// The push that equals those of all ranks.
struct JointPush {
  std::vector<int64_t> ids;            // [N] distinct
  std::unique_ptr<float[]> gradients;  // [N, D]
  std::vector<uint32_t> occurrences;   // [N]; none: they are not counted
  PushRequest push;                    // of those arrays, by the numbers of the first rank
};

// Given in rank order, all of one width: an id occurs as often as on all ranks together, and the step and the time are the latest; when its rows were pulled
// is not said, for each rank has pulled its own. Each rank's gradient is the mean over its samples, so that the joint mean is the sum weighted by sample
// counts, which is made in rank order.
JointPush joint_push(const std::vector<const RankWrite*>& writes, bool counts_occurrences);

}  // namespace geartrain
