#include "gradients/top_k.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "machine/fan_out.hpp"
#include "values/kernels.hpp"

namespace geartrain {
namespace {

// Elements of a block, whose gradient is widened in first-level cache; and of a piece, which one thread sweeps.
constexpr int64_t kBlock = 2048;
constexpr int64_t kPiece = int64_t{1} << 18;
// Survivors of a piece beyond twice k before the limit rises: rare, and then cheap for each of them.
constexpr int64_t kSpareSurvivors = 4096;
constexpr int32_t kNoLimit = -1, kNothing = INT32_MAX;
// Factor for the next estimate if one left fewer survivors than wanted.
constexpr float kLowered = 0.9f;
// Elements from which the first estimate is made; tensors that are not much larger need none.
constexpr int64_t kSample = 1024;

// Part of a tensor.
struct Piece {
  int64_t tensor, begin, count;
  Survivor* survivors;  // room for `room`
  int64_t room;
  int64_t num_survivors = 0;
};

// Cuts tensors into pieces, the largest tensors first, those of one tensor next to each other.
std::vector<Piece> cut(std::span<const SweptTensor> tensors) {
  std::vector<int64_t> order(tensors.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return tensors[static_cast<size_t>(a)].numel > tensors[static_cast<size_t>(b)].numel;
  });
  std::vector<Piece> pieces;
  for (int64_t number : order) {
    const SweptTensor& tensor = tensors[static_cast<size_t>(number)];
    for (int64_t begin = 0; begin < tensor.numel; begin += kPiece) {
      const int64_t count = std::min(kPiece, tensor.numel - begin);
      const int64_t most = tensor.k + std::max(tensor.k, kSpareSurvivors) + kBlock;
      pieces.push_back(
          {.tensor = number, .begin = begin, .count = count, .survivors = nullptr, .room = std::min(count, most)});
    }
  }
  return pieces;
}

int64_t threads_for(std::span<const SweptTensor> tensors, int64_t threads) {
  size_t bytes = 0;
  for (const SweptTensor& tensor : tensors) bytes += static_cast<size_t>(tensor.numel) * sizeof(float);
  return std::clamp<int64_t>(static_cast<int64_t>(bytes / kFanOutBytes), 1, std::max<int64_t>(threads, 1));
}

// Returns a block's gradient as float32; in `room` if it has to be widened.
const float* gradient_block(const SweptTensor& tensor, int64_t begin, int64_t count, float* room) {
  const char* at =
      static_cast<const char*>(tensor.gradient) + static_cast<size_t>(begin) * item_bytes(tensor.gradient_dtype);
  if (tensor.gradient_dtype == DType::float32) return reinterpret_cast<const float*>(at);
  kernels().load[static_cast<int>(tensor.gradient_dtype)](room, at, static_cast<size_t>(count));
  return room;
}

// Calls work(begin, count) for the blocks of a piece.
template <class Work>
void for_blocks(const Piece& piece, const Work& work) {
  for (int64_t done = 0; done < piece.count; done += kBlock)
    work(piece.begin + done, std::min(kBlock, piece.count - done));
}

// Replaces an estimate that is not finite by 0, which lets all elements survive.
float usable(float estimate) { return std::isfinite(estimate) ? estimate : 0.0f; }

// Number of wanted survivors. A limit that is too high costs another sweep of the tensor, one too low some survivors.
int64_t wanted(int64_t k) { return k + std::max(k / 4, std::min<int64_t>(k, 4096)) + 64; }

// Keeps the k largest of `count` survivors in order of index; of equal ones the first. Returns the least magnitude
// kept. count >= k >= 1; scratch has room for `count`.
int32_t keep_largest(Survivor* survivors, int64_t count, int64_t k, int32_t* scratch) {
  for (int64_t i = 0; i < count; ++i) scratch[i] = magnitude_of(survivors[i]);
  std::nth_element(scratch, scratch + (k - 1), scratch + count, std::greater<>());
  const int32_t least = scratch[k - 1];
  int64_t level = k - std::count_if(scratch, scratch + k, [least](int32_t magnitude) { return magnitude > least; });
  Survivor* next = survivors;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = magnitude_of(survivors[i]);
    if (magnitude < least || (magnitude == least && level-- <= 0)) continue;
    *next++ = survivors[i];
  }
  return least;
}

