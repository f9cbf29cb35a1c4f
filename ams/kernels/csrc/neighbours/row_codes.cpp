#include "neighbours/row_codes.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/common.hpp"
#include "machine/fan_out.hpp"
#include "machine/isa.hpp"

namespace geartrain {
namespace {

constexpr double kToInteger = 0x1.8p52;   // adding and subtracting it rounds
constexpr double kUp = 1 + 0x1p-20;       // covers the conversion to float
constexpr double kRounding = 0x1p-18;     // of a product, relative to both lengths: the bounds are made in float32
constexpr double kOffsetRounding = 0x1p-20;
constexpr double kMinSlack = 0x1p-100;  // covers underflow in a product
constexpr double kMaxOffset = 0x1p100;
constexpr float kMinScale = 0x1p-100f;  // of rows with codes
constexpr int kFeatureExponent = -40;     // features are scaled below 2^-40: no product with a row overflows
constexpr int kMaxExponent = 100;        // 2^exponent and its inverse are normal numbers

float largest_magnitude(const float* values, int64_t count) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(values[i]));
  return largest;
}

// Eight lanes, so that vectors can add them up: a single sum would have a fixed order.
GEARTRAIN_INLINE void encode_row(const float* row, int64_t dim, uint8_t* __restrict codes, float* words) {
  constexpr int kLanes = 8;
  int32_t bits = 0;  // magnitudes are ordered as their bits are
  for (int64_t d = 0; d < dim; ++d) bits = std::max(bits, std::bit_cast<int32_t>(row[d]) & 0x7fffffff);
  float scale = std::bit_cast<float>(bits) / 127;
  if (!(scale >= kMinScale)) scale = 0;
  const double inverse = scale > 0 ? 1.0 / static_cast<double>(scale) : 0.0, step = static_cast<double>(scale);
  for (int64_t d = 0; d < dim; ++d) {
    const double code = static_cast<double>(row[d]) * inverse + kToInteger - kToInteger;
    codes[d] = static_cast<uint8_t>(static_cast<int>(std::min(std::max(code, -127.0), 127.0)) + kCodeZero);
  }
  double lengths[kLanes] = {}, left_out[kLanes] = {};
  const int64_t whole = dim / kLanes * kLanes;
  for (int64_t d = 0; d < whole; d += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = static_cast<double>(row[d + lane]);
      const double rest = value - static_cast<double>(codes[d + lane] - kCodeZero) * step;
      lengths[lane] += value * value;
      left_out[lane] += rest * rest;
    }
  for (int64_t d = whole; d < dim; ++d) {
    const double value = static_cast<double>(row[d]), rest = value - static_cast<double>(codes[d] - kCodeZero) * step;
    lengths[0] += value * value;
    left_out[0] += rest * rest;
  }
  words[0] = scale;
  words[1] = static_cast<float>(std::sqrt(std::accumulate(left_out, left_out + kLanes, 0.0)) * kUp);
  words[2] = static_cast<float>(std::sqrt(std::accumulate(lengths, lengths + kLanes, 0.0)) * kUp);
}

}  // namespace

void encode_rows(const float* rows, int64_t count, int64_t dim, uint8_t* panels, int64_t threads) {
  const int64_t bytes = panel_bytes(dim), quads = quads_of(dim);
  const auto encode = Versions<&encode_row>::pick(active_isa());
  fan_out(panels_of(count), static_cast<size_t>(count * dim) * sizeof(float), threads,
          [&](int64_t begin, int64_t end, int64_t) {
            DefaultFloatMode float_mode;
            const std::vector<float> nothing(static_cast<size_t>(dim));
            std::vector<uint8_t> codes(static_cast<size_t>(4 * quads), kCodeZero);
            for (int64_t row = begin * kPanelRows; row < end * kPanelRows; ++row) {
              float words[3];
              encode(row < count ? rows + row * dim : nothing.data(), dim, codes.data(), words);
              uint8_t* place = panels + row / kPanelRows * bytes + row % kPanelRows * 4;
              for (int64_t q = 0; q < quads; ++q) std::memcpy(place + q * kPanelRows * 4, codes.data() + 4 * q, 4);
              for (int64_t i = 0; i < 3; ++i)
                std::memcpy(place + (quads + i) * kPanelRows * 4, &words[i], sizeof(float));
            }
          });
}

FeatureBounds encode_feature(const float* feature, int64_t dim, float largest_offset, int8_t* codes) {
  const float largest = largest_magnitude(feature, dim);
  const int wanted = (largest > 0 ? std::ilogb(largest) + 1 : 0) - kFeatureExponent;
  const int exponent = std::clamp(wanted, -kMaxExponent, kMaxExponent);
  const double unit = std::ldexp(1.0, -exponent), scale = static_cast<double>(largest) * unit / 63;
  double left_out = 0, length = 0;
  int sum = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const double value = static_cast<double>(feature[d]) * unit;
    const int code = scale > 0 ? std::clamp(static_cast<int>(std::lrint(value / scale)), -63, 63) : 0;
    const double rest = value - code * static_cast<double>(static_cast<float>(scale));
    codes[d] = static_cast<int8_t>(code);
    sum += code;
    length += value * value;
    left_out += rest * rest;
  }
  std::fill(codes + dim, codes + 4 * quads_of(dim), int8_t{0});
  const double offset = static_cast<double>(largest_offset) * unit;
  const bool is_bounded = wanted <= exponent && offset <= kMaxOffset;
  return {
      .scale = static_cast<float>(scale),
      .length = static_cast<float>(std::sqrt(length) * kUp),
      .left_out = static_cast<float>((std::sqrt(left_out) + std::sqrt(length) * kRounding) * kUp),
      .slack = is_bounded ? static_cast<float>(offset * kOffsetRounding + kMinSlack)
                          : std::numeric_limits<float>::infinity(),
      .unit = static_cast<float>(unit),
      .start = -kCodeZero * sum,
      .exponent = exponent,
  };
}

}  // namespace geartrain
