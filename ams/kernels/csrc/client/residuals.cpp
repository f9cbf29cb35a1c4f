#include "client/residuals.hpp"

#include <algorithm>
#include <cmath>
#include <new>
#include <string>
#include <vector>

#include "calls/call.hpp"
#include "machine/lookahead.hpp"
#include "values/kernels.hpp"

namespace geartrain {
namespace {

// What PositionLru takes for an id, at most: entries of 16 bytes, a quarter of them used; its id, its links, its place among the free.
constexpr int64_t kIndexBytes = 4 * 16 + 8 + 8 + 4;
constexpr int64_t kFirstIds = 1024;
constexpr int64_t kBlock = 256;  // ids that are looked for together

int64_t row_bytes_of(int64_t dim) { return dim * static_cast<int64_t>(sizeof(float)); }

// Whether gradients can be told from what they are multiplied by.
bool divides(float scale) { return std::isnormal(scale) && std::isfinite(1.0f / scale); }

}  // namespace

Residuals::Residuals(int64_t dim, int64_t most_bytes, int64_t most_ids)
    : dim_(dim),
      capacity_(std::clamp<int64_t>(std::min(most_bytes / (row_bytes_of(dim) + kIndexBytes), most_ids), 1, PositionLru::kMostPositions)),
      positions_(std::min(kFirstIds, capacity_)),
      rows_(std::make_unique<SlabArray>(row_bytes_of(dim), capacity_)) {}

void Residuals::make_room(int64_t count) {
  const int64_t wanted = std::min(capacity_, positions_.size() + count);
  try {
    if (wanted > positions_.capacity()) positions_.grow(std::min(capacity_, std::max(wanted, 2 * positions_.capacity())));
    for (; num_ensured_ < wanted; ++num_ensured_) rows_->ensure(num_ensured_);
  } catch (const std::bad_alloc&) {
    throw Fault("OutOfMemory", "there is no memory for what rounding cuts off the gradients of " + std::to_string(wanted) +
                                   " ids; give their wire_dtype fewer residual_bytes, or error_feedback=False. Nothing was sent");
  }
}

// Calls visit(i, its gradient as float32, its residual) for the ids of [begin, end) whose position is one.
template <class Visit>
void Residuals::each_row(const RoundedGradients& gradients, int64_t begin, int64_t end, const int64_t* positions,
                         const Visit& visit) const {
  const size_t width = static_cast<size_t>(dim_), bytes = width * item_bytes(gradients.dtype);
  const auto load = kernels().load[static_cast<int>(gradients.dtype)];
  std::vector<float> buffer(gradients.dtype == DType::float32 ? 0 : width);
  const Lookahead lookahead;
  lookahead.each(
      end - begin, width * sizeof(float),
      [&](int64_t i) {
        if (positions[i] >= 0) lookahead.ask(Use::update, at(positions[i]), width * sizeof(float));
      },
      [&](int64_t i) {
        if (positions[i] < 0) return;
        const char* values = gradients.values.at(begin + i, bytes);
        if (!buffer.empty()) load(buffer.data(), values, width);
        visit(begin + i, buffer.empty() ? reinterpret_cast<const float*>(values) : buffer.data(), at(positions[i]));
      });
}

void Residuals::round(const RoundedGradients& gradients, uint16_t* out) {
  const DefaultFloatMode float_mode;
  const size_t width = static_cast<size_t>(dim_);
  const auto feed_back = kernels().feed_back[static_cast<int>(gradients.wire)];
  const std::lock_guard lock(mutex_);
  make_room(gradients.count);
  // Where nothing can be kept, as if nothing had been cut off.
  std::vector<float> none(divides(gradients.scale) ? 0 : width);
  int64_t positions[kBlock], found[kBlock];
  for (int64_t begin = 0; begin < gradients.count;) {
    const int64_t size = std::min({kBlock, capacity_, gradients.count - begin});
    positions_.find(gradients.ids + begin, size, found, true);
    num_dropped_ += positions_.place(gradients.ids + begin, size, positions);
    each_row(gradients, begin, begin + size, positions, [&](int64_t i, const float* gradient, float* residual) {
      if (found[i - begin] < 0) std::fill_n(residual, width, 0.0f);
      float* cut_off = none.empty() ? residual : none.data();
      feed_back(out + static_cast<size_t>(i) * width, cut_off, gradient, width, none.empty() ? gradients.scale : 1.0f);
      if (!none.empty()) std::fill(none.begin(), none.end(), 0.0f);
    });
    begin += size;
  }
}

void Residuals::take_back(const RoundedGradients& gradients, const uint16_t* sent) {
  if (!divides(gradients.scale)) return;
  const DefaultFloatMode float_mode;
  const size_t width = static_cast<size_t>(dim_);
  const auto load = kernels().load[static_cast<int>(gradients.wire)];
  std::vector<float> widened(width);
  const std::lock_guard lock(mutex_);
  int64_t positions[kBlock];
  for (int64_t begin = 0; begin < gradients.count; begin += kBlock) {
    const int64_t end = std::min(gradients.count, begin + kBlock);
    positions_.find(gradients.ids + begin, end - begin, positions, false);
    each_row(gradients, begin, end, positions, [&](int64_t i, const float* gradient, float* residual) {
      load(widened.data(), sent + static_cast<size_t>(i) * width, width);
      for (size_t column = 0; column < width; ++column) residual[column] += (widened[column] - gradient[column]) * gradients.scale;
    });
  }
}

void Residuals::clear() {
  const std::lock_guard lock(mutex_);
  positions_ = PositionLru(std::min(kFirstIds, capacity_));
  rows_ = std::make_unique<SlabArray>(row_bytes_of(dim_), capacity_);
  num_ensured_ = 0;
}

int64_t Residuals::size() const {
  const std::lock_guard lock(mutex_);
  return positions_.size();
}

int64_t Residuals::num_dropped() const {
  const std::lock_guard lock(mutex_);
  return num_dropped_;
}

int64_t Residuals::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  return num_ensured_ * row_bytes_of(dim_) + positions_.capacity() * kIndexBytes;
}

}  // namespace geartrain
