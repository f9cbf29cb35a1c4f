// Alarm of a shard's deadlines: wakes the thread that watches them when one is earlier than its next look.
#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

namespace geartrain {

class Alarm {
 public:
  // `ring` wakes the watching thread, as `at()` is earlier now. It may take the interpreter lock.
  void on_ring(std::function<void()> ring) { ring_ = std::move(ring); }

  // Time of its next look, in seconds on its clock; infinite: never. Set by the thread that has the shard's turn.
  double at() const { return at_; }
  void set(double seconds) { at_ = seconds; }
  // Returns whether `deadline` is earlier, and sets the next look to it then. Called with the turn; does not ring.
  bool note(std::optional<double> deadline) {
    if (!deadline || *deadline >= at_) return false;
    at_ = *deadline;
    return true;
  }
  void ring() const {
    if (ring_) ring_();
  }

 private:
  std::atomic<double> at_{std::numeric_limits<double>::infinity()};
  std::function<void()> ring_;
};

}  // namespace geartrain