// Returns about the k-th magnitude, rather too low.
float sampled_estimate(const SweptTensor& tensor, const Accumulation& step) {
  const DefaultFloatMode mode;
  int32_t sample[kSample];
  for (int64_t i = 0; i < kSample; ++i) {
    const int64_t at = tensor.numel * i / kSample;
    float room;
    sample[i] = tensor.gradient == nullptr ? std::bit_cast<int32_t>(tensor.values[at]) & INT32_MAX
                                           : sweep_kernels().largest(gradient_block(tensor, at, 1, &room),
                                                                     tensor.velocity + at, tensor.values + at, 1, step);
  }
  const int64_t rank = std::min(kSample - 1, 4 + kSample * tensor.k / tensor.numel * 5 / 4);
  std::nth_element(sample, sample + rank, sample + kSample, std::greater<>());
  return std::bit_cast<float>(sample[rank]);
}

// Collects survivors of elements in order of index.
class Collected {
 public:
  Collected(Survivor* survivors, int64_t room, int64_t k, int32_t limit, int32_t* scratch)
      : survivors_(survivors), room_(room), k_(k), limit_(limit), scratch_(scratch) {}

  // Returns room for a block; if there is none, keeps only the k largest. Later elements of equal magnitude rank lower.
  Survivor* next(int64_t block) {
    if (count_ + block > room_) {
      limit_ = keep_largest(survivors_, count_, k_, scratch_);
      count_ = k_;
    }
    return survivors_ + count_;
  }
  void add(size_t count) { count_ += static_cast<int64_t>(count); }
  int32_t limit() const { return limit_; }
  int64_t count() const { return count_; }

 private:
  Survivor* const survivors_;
  const int64_t room_, k_;
  int64_t count_ = 0;
  int32_t limit_;
  int32_t* const scratch_;
};

class LargestOfTensors {
 public:
  LargestOfTensors(std::span<const SweptTensor> tensors, const Accumulation& step, float* estimates, int64_t threads)
      : tensors_(tensors),
        step_(step),
        estimates_(estimates),
        threads_(threads_for(tensors, threads)),
        pieces_(cut(tensors)),
        firsts_(tensors.size(), 0),
        num_pieces_(tensors.size(), 0),
        rooms_(tensors.size(), 0),
        starts_(tensors.size(), 0),
        missing_(tensors.size()) {
    int64_t room = 0;
    for (size_t at = 0; at < pieces_.size(); ++at) {
      const auto number = static_cast<size_t>(pieces_[at].tensor);
      if (num_pieces_[number]++ == 0) firsts_[number] = at;
      rooms_[number] += pieces_[at].room;
      room += pieces_[at].room;
      ++missing_[number];
    }
    arena_ = std::make_unique_for_overwrite<Survivor[]>(static_cast<size_t>(room));
    Survivor* next = arena_.get();
    for (Piece& piece : pieces_) {
      piece.survivors = next;
      next += piece.room;
    }
    int64_t start = 0;
    for (size_t number = 0; number < tensors.size(); ++number) {
      starts_[number] = start;
      start += tensors[number].k;
      scratch_room_ = std::max(scratch_room_, rooms_[number]);
    }
    scratch_ = std::make_unique_for_overwrite<int32_t[]>(static_cast<size_t>(scratch_room_ * threads_));
    for (size_t number = 0; number < tensors.size(); ++number)
      if (!(estimates_[number] > 0.0f) && tensors[number].numel > 4 * kSample)
        estimates_[number] = sampled_estimate(tensors[number], step);
  }

  void take(int32_t* indices, float* values) {
    deal_out(static_cast<int64_t>(pieces_.size()), threads_, [&](int64_t at, int64_t thread) {
      const DefaultFloatMode mode;
      Piece& piece = pieces_[static_cast<size_t>(at)];
      int32_t* scratch = scratch_.get() + scratch_room_ * thread;
      sweep(piece, scratch);
      const auto number = static_cast<size_t>(piece.tensor);
      if (--missing_[number] == 0) finish(number, indices + starts_[number], values + starts_[number], scratch);
    });
  }

