#include "admission/admission.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <new>

#include "machine/memory_budget.hpp"

namespace geartrain {
namespace {

constexpr int64_t kAhead = 16;  // ids whose blocks are asked for before they are looked at

// In [0, 1).
double uniform(uint64_t word) { return static_cast<double>(word >> 11) * 0x1.0p-53; }

}  // namespace

FilterRange::FilterRange(int64_t num_blocks) : num_bytes_(static_cast<size_t>(num_blocks) * kBlockBytes) {
  charge_memory(static_cast<int64_t>(num_bytes_));
  try {
    words_.reset(static_cast<uint64_t*>(::operator new[](num_bytes_, std::align_val_t(kBlockBytes))));
  } catch (...) {
    release_memory(static_cast<int64_t>(num_bytes_));
    throw;
  }
  std::memset(words_.get(), 0, num_bytes_);
}

FilterRange::FilterRange(const FilterRange& other) : FilterRange(static_cast<int64_t>(other.num_bytes_ / kBlockBytes)) {
  std::memcpy(words_.get(), other.words_.get(), num_bytes_);
  num_waiting = other.num_waiting;
}

FilterRange::~FilterRange() { release_memory(static_cast<int64_t>(num_bytes_)); }

Admission::Admission(const AdmissionSpec& spec) : spec_(spec) {
  if (spec.kind != AdmissionSpec::Kind::min_count) return;
  ranges_.resize(static_cast<size_t>(spec.num_ranges));
  // Ranges of buckets in the order of their bits, reversed: as they are dealt out to shards.
  const int shift = kBucketBits - std::countr_zero(static_cast<uint64_t>(spec.num_ranges));
  for (size_t bucket = 0; bucket < range_of_bucket_.size(); ++bucket) {
    size_t place = 0;
    for (int bit = 0; bit < kBucketBits; ++bit) place |= (bucket >> bit & 1) << (kBucketBits - 1 - bit);
    range_of_bucket_[bucket] = static_cast<uint16_t>(place >> shift);
  }
}

int64_t Admission::range_of(int64_t id) const {
  return range_of_bucket_[static_cast<size_t>(spec_.is_dense ? dense_bucket(id) : hashed_bucket(id))];
}

// The range, if need be made, or copied because somebody reads it.
FilterRange& Admission::writable(int64_t range) {
  std::shared_ptr<FilterRange>& own = ranges_[static_cast<size_t>(range)];
  if (own == nullptr) own = std::make_shared<FilterRange>(spec_.range_blocks);
  else if (own.use_count() > 1) own = std::make_shared<FilterRange>(*own);
  return *own;
}

template <class Visit>
void Admission::each_place(uint64_t places, const Visit& visit) const {
  const uint32_t mask = static_cast<uint32_t>(FilterRange::kBlockBytes * 8) / static_cast<uint32_t>(spec_.counter_bits) - 1;
  for (int i = 0; i < spec_.num_hashes; ++i) {
    if (i == 8) places = splitmix64(places);
    visit(static_cast<uint32_t>(places >> (8 * (i & 7))) & mask);
  }
}

uint32_t Admission::counter(const uint64_t* block, uint32_t place) const {
  const uint32_t bit = place * static_cast<uint32_t>(spec_.counter_bits);
  return static_cast<uint32_t>(block[bit / 64] >> (bit % 64)) & ((1u << spec_.counter_bits) - 1);
}

void Admission::set_counter(uint64_t* block, uint32_t place, uint32_t value) const {
  const uint32_t bit = place * static_cast<uint32_t>(spec_.counter_bits);
  const uint64_t mask = ((uint64_t{1} << spec_.counter_bits) - 1) << (bit % 64);
  block[bit / 64] = (block[bit / 64] & ~mask) | uint64_t{value} << (bit % 64);
}

uint32_t Admission::lowest(const uint64_t* block, uint64_t places) const {
  uint32_t lowest = spec_.min_count;
  each_place(places, [&](uint32_t place) { lowest = std::min(lowest, counter(block, place)); });
  return lowest;
}

Admission::Decision Admission::decide(std::span<const int64_t> ids, std::span<const uint32_t> occurrences) {
  Decision decision;
  decision.candidates_.resize(ids.size());
  auto& candidates = decision.candidates_;
  if (spec_.kind == AdmissionSpec::Kind::probability) {
    const uint64_t key = splitmix64(spec_.key + static_cast<uint64_t>(num_pushes_));
    for (size_t i = 0; i < ids.size(); ++i) {
      const double all_refuse = std::pow(1 - spec_.probability, static_cast<double>(occurrences[i]));
      const bool admits = uniform(splitmix64(splitmix64(key ^ static_cast<uint64_t>(ids[i])))) >= all_refuse;
      candidates[i] = {nullptr, nullptr, 0, occurrences[i], admits};
    }
    return decision;
  }
  const auto blocks = static_cast<uint64_t>(spec_.range_blocks);
  for (size_t i = 0; i < ids.size(); ++i) {
    // Not those bits of an id's hash that its bucket and its place in the index are made of.
    const uint64_t hash = splitmix64(splitmix64(static_cast<uint64_t>(ids[i]) ^ spec_.key));
    FilterRange& range = writable(range_of(ids[i]));
    uint64_t* block = range.block(static_cast<int64_t>((hash >> 32) * blocks >> 32));
    candidates[i] = {&range, block, splitmix64(hash), occurrences[i], false};
    if (i >= kAhead) {
      auto& due = candidates[i - kAhead];
      due.is_admitted = lowest(due.block, due.places) + uint64_t{due.occurrences} >= spec_.min_count;
    }
    prefetch_bytes(block, FilterRange::kBlockBytes);
  }
  for (size_t i = ids.size() > kAhead ? ids.size() - kAhead : 0; i < ids.size(); ++i)
    candidates[i].is_admitted = lowest(candidates[i].block, candidates[i].places) + uint64_t{candidates[i].occurrences} >= spec_.min_count;
  return decision;
}

void Admission::count(const Decision& decision) noexcept {
  if (decision.size() != 0) ++num_pushes_;
  for (const auto& one : decision.candidates_) {
    if (!one.is_admitted) {
      ++refused_gradients_;
      refused_occurrences_ += one.occurrences;
    }
    if (one.range == nullptr) continue;
    const uint32_t before = lowest(one.block, one.places);
    const auto after = static_cast<uint32_t>(std::min<uint64_t>(before + uint64_t{one.occurrences}, spec_.min_count));
    each_place(one.places, [&](uint32_t place) {
      if (counter(one.block, place) < after) set_counter(one.block, place, after);
    });
    if (!one.is_admitted) one.range->num_waiting += before == 0 && after != 0;
    else if (before != 0 && one.range->num_waiting > 0) --one.range->num_waiting;
  }
}

int64_t Admission::num_waiting() const {
  int64_t sum = 0;
  for (const auto& range : ranges_) sum += range == nullptr ? 0 : range->num_waiting;
  return sum;
}

int64_t Admission::memory_bytes() const {
  const auto count = std::ranges::count_if(ranges_, [](const auto& range) { return range != nullptr; });
  return static_cast<int64_t>(count) * static_cast<int64_t>(range_bytes());
}

Admission::State Admission::state() const {
  State state{num_pushes_, {}};
  for (size_t i = 0; i < ranges_.size(); ++i)
    if (ranges_[i] != nullptr) state.ranges.emplace_back(static_cast<int64_t>(i), ranges_[i]);
  return state;
}

void Admission::restore(int64_t num_pushes, int64_t number, const char* bytes, int64_t num_waiting) {
  num_pushes_ = std::max(num_pushes_, num_pushes);
  if (number < 0) return;
  FilterRange& range = writable(number);
  range.num_waiting = std::max(range.num_waiting, num_waiting);
  const uint32_t places = static_cast<uint32_t>(FilterRange::kBlockBytes * 8) / static_cast<uint32_t>(spec_.counter_bits);
  uint64_t theirs[FilterRange::kBlockBytes / sizeof(uint64_t)];
  for (int64_t number_of_block = 0; number_of_block < spec_.range_blocks; ++number_of_block) {
    std::memcpy(theirs, bytes + static_cast<size_t>(number_of_block) * FilterRange::kBlockBytes, sizeof(theirs));
    uint64_t* block = range.block(number_of_block);
    for (uint32_t place = 0; place < places; ++place)
      if (const uint32_t value = std::min(counter(theirs, place), spec_.min_count); counter(block, place) < value) set_counter(block, place, value);
  }
}

}  // namespace geartrain
