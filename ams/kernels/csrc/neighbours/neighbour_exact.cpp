#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "machine/fan_out.hpp"
#include "neighbours/exact_dot.hpp"
#include "neighbours/neighbour_recall.hpp"

namespace geartrain {
namespace {

constexpr size_t kAlways = std::numeric_limits<size_t>::max();

struct Scored {
  double score;
  int32_t id;
};

bool better(const Scored& x, const Scored& y) { return x.score > y.score || (x.score == y.score && x.id < y.id); }

int64_t slices_for(int64_t count, int64_t threads) {
  return std::clamp<int64_t>(threads, 1, std::max<int64_t>(count, 1));
}

}  // namespace

ExactDot exact_dot_of_this_cpu() { return Versions<&exact_dot_body>::pick(active_isa()); }

int64_t make_unit_rows(float* rows, int64_t count, int64_t dim, int64_t threads) {
  const ExactDot dot = exact_dot_of_this_cpu();
  std::atomic<int64_t> first_bad{count};
  fan_out(count, kAlways, slices_for(count, threads), [&](int64_t begin, int64_t end, int64_t) {
    DefaultFloatMode float_mode;
    for (int64_t row = begin; row < end; ++row) {
      float* at = rows + row * dim;
      const double length = std::sqrt(dot(at, at, dim));  // at most 4e38 * 2^32: finite for finite rows
      if (!std::isfinite(length)) {
        int64_t seen = first_bad.load();
        while (row < seen && !first_bad.compare_exchange_weak(seen, row)) {
        }
        return;
      }
      if (length == 0.0) continue;
      for (int64_t d = 0; d < dim; ++d) at[d] = static_cast<float>(static_cast<double>(at[d]) / length);
    }
  });
  return first_bad < count ? first_bad.load() : -1;
}

void exact_scores(const float* a, int64_t count, int64_t dim, const int32_t* ids, const int32_t* counts, int64_t width,
                  const float* b, int64_t first_b, int64_t count_b, double* scores, int64_t threads) {
  const ExactDot dot = exact_dot_of_this_cpu();
  fan_out(count, kAlways, slices_for(count, threads), [&](int64_t begin, int64_t end, int64_t) {
    DefaultFloatMode float_mode;
    for (int64_t row = begin; row < end; ++row) {
      const int32_t* candidates = ids + row * width;
      for (int64_t j = 0; j < counts[row]; ++j) {
        const int64_t at = candidates[j] - first_b;
        if (at >= 0 && at < count_b) prefetch_bytes(b + at * dim, static_cast<size_t>(dim) * sizeof(float));
      }
      for (int64_t j = 0; j < counts[row]; ++j) {
        const int64_t at = candidates[j] - first_b;
        if (at >= 0 && at < count_b) scores[row * width + j] = dot(a + row * dim, b + at * dim, dim);
      }
    }
  });
}

void exact_best(const UnitRows& a, const UnitRows& b, int64_t dim, int64_t k, double* scores, int32_t* ids,
                int32_t* counts, int64_t threads) {
  const ExactDot dot = exact_dot_of_this_cpu();
  fan_out(a.count, kAlways, slices_for(a.count, threads), [&](int64_t begin, int64_t end, int64_t) {
    DefaultFloatMode float_mode;
    std::vector<Scored> best;
    for (int64_t row = begin; row < end; ++row) {
      best.clear();
      for (int64_t i = 0; i < counts[row]; ++i) best.push_back({scores[row * k + i], ids[row * k + i]});
      std::make_heap(best.begin(), best.end(), better);  // the worst in front
      for (int64_t j = 0; j < b.count; ++j) {
        if (b.id(j) == a.id(row)) continue;
        const Scored scored{dot(a.rows + row * dim, b.rows + j * dim, dim), b.id(j)};
        if (static_cast<int64_t>(best.size()) == k) {
          if (!better(scored, best.front())) continue;
          std::pop_heap(best.begin(), best.end(), better);
          best.pop_back();
        }
        best.push_back(scored);
        std::push_heap(best.begin(), best.end(), better);
      }
      counts[row] = static_cast<int32_t>(best.size());
      for (size_t i = 0; i < best.size(); ++i) {
        scores[row * k + static_cast<int64_t>(i)] = best[i].score;
        ids[row * k + static_cast<int64_t>(i)] = best[i].id;
      }
    }
  });
}

void rank_candidates(const double* scores, const int32_t* ids, const int32_t* counts, int64_t width,
                     const float* floors, int64_t count, double error_bound, int64_t k, int32_t* out, uint8_t* accepted,
                     int64_t threads) {
  fan_out(count, kAlways, slices_for(count, threads), [&](int64_t begin, int64_t end, int64_t) {
    std::vector<Scored> best;
    for (int64_t row = begin; row < end; ++row) {
      best.clear();
      for (int64_t j = 0; j < counts[row]; ++j) best.push_back({scores[row * width + j], ids[row * width + j]});
      accepted[row] = 0;
      if (static_cast<int64_t>(best.size()) < k) continue;
      std::partial_sort(best.begin(), best.begin() + k, best.end(), better);
      for (int64_t i = 0; i < k; ++i) out[row * k + i] = best[static_cast<size_t>(i)].id;
      accepted[row] = k == 0 || best[static_cast<size_t>(k - 1)].score > static_cast<double>(floors[row]) + error_bound;
    }
  });
}

}  // namespace geartrain
