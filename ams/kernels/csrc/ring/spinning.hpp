// Decision whether to spin before sleeping: it pays if the event comes soon, on a thread with a core of its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace geartrain {

// Thread-safe. Spinning in vain takes the core from the awaited thread: after a few times it is only tried now and
// then.
class Spinning {
 public:
  explicit Spinning(double seconds)
      : longest_(
            std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds))) {}

  // Polls `found` for a while at most. Returns its last result.
  template <class Found>
  bool look(const Found& found) {
    if (found()) return true;
    const int credit = credit_.load(std::memory_order_relaxed);
    if (credit <= 0 && tries_.fetch_add(1, std::memory_order_relaxed) % kTryEach != 0) return false;
    const auto end = std::chrono::steady_clock::now() + longest_;
    do {
      for (int i = 0; i < 16; ++i) {
        if (found()) {
          credit_.store(std::min(credit + 1, kMaxCredit), std::memory_order_relaxed);
          return true;
        }
        relax();
      }
    } while (std::chrono::steady_clock::now() < end);
    credit_.store(std::max(credit - 2, 0), std::memory_order_relaxed);
    return false;
  }

 private:
  static constexpr int kMaxCredit = 8;
  static constexpr unsigned kTryEach = 16;

  static void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  const std::chrono::steady_clock::duration longest_;
  std::atomic<int> credit_ = kMaxCredit;
  std::atomic<unsigned> tries_ = 0;
};

}  // namespace geartrain