 private:
    int32_t limit_of(size_t number) const {
    if (tensors_[number].k == 0) return kNothing;
    const float estimate = estimates_[number];
    return estimate > 0.0f ? std::bit_cast<int32_t>(estimate) - 1 : kNoLimit;
  }

  void sweep(Piece& piece, int32_t* scratch) {
    const SweptTensor& tensor = tensors_[static_cast<size_t>(piece.tensor)];
    Collected collected(piece.survivors, piece.room, tensor.k, limit_of(static_cast<size_t>(piece.tensor)), scratch);
    alignas(64) float room[kBlock];
    for_blocks(piece, [&](int64_t begin, int64_t count) {
      Survivor* next = collected.next(count);
      if (tensor.gradient == nullptr) {
        collected.add(
            sweep_kernels().collect(tensor.values + begin, static_cast<size_t>(count), collected.limit(), begin, next));
        return;
      }
      const float* gradient = gradient_block(tensor, begin, count, room);
      collected.add(sweep_kernels().accumulate(gradient, tensor.velocity + begin, tensor.values + begin,
                                               static_cast<size_t>(count), step_, collected.limit(), begin, next));
    });
    piece.num_survivors = collected.count();
  }

  // Called when all pieces of a tensor were swept.
  void finish(size_t number, int32_t* indices, float* values, int32_t* scratch) {
    const SweptTensor& tensor = tensors_[number];
    Survivor* const survivors = pieces_[firsts_[number]].survivors;
    int64_t count = 0;
    for (size_t at = firsts_[number]; at < firsts_[number] + num_pieces_[number]; ++at) {
      std::memmove(survivors + count, pieces_[at].survivors,
                   static_cast<size_t>(pieces_[at].num_survivors) * sizeof(Survivor));
      count += pieces_[at].num_survivors;
    }
    if (count < tensor.k) count = look_again(number, survivors, scratch);
    if (tensor.k == 0) return;
    keep_largest(survivors, count, tensor.k, scratch);
    estimates_[number] = next_estimate(number, scratch, count);
    for (int64_t i = 0; i < tensor.k; ++i) {
      const int32_t index = index_of(survivors[i]);
      indices[i] = index;
      values[i] = tensor.values[index];
      if (tensor.gradient != nullptr && std::isfinite(values[i])) tensor.values[index] = tensor.velocity[index] = 0.0f;
    }
  }

  // `scratch` has the magnitudes of the survivors, the k largest first.
  float next_estimate(size_t number, int32_t* scratch, int64_t count) const {
    const int64_t k = tensors_[number].k, rank = wanted(k);
    if (count <= rank) return usable(estimates_[number] * kLowered);
    std::nth_element(scratch + k, scratch + rank, scratch + count, std::greater<>());
    return usable(std::bit_cast<float>(scratch[rank]));
  }

  // Selects from all values, without an estimate.
  int64_t look_again(size_t number, Survivor* survivors, int32_t* scratch) {
    const SweptTensor& tensor = tensors_[number];
    Collected collected(survivors, rooms_[number], tensor.k, kNoLimit, scratch);
    for (int64_t begin = 0; begin < tensor.numel; begin += kBlock) {
      const int64_t count = std::min(kBlock, tensor.numel - begin);
      Survivor* next = collected.next(count);
      collected.add(
          sweep_kernels().collect(tensor.values + begin, static_cast<size_t>(count), collected.limit(), begin, next));
    }
    return collected.count();
  }

  const std::span<const SweptTensor> tensors_;
  const Accumulation step_;
  float* const estimates_;
  const int64_t threads_;
  std::vector<Piece> pieces_;
  std::vector<size_t> firsts_, num_pieces_;  // of each tensor in pieces_
  std::vector<int64_t> rooms_, starts_;      // of each tensor: in survivors, in the answer
  std::vector<std::atomic<int64_t>> missing_;  // pieces that are not swept yet
  int64_t scratch_room_ = 0;
  std::unique_ptr<Survivor[]> arena_;
  std::unique_ptr<int32_t[]> scratch_;  // of all threads
};

}  // namespace

void take_largest(std::span<const SweptTensor> tensors, const Accumulation& step, float* estimates, int32_t* indices,
                  float* values, int64_t threads) {
  LargestOfTensors(tensors, step, estimates, threads).take(indices, values);
}

}  // namespace geartrain
