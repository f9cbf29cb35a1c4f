#include "neighbours/row_search.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "base/common.hpp"
#include "machine/fan_out.hpp"
#include "machine/isa.hpp"
#include "neighbours/exact_dot.hpp"
#include "neighbours/row_search_kernels.hpp"

namespace geartrain {

extern const RowSearchKernels row_search_baseline;
#if defined(__x86_64__)
extern const RowSearchKernels row_search_avx2;
extern const RowSearchKernels row_search_avx512;
extern const RowSearchKernels row_search_vnni;
#endif

const RowSearchKernels& row_search_kernels() {
#if defined(__x86_64__)
  if (uses_vnni()) return row_search_vnni;
  if (active_isa() == Isa::avx512) return row_search_avx512;
  if (active_isa() == Isa::avx2 && has_fused_multiply_add()) return row_search_avx2;
#endif
  return row_search_baseline;
}

namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr int64_t kFeaturesAtOnce = 128;   // their codes stay in the first-level cache while panels pass by
constexpr size_t kCandidates = 4096;       // of one feature, before they are scored

struct Scored {
  float score;
  int32_t row;
};

// std::nextafter towards minus infinity, without a call: a search raises its floors many times.
float next_below(float value) {
  const int32_t bits = std::bit_cast<int32_t>(value + 0.0f);  // no -0
  if (!(value >= kLowest)) return value;
  return bits == 0 ? -std::numeric_limits<float>::denorm_min() : std::bit_cast<float>(bits > 0 ? bits - 1 : bits + 1);
}

bool better(const Scored& x, const Scored& y) { return x.score > y.score || (x.score == y.score && x.row < y.row); }

class ExactScores {
 public:
  explicit ExactScores(const SearchedRows& rows) : rows_(rows), dot_(exact_dot_of_this_cpu()) {}

  float operator()(const float* feature, int32_t row) const {
    const double offset = rows_.offsets == nullptr ? 0.0 : static_cast<double>(rows_.offsets[row]);
    const float score = static_cast<float>(dot_(feature, at(row), rows_.dim) + offset) + 0.0f;  // no -0
    return std::isnan(score) ? kLowest : score;  // NaN is from a damaged file: scores need an order
  }
  void prefetch(int32_t row) const { prefetch_bytes(at(row), static_cast<size_t>(rows_.dim) * sizeof(float)); }

 private:
  const float* at(int32_t row) const { return rows_.rows + int64_t{row} * rows_.dim; }

  const SearchedRows& rows_;
  const ExactDot dot_;
};

// One thread's state of one feature.
class Running {
 public:
  Running(const float* feature, const FeatureBounds& bounds, int64_t k)
      : feature_(feature),
        unit_(std::ldexp(1.0, bounds.exponent)),
        per_unit_(1 / unit_),
        k_(static_cast<size_t>(k)),
        full_(std::max(kCandidates, 4 * k_)) {}

  // A row whose upper bound is below the floor cannot be an answer.
  float floor() const { return floor_; }

  void offer(const BoundHit& hit, int32_t row, const ExactScores& exact) {
    if (hit.upper < floor_) return;
    if (std::isfinite(hit.lower)) push_lower(hit.lower);
    candidates_.push_back({hit.upper, row});
    if (candidates_.size() < full_) return;
    drop_candidates();
    if (candidates_.size() > full_ / 2) settle(exact);
  }

  // Merges another thread's state of the same feature.
  void join(const Running& other) {
    for (const float lower : other.lowers_) push_lower(lower);
    candidates_.insert(candidates_.end(), other.candidates_.begin(), other.candidates_.end());
    best_.insert(best_.end(), other.best_.begin(), other.best_.end());
    raise_floor(other.floor_);
  }

  const std::vector<Scored>& finish(const ExactScores& exact) {
    drop_candidates();
    settle(exact);
    return best_;
  }

  size_t num_candidates() const { return candidates_.size(); }

 private:
  void push_lower(float lower) {
    if (lowers_.size() == k_) {
      if (!(lower > lowers_.front())) return;
      std::pop_heap(lowers_.begin(), lowers_.end(), std::greater<>());
      lowers_.pop_back();
    }
    lowers_.push_back(lower);
    std::push_heap(lowers_.begin(), lowers_.end(), std::greater<>());  // the least in front
    if (lowers_.size() == k_) raise_floor_to_score(static_cast<double>(lowers_.front()) * unit_);
  }

  // k rows have at least this score. Others may round to the same float32, and come first if their row is lower.
  void raise_floor_to_score(double score) {
    const float below = next_below(static_cast<float>(score));
    raise_floor(next_below(static_cast<float>(static_cast<double>(below) * per_unit_)));
  }

  void raise_floor(float floor) {
    if (floor > floor_) floor_ = floor;
  }

  void drop_candidates() {
    std::erase_if(candidates_, [this](const Candidate& candidate) { return candidate.upper < floor_; });
  }

  // Replaces all candidates by the k best so far.
  void settle(const ExactScores& exact) {
    for (const Candidate& candidate : candidates_) exact.prefetch(candidate.row);
    for (const Candidate& candidate : candidates_) best_.push_back({exact(feature_, candidate.row), candidate.row});
    candidates_.clear();
    const size_t kept = std::min(k_, best_.size());
    std::partial_sort(best_.begin(), best_.begin() + static_cast<ptrdiff_t>(kept), best_.end(), better);
    best_.resize(kept);
    if (kept == k_) raise_floor_to_score(static_cast<double>(best_.back().score));
  }

