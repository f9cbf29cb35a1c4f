// Which ids without a row get one at a push. Decided from what pushes carried alone, so that a replay decides the same.
//
// Every occurrence of an id admits it with a chance, or an id is admitted once it has occurred so often: then a counting Bloom filter
// for each range of buckets (Fan et al., "Summary Cache", 1998) counts those that have no row. A range is an object of its own, so that
// it goes where its buckets go.
//
// A filter is an array of blocks of 64 bytes. An id belongs to one block (Putze et al., "Cache-, Hash- and Space-Efficient Bloom
// Filters", 2007: one cache line is read) and has `num_hashes` counters in it; the lowest of them is its count, too high where others
// share all of them, never too low. Counters end at the number that is looked for, and only those below the new count are raised
// (Estan and Varghese, "New Directions in Traffic Measurement and Accounting", 2002).
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

// The filters of some ranges of buckets, one after the other.
class FilterSlab {
 public:
  // Zero, or a copy. Counted as memory of rows. Throws std::bad_alloc.
  FilterSlab(int64_t num_ranges, size_t range_bytes);
  FilterSlab(const FilterSlab& other);
  FilterSlab& operator=(const FilterSlab&) = delete;

  char* bytes() const { return pages_.data(); }

  // Of each range the ids that were counted and not admitted, about: those that share their counters are one.
  std::vector<int64_t> num_waiting;

 private:
  const size_t num_bytes_;
  Pages pages_;
};

// Used by one thread at a time; what was frozen is read by others.
class Admission {
 public:
  explicit Admission(const AdmissionSpec& spec);

  bool admits_all() const { return spec_.kind == AdmissionSpec::Kind::all; }

  // Ids without a row, each with how often it occurs, and which of them get one.
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
  // Distinct ids. They are decided by what was counted before, each for itself. Takes the memory that `count` will use. Throws
  // std::bad_alloc; nothing has changed then.
  Decision decide(std::span<const int64_t> ids, std::span<const uint32_t> occurrences);
  // Counts them, once: the push is applied.
  void count(const Decision& decision) noexcept;

  // What pushes brought and was dropped, since this was made: gradients of an id and push, and occurrences in them.
  int64_t refused_gradients() const { return refused_gradients_; }
  int64_t refused_occurrences() const { return refused_occurrences_; }
  // Ids that are counted and have no row, about.
  int64_t num_waiting() const;
  int64_t memory_bytes() const;

  // What it decides by, at one moment. Slabs are shared with the filter, which copies one before it changes it.
  struct State {
    int64_t num_pushes = 0;
    std::vector<std::shared_ptr<const FilterSlab>> slabs;  // null: nothing was counted there
  };
  State state() const;
  // Takes up what a filter of the same spec was. A range that is here already becomes the higher count of each: so two shards that had
  // parts of its buckets count none of their ids less than they did. Throws std::bad_alloc.
  void restore(int64_t num_pushes, int64_t range, const char* bytes, int64_t num_waiting);
  static constexpr size_t kBlockBytes = 64;
  size_t range_bytes() const { return static_cast<size_t>(spec_.range_blocks) * kBlockBytes; }
  // So many ranges lie in a slab.
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
