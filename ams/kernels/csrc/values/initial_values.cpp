#include "values/initial_values.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include "machine/isa.hpp"

namespace geartrain {
namespace {

constexpr int kMaxCounters = 16;  // Philox blocks computed side by side; each yields four columns
constexpr double kWordUnit = 0x1p-32;
constexpr double kLargestNormal = 6.5;    // inverse_cdf(2^-33) = -6.34

// words[4 * lane + k] is word k of the counter with column / 4 = first_counter + lane.
template <int kCounters>
GEARTRAIN_INLINE void philox(uint32_t* __restrict words, uint64_t seed, int64_t id, uint32_t first_counter,
                             uint32_t table_hash) {
  // Many are faster in lanes of 64 bits, which need no packing after a product; a few are not.
  using Lane = std::conditional_t<kCounters == kMaxCounters, uint64_t, uint32_t>;
  constexpr uint32_t kLow = 0xFFFFFFFFu;
  Lane x0[kCounters], x1[kCounters], x2[kCounters], x3[kCounters];
  for (int lane = 0; lane < kCounters; ++lane) {
    x0[lane] = static_cast<uint32_t>(id);
    x1[lane] = static_cast<uint32_t>(static_cast<uint64_t>(id) >> 32);
    x2[lane] = first_counter + static_cast<uint32_t>(lane);
    x3[lane] = table_hash;
  }
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int lane = 0; lane < kCounters; ++lane) {
      const uint64_t product0 = uint64_t{0xD2511F53u} * (x0[lane] & kLow);
      const uint64_t product1 = uint64_t{0xCD9E8D57u} * (x2[lane] & kLow);
      x0[lane] = static_cast<Lane>(product1 >> 32) ^ x1[lane] ^ key0;
      x1[lane] = static_cast<Lane>(product1 & kLow);
      x2[lane] = static_cast<Lane>(product0 >> 32) ^ x3[lane] ^ key1;
      x3[lane] = static_cast<Lane>(product0 & kLow);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  for (int lane = 0; lane < kCounters; ++lane) {
    words[4 * lane] = static_cast<uint32_t>(x0[lane]);
    words[4 * lane + 1] = static_cast<uint32_t>(x1[lane]);
    words[4 * lane + 2] = static_cast<uint32_t>(x2[lane]);
    words[4 * lane + 3] = static_cast<uint32_t>(x3[lane]);
  }
}

// ln x for normal x in (0, 1): x = m * 2^e with m in [sqrt(1/2), sqrt(2)), ln m = 2 artanh((m - 1) / (m + 1)).
GEARTRAIN_INLINE double log_of(double x) {
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const uint64_t shifted = bits - 0x3FE6A09E667F3BCDull;  // sqrt(1/2)
  // The exponent as a double without an int64 conversion, which AVX2 lacks: 2^52 + 2^51 + e, less that constant.
  const uint64_t exponent = (shifted >> 52) ^ 0x800ull;   // e + 2048 modulo 4096, e in [-2048, 2047]
  const double e = std::bit_cast<double>(0x4330000000000000ull | exponent) - (0x1p52 + 2048.0);
  const double m = std::bit_cast<double>(bits - (shifted & 0xFFF0000000000000ull));
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double series = 1.0 / 21.0;
  series = series * z + 1.0 / 19.0;
  series = series * z + 1.0 / 17.0;
  series = series * z + 1.0 / 15.0;
  series = series * z + 1.0 / 13.0;
  series = series * z + 1.0 / 11.0;
  series = series * z + 1.0 / 9.0;
  series = series * z + 1.0 / 7.0;
  series = series * z + 1.0 / 5.0;
  series = series * z + 1.0 / 3.0;
  series = series * z + 1.0;
  return e * 0.6931471805599453 + 2.0 * s * series;
}

template <int N>
GEARTRAIN_INLINE double polynomial(const double (&coefficients)[N], double x) {
  double value = coefficients[N - 1];
  for (int i = N - 2; i >= 0; --i) value = value * x + coefficients[i];
  return value;
}

constexpr double kCentralTop[] = {3.3871328727963666080e0,  1.3314166789178437745e+2, 1.9715909503065514427e+3,
                                  1.3731693765509461125e+4, 4.5921953931549871457e+4, 6.7265770927008700853e+4,
                                  3.3430575583588128105e+4, 2.5090809287301226727e+3};
constexpr double kCentralBottom[] = {1.0,
                                     4.2313330701600911252e+1, 6.8718700749205790830e+2, 5.3941960214247511077e+3,
                                     2.1213794301586595867e+4, 3.9307895800092710610e+4, 2.8729085735721942674e+4,
                                     5.2264952788528545610e+3};
constexpr double kTailTop[] = {1.42343711074968357734e0,  4.63033784615654529590e0,  5.76949722146069140550e0,
                               3.64784832476320460504e0,  1.27045825245236838258e0,  2.41780725177450611770e-1,
                               2.27238449892691845833e-2, 7.74545014278341407640e-4};
constexpr double kTailBottom[] = {1.0,
                                  2.05319162663775882187e0,  1.67638483018380384940e0,  6.89767334985100004550e-1,
                                  1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4,
                                  1.05075007164441684324e-9};

// For |p - 1/2| <= 0.425.
GEARTRAIN_INLINE double central(double q) {
  const double r = 0.180625 - q * q;
  return q * polynomial(kCentralTop, r) / polynomial(kCentralBottom, r);
}

// For all other p. AS 241 has a third region below p = exp(-25), which (word + 1/2) / 2^32 never reaches.
GEARTRAIN_INLINE double tail(double q) {
  const double r = __builtin_sqrt(-log_of(0.5 - __builtin_fabs(q))) - 1.6;
  const double value = polynomial(kTailTop, r) / polynomial(kTailBottom, r);
  return q < 0.0 ? -value : value;
}

template <int kColumns>
GEARTRAIN_INLINE void normal_columns(float* __restrict out, const uint32_t* __restrict words, double mean, double std) {
  double q[kColumns], z[kColumns];
  for (int i = 0; i < kColumns; ++i) {
    q[i] = (static_cast<double>(words[i]) + 0.5) * kWordUnit - 0.5;
    z[i] = central(q[i]);
  }
  // The tails, 15 % of all, are gathered so that they, too, are computed in lanes.
  int where[kColumns], num_tails = 0;
  double tails[kColumns];
  for (int i = 0; i < kColumns; ++i) {
    where[num_tails] = i;
    tails[num_tails] = q[i];
    num_tails += __builtin_fabs(q[i]) > 0.425;
  }
  for (int i = 0; i < num_tails; ++i) tails[i] = tail(tails[i]);
  for (int i = 0; i < num_tails; ++i) z[where[i]] = tails[i];
  for (int i = 0; i < kColumns; ++i) out[i] = static_cast<float>(mean + std * z[i]);
}

template <int kColumns>
GEARTRAIN_INLINE void uniform_columns(float* __restrict out, const uint32_t* __restrict words, double low, double high,
                                      float below_high) {
  const double width = high - low;
  for (int i = 0; i < kColumns; ++i) {
    const float value = static_cast<float>(low + width * (static_cast<double>(words[i]) * kWordUnit));
    out[i] = static_cast<double>(value) >= high ? below_high : value;
  }
}

// Rounding to float32 must not reach `high`, which the interval excludes.
float largest_below(double high, double low) {
  float value = static_cast<float>(high);
  if (static_cast<double>(value) >= high) value = std::nextafter(value, -INFINITY);
  return std::max(value, static_cast<float>(low));
}

// Columns from `column` on, as many as the counters yield, but below `dim`.
template <int kCounters>
GEARTRAIN_INLINE void fill_columns(float* out, int64_t column, int64_t dim, int64_t id, const InitialValues& values,
                                   float below_high) {
  constexpr int kColumns = 4 * kCounters;
  uint32_t words[kColumns];
  float block[kColumns];
  philox<kCounters>(words, values.seed, id, static_cast<uint32_t>(column / 4), values.table_hash);
  if (values.distribution == Distribution::normal)
    normal_columns<kColumns>(block, words, values.first, values.second);
  else
    uniform_columns<kColumns>(block, words, values.first, values.second, below_high);
  std::copy_n(block, std::min<int64_t>(kColumns, dim - column), out + column);
}

GEARTRAIN_INLINE void fill_random(float* out, int64_t dim, int64_t id, const InitialValues& values, float below_high) {
  constexpr int64_t kWide = 4 * kMaxCounters;
  int64_t column = 0;
  for (; dim - column > kWide / 2; column += kWide)
    fill_columns<kMaxCounters>(out, column, dim, id, values, below_high);
  // Rows of embeddings are narrow, and so are the ends of wider rows.
  if (dim - column > kWide / 4)
    fill_columns<kMaxCounters / 2>(out, column, dim, id, values, below_high);
  else if (dim > column)
    fill_columns<kMaxCounters / 4>(out, column, dim, id, values, below_high);
}

void fill_with(Isa isa, float* out, int64_t dim, int64_t id, const InitialValues& values, float below_high) {
  Versions<&fill_random>::pick(isa)(out, dim, id, values, below_high);
}

}  // namespace

void InitialValues::fill(float* out, int64_t dim, int64_t id) const {
  if (distribution == Distribution::constant) {
    std::fill_n(out, dim, static_cast<float>(first));
    return;
  }
  fill_with(active_isa(), out, dim, id, *this, largest_below(second, first));
}

double InitialValues::bound() const {
  switch (distribution) {
    case Distribution::constant: return std::fabs(first);
    case Distribution::uniform: return std::max(std::fabs(first), std::fabs(second));
    case Distribution::normal: return std::fabs(first) + kLargestNormal * second;
  }
  return INFINITY;
}

}  // namespace geartrain
