// Admission: decides which new ids get a row at a push, from pushes alone, so that a replay decides the same.
//
// Either every occurrence of an id admits it with a probability, or an id is admitted at its n-th occurrence: then a
// counting Bloom filter for each range of buckets (Fan et al., "Summary Cache", 1998) counts ids without a row. A range
// is an object of its own, so that it moves with its buckets.
//
// A filter is an array of blocks of 64 bytes. An id belongs to one block (Putze et al., "Cache-, Hash- and
// Space-Efficient Bloom Filters", 2007: one cache line is read) and has `num_hashes` counters in it; the lowest is its
// count, too high where others share all of them, never too low. Counters end at the threshold, and only those below
// the new count are raised (Estan and Varghese, "New Directions in Traffic Measurement and Accounting", 2002).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/common.hpp"
#include "machine/pages.hpp"

namespace geartrain {

struct AdmissionSpec {
  enum class Kind : int { all = 0, probability = 1, min_count = 2 };
  Kind kind = Kind::all;
  uint64_t key = 0;  // of the hashes: that of the table
  bool is_dense = false;
  double probability = 1;     // that an occurrence admits its id
  uint32_t min_count = 1;     // occurrences that admit it
  int counter_bits = 2;       // 2, 4, 8 or 16; they hold min_count
  int num_hashes = 1;         // 1 to 16
  int64_t num_ranges = 1;     // of the table's buckets: a power of two up to their number
  int64_t range_blocks = 1;   // blocks of the filter of a range
  double owned_share = 1;     // of the table's buckets

  bool operator==(const AdmissionSpec&) const = default;
};

// Filters of some ranges of buckets, one after the other.
class FilterSlab {
 public:
  // Zeroed, or a copy. Counted as memory of rows. Throws std::bad_alloc.
  FilterSlab(int64_t num_ranges, size_t range_bytes);
  FilterSlab(const FilterSlab& other);
  FilterSlab& operator=(const FilterSlab&) = delete;

  char* bytes() const { return pages_.data(); }

  // Approximate number of ids of each range that were counted and not admitted: ids that share their counters are one.
  std::vector<int64_t> num_waiting;

 private:
  const size_t num_bytes_;
  Pages pages_;
};

// Used by one thread at a time; frozen slabs are read by others.
class Admission {
 public:
  explicit Admission(const AdmissionSpec& spec);

  bool admits_all() const { return spec_.kind == AdmissionSpec::Kind::all; }

  // Ids without a row, with their occurrences, and which of them get one.
  class Decision {
   public:
    bool admits(size_t i) const { return candidates_[i].is_admitted; }
    size_t size() const { return candidates_.size(); }

   private:
    friend class Admission;
    struct Candidate {
      uint64_t* block;       // null: nothing is counted
      int64_t* num_waiting;  // of its range
      uint64_t places;       // what the places in the block are made of
      uint32_t occurrences, before;
      bool is_admitted;
    };
    std::vector<Candidate> candidates_;
  };
  // Decides on distinct ids by earlier counts, each for itself. Allocates the memory for `count`. Throws
  // std::bad_alloc; nothing has changed then.
  Decision decide(std::span<const int64_t> ids, std::span<const uint32_t> occurrences);
  // Counts the ids once the push is applied.
  void count(const Decision& decision) noexcept;

  // Dropped gradients of refused ids since construction: one of each id and push, and their occurrences.
  int64_t refused_gradients() const { return refused_gradients_; }
  int64_t refused_occurrences() const { return refused_occurrences_; }
  // Approximate number of counted ids without a row.
  int64_t num_waiting() const;
  int64_t memory_bytes() const;

  // State at one moment. Slabs are shared with the filter, which copies one before it changes it.
  struct State {
    int64_t num_pushes = 0;
    std::vector<std::shared_ptr<const FilterSlab>> slabs;  // null: nothing was counted there
  };
  State state() const;
  // Merges the state of a filter of the same spec. A range that exists already gets the higher of each two counters: so
  // two shards with parts of its buckets count no id less than they did. With range < 0 only the number of pushes is
  // merged. Throws std::bad_alloc.
  void restore(int64_t num_pushes, int64_t range, const char* bytes, int64_t num_waiting);
  static constexpr size_t kBlockBytes = 64;
  size_t range_bytes() const { return static_cast<size_t>(spec_.range_blocks) * kBlockBytes; }
  // Number of ranges in a slab.
  int64_t slab_ranges() const { return slab_ranges_; }
  const AdmissionSpec& spec() const { return spec_; }

 private:
  FilterSlab& writable(int64_t slab);
  template <int bits>
  void find(std::span<const int64_t> ids, Decision& decision);
  template <int bits>
  void raise(const Decision& decision) noexcept;
  // Calls one(std::integral_constant<int, bits>) for the width of the counters.
  template <class One>
  void with_bits(const One& call) const;

  const AdmissionSpec spec_;
  int64_t slab_ranges_ = 1;
  std::array<uint16_t, kNumBuckets> range_of_bucket_{};
  std::vector<std::shared_ptr<FilterSlab>> slabs_;  // null: nothing was counted there
  int64_t num_pushes_ = 0;  // that had ids without a row
  int64_t refused_gradients_ = 0, refused_occurrences_ = 0;
};

}  // namespace geartrain