  struct Candidate {
    float upper;
    int32_t row;
  };

  const float* feature_;
  double unit_, per_unit_;  // powers of two: scores are products of scaled features times the first
  size_t k_;
  size_t full_;
  float floor_ = kLowest;
  std::vector<float> lowers_;  // the k best, a heap
  std::vector<Candidate> candidates_;
  std::vector<Scored> best_;
};

// Buffers and state of one thread.
struct Searcher {
  std::vector<Running> known;  // of each feature
  std::vector<float> floors;
  std::vector<BoundHit> hits;
};

class Search {
 public:
  Search(const SearchedRows& rows, const float* features, int64_t num_features, int64_t k)
      : rows_(rows), exact_(rows), kernels_(row_search_kernels()), quads_(quads_of(rows.dim)) {
    codes_.resize(static_cast<size_t>(num_features * quads_ * 4));
    std::vector<int8_t> plain(static_cast<size_t>(quads_ * 4));
    for (int64_t first = 0, group; first < num_features; first += group) {
      group = group_size(num_features - first, kernels_.largest_group);
      for (int64_t g = 0; g < group; ++g) {
        const float* feature = features + (first + g) * rows.dim;
        bounds_.push_back(encode_feature(feature, rows.dim, rows.largest_offset, plain.data()));
        unknowing_.emplace_back(feature, bounds_.back(), k);
        for (int64_t i = 0; i < quads_ * 4; ++i)
          codes_[static_cast<size_t>(first * quads_ * 4 + (i / 4 * group + g) * 4 + i % 4)] =
              plain[static_cast<size_t>(i)];
      }
    }
  }

  std::vector<Running> run(int64_t threads) {
    std::vector<Searcher> searchers(static_cast<size_t>(threads));
    const int64_t panels = panels_of(rows_.count);
    const size_t bytes = static_cast<size_t>(panels * panel_bytes(rows_.dim)) * (1 + unknowing_.size() / 16);
    fan_out(panels, bytes, threads, [&](int64_t begin, int64_t end, int64_t thread) {
      DefaultFloatMode float_mode;
      Searcher& searcher = searchers[static_cast<size_t>(thread)];
      if (searcher.known.empty()) {
        searcher.known = unknowing_;
        searcher.floors.assign(unknowing_.size(), kLowest);
        searcher.hits.resize(unknowing_.size() * kPanelRows);
      }
      for (int64_t panel = begin; panel < end; ++panel) visit(panel, searcher);
    });
    std::vector<Running>& together = unknowing_;
    for (const Searcher& searcher : searchers)
      for (size_t i = 0; i < searcher.known.size(); ++i) together[i].join(searcher.known[i]);
    return std::move(together);
  }

  const ExactScores& exact() const { return exact_; }

 private:
  void visit(int64_t panel, Searcher& searcher) const {
    const int64_t first = panel * kPanelRows, num_features = static_cast<int64_t>(searcher.known.size());
    const float* offsets = rows_.offsets == nullptr ? nullptr : rows_.offsets + first;
    const int64_t left = rows_.count - first;
    const uint32_t there = left >= kPanelRows ? (1u << kPanelRows) - 1 : (1u << left) - 1;
    float last[kPanelRows] = {};
    if (offsets != nullptr && left < kPanelRows) {
      std::copy(offsets, rows_.offsets + rows_.count, last);
      offsets = last;
    }
    const int64_t count =
        kernels_.panel_hits(rows_.panels + panel * panel_bytes(rows_.dim), quads_, there, offsets, codes_.data(),
                            bounds_.data(), searcher.floors.data(), num_features, searcher.hits.data());
    for (int64_t i = 0; i < count; ++i) {
      const BoundHit& hit = searcher.hits[static_cast<size_t>(i)];
      Running& running = searcher.known[static_cast<size_t>(hit.feature)];
      running.offer(hit, static_cast<int32_t>(first + hit.row), exact_);
      searcher.floors[static_cast<size_t>(hit.feature)] = running.floor();
    }
  }

  const SearchedRows& rows_;
  const ExactScores exact_;
  const RowSearchKernels& kernels_;
  const int64_t quads_;
  std::vector<int8_t> codes_;
  std::vector<FeatureBounds> bounds_;
  std::vector<Running> unknowing_;
};

}  // namespace

void search_rows(const SearchedRows& rows, const float* features, int64_t num_features, int64_t k, float* scores,
                 int64_t* found, int64_t threads) {
  if (k == 0) return;
  for (int64_t first = 0; first < num_features; first += kFeaturesAtOnce) {
    const int64_t some = std::min(kFeaturesAtOnce, num_features - first);
    Search search(rows, features + first * rows.dim, some, k);
    std::vector<Running> known = search.run(threads);
    size_t candidates = 0;
    for (const Running& running : known) candidates += running.num_candidates();
    fan_out(some, candidates * static_cast<size_t>(rows.dim) * sizeof(float), threads,
            [&](int64_t begin, int64_t end, int64_t) {
              DefaultFloatMode float_mode;
              for (int64_t i = begin; i < end; ++i) {
                const std::vector<Scored>& best = known[static_cast<size_t>(i)].finish(search.exact());
                for (size_t j = 0; j < best.size(); ++j) {
                  scores[(first + i) * k + static_cast<int64_t>(j)] = best[j].score;
                  found[(first + i) * k + static_cast<int64_t>(j)] = best[j].row;
                }
              }
            });
  }
}

}  // namespace geartrain
