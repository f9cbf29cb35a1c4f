#include "admission/admission.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace geartrain {
namespace {

constexpr size_t kPrefetchDistance = 32;  // ids whose blocks are prefetched before their use
constexpr double kMinSlabs = 4;

// Uniform in [0, 1).
double uniform(uint64_t word) { return static_cast<double>(word >> 11) * 0x1.0p-53; }

// Counters of `bits` bits each in the words of a block.
template <int bits>
struct Counters {
  static constexpr uint32_t kCount = Admission::kBlockBytes * 8 / bits;
  static constexpr uint64_t kMask = (uint64_t{1} << bits) - 1;

  static uint32_t at(const uint64_t* block, uint32_t place) {
    return static_cast<uint32_t>(block[place * bits / 64] >> (place * bits % 64) & kMask);
  }
  static void raise(uint64_t* block, uint32_t place, uint32_t to) {
    if (at(block, place) >= to) return;
    uint64_t& word = block[place * bits / 64];
    word = (word & ~(kMask << (place * bits % 64))) | uint64_t{to} << (place * bits % 64);
  }
  // Calls visit(place) for each place of an id.
  template <class Visit>
  static void each(uint64_t places, int count, const Visit& visit) {
    for (int i = 0; i < count; ++i, places >>= 8) {
      if (i == 8) places = splitmix64(places);
      visit(static_cast<uint32_t>(places) & (kCount - 1));
    }
  }
};

}  // namespace

FilterSlab::FilterSlab(int64_t num_ranges, size_t range_bytes)
    : num_waiting(static_cast<size_t>(num_ranges)),
      num_bytes_(static_cast<size_t>(num_ranges) * range_bytes),
      pages_(num_bytes_) {
  pages_.count_all();
}

FilterSlab::FilterSlab(const FilterSlab& other)
    : num_waiting(other.num_waiting), num_bytes_(other.num_bytes_), pages_(num_bytes_) {
  pages_.count_all();
  std::memcpy(pages_.data(), other.pages_.data(), num_bytes_);
}

Admission::Admission(const AdmissionSpec& spec) : spec_(spec) {
  if (spec.kind != AdmissionSpec::Kind::min_count) return;
  // At least a few slabs: the first and the last slab may contain ranges of other shards, which waste memory.
  const auto of_a_slab = static_cast<int64_t>(static_cast<double>(spec.num_ranges) * spec.owned_share / kMinSlabs);
  const auto fitting = std::max<int64_t>(1, std::min(static_cast<int64_t>(kHugePage / range_bytes()), of_a_slab));
  slab_ranges_ = std::min(spec.num_ranges, static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(fitting))));
  slabs_.resize(static_cast<size_t>(spec.num_ranges / slab_ranges_));
  // The order of ranges is that of the buckets' bit-reversed numbers, which the bucket map uses, too.
  const int shift = kBucketBits - std::countr_zero(static_cast<uint64_t>(spec.num_ranges));
  for (size_t bucket = 0; bucket < range_of_bucket_.size(); ++bucket) {
    size_t place = 0;
    for (int bit = 0; bit < kBucketBits; ++bit) place |= (bucket >> bit & 1) << (kBucketBits - 1 - bit);
    range_of_bucket_[bucket] = static_cast<uint16_t>(place >> shift);
  }
}

template <class One>
void Admission::with_bits(const One& call) const {
  switch (spec_.counter_bits) {
    case 2: return call(std::integral_constant<int, 2>());
    case 4: return call(std::integral_constant<int, 4>());
    case 8: return call(std::integral_constant<int, 8>());
    default: return call(std::integral_constant<int, 16>());
  }
}

// Returns the slab for writing: allocated if need be, and copied if it is being read.
FilterSlab& Admission::writable(int64_t number) {
  std::shared_ptr<FilterSlab>& own = slabs_[static_cast<size_t>(number)];
  if (own == nullptr) own = std::make_shared<FilterSlab>(slab_ranges_, range_bytes());
  else if (own.use_count() > 1) own = std::make_shared<FilterSlab>(*own);
  // use_count() is relaxed: order the last reader's reads before our writes
  else std::atomic_thread_fence(std::memory_order_acquire);
  return *own;
}

Admission::Decision Admission::decide(std::span<const int64_t> ids, std::span<const uint32_t> occurrences) {
  Decision decision;
  decision.candidates_.resize(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) decision.candidates_[i].occurrences = occurrences[i];
  if (spec_.kind == AdmissionSpec::Kind::min_count) {
    with_bits([&](auto bits) { find<bits()>(ids, decision); });
    return decision;
  }
  const uint64_t key = splitmix64(spec_.key + static_cast<uint64_t>(num_pushes_));
  for (size_t i = 0; i < ids.size(); ++i) {
    const double all_refuse = std::pow(1 - spec_.probability, static_cast<double>(occurrences[i]));
    auto& candidate = decision.candidates_[i];
    candidate.block = nullptr;
    candidate.is_admitted = uniform(splitmix64(splitmix64(key ^ static_cast<uint64_t>(ids[i])))) >= all_refuse;
  }
  return decision;
}

