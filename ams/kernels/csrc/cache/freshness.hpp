// Freshness of cached entries: which may still be used, and their age; the inner loop of a cache of dense features.
#pragma once

#include <cstdint>

namespace geartrain {

struct Stamps {
  const int64_t* versions;
  const double* times;
};

// An entry is a hit if |now - time| < expire_seconds and |dense_version - version| <= max_lag.
struct Freshness {
  double now;
  int64_t dense_version;
  double expire_seconds;
  uint64_t max_lag;
};

// Ages of hits are counted between ascending edges (age_counts has one more), lags by their number of bits; the last
// bin counts all larger ones.
struct AgeCounts {
  const double* edges;
  int64_t num_edges;
  int64_t* ages;
  int64_t* lags;
  int64_t num_lags;
};

struct FreshnessCheck {
  int64_t hits = 0;
  int64_t absent = 0;  // misses without an entry: time is -inf
  int64_t lagging = 0;  // misses that are young enough, but too many versions away
};

// Checks entry positions[i] of `stamps` (`count` of them; null: entry i); writes its stamps and whether it is a hit.
FreshnessCheck judge(const int64_t* positions, int64_t count, const Stamps& stamps, const Freshness& freshness,
                     int64_t* versions, double* times, bool* hits, const AgeCounts& counts);

}  // namespace geartrain
