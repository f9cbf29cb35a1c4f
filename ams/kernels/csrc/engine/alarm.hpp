// When somebody has to look at deadlines, and how to tell him that it is earlier than he means to.
#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

namespace geartrain {

class Alarm {
 public:
  // `ring` tells who looks that `at()` is earlier now. It may take the interpreter lock.
  void on_ring(std::function<void()> ring) { ring_ = std::move(ring); }

  // When he looks next, in seconds on a clock of his; infinite: never. Set by whoever has the shard's turn.
  double at() const { return at_; }
  void set(double seconds) { at_ = seconds; }
  // Whether `deadline` is earlier; then that is when. By whoever has the turn; rings nothing.
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