// Finds the counters of each id, and its count before the push.
template <int bits>
void Admission::find(std::span<const int64_t> ids, Decision& decision) {
  const auto range_blocks = static_cast<uint64_t>(spec_.range_blocks);
  const int slab_shift = std::countr_zero(static_cast<uint64_t>(slab_ranges_));
  const auto look = [&](Decision::Candidate& candidate) {
    uint32_t before = spec_.min_count;
    Counters<bits>::each(candidate.places, spec_.num_hashes, [&](uint32_t place) {
      before = std::min(before, Counters<bits>::at(candidate.block, place));
    });
    candidate.before = before;
    candidate.is_admitted = uint64_t{before} + candidate.occurrences >= spec_.min_count;
  };
  auto& candidates = decision.candidates_;
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t bucket = spec_.is_dense ? dense_bucket(ids[i]) : hashed_bucket(ids[i]);
    const int64_t range = range_of_bucket_[static_cast<size_t>(bucket)], in_slab = range & (slab_ranges_ - 1);
    FilterSlab& slab = writable(range >> slab_shift);
    // A second hash, independent of the one that determines the id's bucket and its place in the index.
    const uint64_t hash = splitmix64(splitmix64(static_cast<uint64_t>(ids[i]) ^ spec_.key));
    const uint64_t block = static_cast<uint64_t>(in_slab) * range_blocks + ((hash >> 32) * range_blocks >> 32);
    auto& candidate = candidates[i];
    candidate.block = reinterpret_cast<uint64_t*>(slab.bytes() + block * kBlockBytes);
    candidate.num_waiting = &slab.num_waiting[static_cast<size_t>(in_slab)];
    candidate.places = splitmix64(hash);
    prefetch_bytes(candidate.block, kBlockBytes);
    if (i >= kPrefetchDistance) look(candidates[i - kPrefetchDistance]);
  }
  for (size_t i = ids.size() > kPrefetchDistance ? ids.size() - kPrefetchDistance : 0; i < ids.size(); ++i)
    look(candidates[i]);
}

void Admission::count(const Decision& decision) noexcept {
  if (decision.size() != 0) ++num_pushes_;
  for (const auto& candidate : decision.candidates_) {
    refused_gradients_ += !candidate.is_admitted;
    refused_occurrences_ += candidate.is_admitted ? 0 : candidate.occurrences;
  }
  if (spec_.kind == AdmissionSpec::Kind::min_count) with_bits([&](auto bits) { raise<bits()>(decision); });
}

// Sets each id's count to its count before the push plus its occurrences. Shared counters never make it lower.
template <int bits>
void Admission::raise(const Decision& decision) noexcept {
  for (const auto& candidate : decision.candidates_) {
    const auto after =
        static_cast<uint32_t>(std::min<uint64_t>(uint64_t{candidate.before} + candidate.occurrences, spec_.min_count));
    Counters<bits>::each(candidate.places, spec_.num_hashes,
                         [&](uint32_t place) { Counters<bits>::raise(candidate.block, place, after); });
    if (!candidate.is_admitted) *candidate.num_waiting += candidate.before == 0 && after != 0;
    else if (candidate.before != 0 && *candidate.num_waiting > 0) --*candidate.num_waiting;
  }
}

int64_t Admission::num_waiting() const {
  int64_t sum = 0;
  for (const auto& slab : slabs_)
    for (size_t i = 0; slab != nullptr && i < slab->num_waiting.size(); ++i) sum += slab->num_waiting[i];
  return sum;
}

int64_t Admission::memory_bytes() const {
  const auto count = std::ranges::count_if(slabs_, [](const auto& slab) { return slab != nullptr; });
  return static_cast<int64_t>(count) * slab_ranges_ * static_cast<int64_t>(range_bytes());
}

Admission::State Admission::state() const { return {num_pushes_, {slabs_.begin(), slabs_.end()}}; }

void Admission::restore(int64_t num_pushes, int64_t range, const char* bytes, int64_t num_waiting) {
  num_pushes_ = std::max(num_pushes_, num_pushes);
  if (range < 0) return;
  FilterSlab& slab = writable(range / slab_ranges_);
  const auto in_slab = static_cast<size_t>(range % slab_ranges_);
  slab.num_waiting[in_slab] = std::max(slab.num_waiting[in_slab], num_waiting);
  with_bits([&](auto bits) {
    using Own = Counters<bits()>;
    uint64_t theirs[kBlockBytes / sizeof(uint64_t)];
    for (size_t at = 0; at < range_bytes(); at += kBlockBytes) {
      std::memcpy(theirs, bytes + at, kBlockBytes);
      auto* block = reinterpret_cast<uint64_t*>(slab.bytes() + in_slab * range_bytes() + at);
      for (uint32_t place = 0; place < Own::kCount; ++place)
        Own::raise(block, place, std::min(Own::at(theirs, place), spec_.min_count));
    }
  });
}

}  // namespace geartrain
