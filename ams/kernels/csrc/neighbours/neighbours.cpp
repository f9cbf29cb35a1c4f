#include "neighbours/neighbours.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

#include "base/common.hpp"
#include "base/keyed_hash.hpp"
#include "sampling/sampling.hpp"

namespace geartrain {
namespace {

constexpr int64_t kWordBits = 64;
constexpr int64_t kSampled = 4096;

// Set of chosen classes, a bit for each class: used if there are at most 64 classes for each chosen one.
class BitSet {
 public:
  explicit BitSet(int64_t num_classes) : words_(static_cast<size_t>((num_classes + kWordBits - 1) / kWordBits), 0) {}

  bool insert(int64_t id) {
    uint64_t& word = words_[static_cast<size_t>(id / kWordBits)];
    const uint64_t bit = uint64_t{1} << (id % kWordBits);
    if ((word & bit) != 0) return false;
    word |= bit;
    return true;
  }

  void write_rising(int64_t* out) const {
    for (size_t i = 0; i < words_.size(); ++i)
      for (uint64_t word = words_[i]; word != 0; word &= word - 1)
        *out++ = static_cast<int64_t>(i) * kWordBits + std::countr_zero(word);
  }

 private:
  std::vector<uint64_t> words_;
};

// Set of chosen classes of a huge table: open addressing, at most half full.
class HashSet {
 public:
  explicit HashSet(int64_t most)
      : bits_(static_cast<int>(std::bit_width(static_cast<uint64_t>(most)) + 1)), slots_(size_t{1} << bits_, -1) {
    chosen_.reserve(static_cast<size_t>(most));
  }

  bool insert(int64_t id) {
    const uint64_t mask = (uint64_t{1} << bits_) - 1;
    uint64_t at = keyed_hash(id) >> (64 - bits_);
    while (slots_[at] >= 0 && slots_[at] != id) at = (at + 1) & mask;
    if (slots_[at] == id) return false;
    slots_[at] = id;
    chosen_.push_back(id);
    return true;
  }

  void write_rising(int64_t* out) {
    std::sort(chosen_.begin(), chosen_.end());
    std::copy(chosen_.begin(), chosen_.end(), out);
  }

 private:
  int bits_;
  std::vector<int64_t> slots_;
  std::vector<int64_t> chosen_;
};

// Adds rank 0 of every label, rank 1 of every label, ... until `budget` are chosen. Returns their number, or -1.
template <class Id, class Set>
int64_t add_by_rank(const NeighbourLists<Id>& table, const std::vector<int64_t>& labels, int64_t chosen, int64_t budget,
                    Set& set) {
  std::vector<int64_t> open(labels);  // labels whose lists reach this rank
  for (int64_t rank = 0; chosen < budget && !open.empty(); ++rank) {
    size_t still = 0;
    for (size_t i = 0; i < open.size() && chosen < budget; ++i) {
      const int64_t label = open[i], at = table.offsets[label] + rank;
      if (at >= table.offsets[label + 1]) continue;
      if (at < 0 || at >= table.num_ids) return -1;
      const int64_t id = static_cast<int64_t>(table.ids[at]);
      if (id < 0 || id >= table.num_classes) return -1;
      chosen += set.insert(id);
      open[still++] = label;
    }
    open.resize(still);
  }
  return chosen;
}

template <class Set>
void fill_by_sampling(int64_t num_classes, int64_t chosen, int64_t budget, uint64_t seed, uint64_t step, Set& set) {
  std::vector<int64_t> sampled(static_cast<size_t>(std::min(kSampled, num_classes)));
  for (int64_t first = 0; chosen < budget;) {
    const int64_t count = std::min<int64_t>(static_cast<int64_t>(sampled.size()), num_classes - first);
    sample_permutation(num_classes, first, count, seed, step, sampled.data());
    for (int64_t i = 0; i < count && chosen < budget; ++i) chosen += set.insert(sampled[static_cast<size_t>(i)]);
    first += count;
  }
}

template <class Id, class Set>
Selected choose(const NeighbourLists<Id>& table, const std::vector<int64_t>& labels, int64_t budget, uint64_t seed,
                uint64_t step, Set set, int64_t* out) {
  for (const int64_t label : labels) set.insert(label);
  const int64_t chosen = add_by_rank(table, labels, static_cast<int64_t>(labels.size()), budget, set);
  if (chosen < 0) return {0, SelectFault::table};
  fill_by_sampling(table.num_classes, chosen, budget, seed, step, set);
  set.write_rising(out);
  return {budget, SelectFault::none};
}

}  // namespace

template <class Id>
Selected select_neighbours(const NeighbourLists<Id>& table, const int64_t* labels, int64_t num_labels, int64_t budget,
                           uint64_t seed, uint64_t step, int64_t* out) {
  for (int64_t i = 0; i < num_labels; ++i)
    if (labels[i] < 0 || labels[i] >= table.num_classes) return {i, SelectFault::label};
  if (budget >= table.num_classes) {
    std::iota(out, out + table.num_classes, int64_t{0});
    return {table.num_classes, SelectFault::none};
  }
  std::vector<int64_t> distinct(labels, labels + num_labels);
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  budget = std::max(budget, static_cast<int64_t>(distinct.size()));
  if (table.num_classes / kWordBits <= budget)
    return choose(table, distinct, budget, seed, step, BitSet(table.num_classes), out);
  return choose(table, distinct, budget, seed, step, HashSet(budget), out);
}

template Selected select_neighbours(const NeighbourLists<int32_t>&, const int64_t*, int64_t, int64_t, uint64_t,
                                    uint64_t, int64_t*);
template Selected select_neighbours(const NeighbourLists<int64_t>&, const int64_t*, int64_t, int64_t, uint64_t,
                                    uint64_t, int64_t*);

}  // namespace geartrain
