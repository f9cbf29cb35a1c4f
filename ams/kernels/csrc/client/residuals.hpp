// Error feedback: what rounding to 16 bits cut off a gradient is added to the next gradient of its id (Seide et al., "1-bit stochastic
// gradient descent", Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "base/common.hpp"
#include "base/row_places.hpp"
#include "cache/position_lru.hpp"
#include "index/slabs.hpp"

namespace geartrain {

// Some gradients of one push: N distinct ids.
struct RoundedGradients {
  const int64_t* ids;   // [N]
  int64_t count;        // N
  RowPlaces<const char> values;  // [N, D], finite
  DType dtype;          // of those
  DType wire;           // of 16 bits
  float scale;          // what multiplies them where they arrive
};

// What was cut off, by id, in the unit of scale * gradient. Thread-safe.
class Residuals {
 public:
  // Takes at most `most_bytes`, but room for one id in any case; `most_ids`: how many there can be.
  Residuals(int64_t dim, int64_t most_bytes, int64_t most_ids);

  // Writes gradients with what was cut off before to out [N, D], and keeps what is cut off now. Where there is no room, the ids that
  // were pushed longest ago lose theirs. Throws the Fault OutOfMemory, and then nothing has changed.
  void round(const RoundedGradients& gradients, uint16_t* out);
  // These were never sent, and `sent` is what round() wrote of them: what it kept becomes what it was, but for rounding.
  void take_back(const RoundedGradients& gradients, const uint16_t* sent);
  void clear();

  int64_t size() const;
  int64_t num_dropped() const;
  int64_t memory_bytes() const;

 private:
  float* at(int64_t position) const { return reinterpret_cast<float*>(rows_->at(position)); }
  void make_room(int64_t count);
  template <class Visit>
  void each_row(const RoundedGradients& gradients, int64_t begin, int64_t end, const int64_t* positions, const Visit& visit) const;

  const int64_t dim_, capacity_;
  mutable std::mutex mutex_;
  PositionLru positions_;
  std::unique_ptr<SlabArray> rows_;  // float32 [D], by position
  int64_t num_ensured_ = 0;          // of its items
  int64_t num_dropped_ = 0;
};

}  // namespace geartrain
