#include "cache/freshness.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace geartrain {
namespace {

// |a - b| of any two versions.
uint64_t distance(int64_t a, int64_t b) {
  return a < b ? static_cast<uint64_t>(b) - static_cast<uint64_t>(a)
               : static_cast<uint64_t>(a) - static_cast<uint64_t>(b);
}

}  // namespace

FreshnessCheck judge(const int64_t* positions, int64_t count, const Stamps& stamps, const Freshness& freshness,
                     int64_t* versions, double* times, bool* hits, const AgeCounts& counts) {
  FreshnessCheck judged;
  const double* edges_end = counts.edges + counts.num_edges;
  int64_t bin = 0;
  // bin of the last age: the next is mostly in it, too
  double from = std::numeric_limits<double>::infinity(), to = from;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = positions == nullptr ? i : positions[i];
    const double time = stamps.times[at], age = std::fabs(freshness.now - time);
    const uint64_t lag = distance(freshness.dense_version, stamps.versions[at]);
    const bool young = age < freshness.expire_seconds, near = lag <= freshness.max_lag;
    versions[i] = stamps.versions[at];
    times[i] = time;
    hits[i] = young && near;
    judged.hits += hits[i];
    judged.lagging += young && !near;
    judged.absent += time == -std::numeric_limits<double>::infinity();
    if (!hits[i]) continue;
    if (!(age >= from && age < to)) {
      bin = std::upper_bound(counts.edges, edges_end, age) - counts.edges;
      from = bin == 0 ? -1.0 : counts.edges[bin - 1];
      to = bin == counts.num_edges ? std::numeric_limits<double>::infinity() : counts.edges[bin];
    }
    ++counts.ages[bin];
    ++counts.lags[std::min<int64_t>(std::bit_width(lag), counts.num_lags - 1)];
  }
  return judged;
}

}  // namespace geartrain
