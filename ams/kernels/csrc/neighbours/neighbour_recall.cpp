#include "neighbours/neighbour_recall.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "machine/fan_out.hpp"
#include "machine/isa.hpp"
#include "neighbours/neighbour_kernels.hpp"

namespace geartrain {

extern const NeighbourKernels neighbours_baseline;
#if defined(__x86_64__)
extern const NeighbourKernels neighbours_avx2;
extern const NeighbourKernels neighbours_avx512;
#endif

const NeighbourKernels& neighbour_kernels() {
#if defined(__x86_64__)
  if (active_isa() == Isa::avx512) return neighbours_avx512;
  if (active_isa() == Isa::avx2 && has_fused_multiply_add()) return neighbours_avx2;
#endif
  return neighbours_baseline;
}

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kTileBytes = int64_t{192} << 10;  // of rows multiplied by panel after panel, in second-level cache
constexpr int64_t kColumns = 512;                   // of one job
constexpr int64_t kBandBytes = int64_t{16} << 20;   // of packed columns that all rows are multiplied by
constexpr size_t kAlways = std::numeric_limits<size_t>::max();  // bytes: as many threads as are allowed

float floor_of(const float& floor) {
  return std::atomic_ref(const_cast<float&>(floor)).load(std::memory_order_relaxed);
}

class RowLock {
 public:
  explicit RowLock(uint8_t& lock) : lock_(lock) {
    while (lock_.exchange(1, std::memory_order_acquire) != 0) {
    }
  }
  ~RowLock() { lock_.store(0, std::memory_order_release); }
  RowLock(const RowLock&) = delete;
  RowLock& operator=(const RowLock&) = delete;

 private:
  std::atomic_ref<uint8_t> lock_;
};

struct Candidate {
  float score;
  int32_t id;
};

void trim_row(const RunningBest& best, int64_t row, std::vector<Candidate>& scratch) {
  float* scores = best.scores + row * best.capacity;
  int32_t* ids = best.ids + row * best.capacity;
  const int64_t count = best.counts[row];
  if (count <= best.keep) return;
  scratch.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) scratch[static_cast<size_t>(i)] = {scores[i], ids[i]};
  const auto last = scratch.begin() + (best.keep - 1);
  std::nth_element(scratch.begin(), last, scratch.end(), [](Candidate x, Candidate y) { return x.score > y.score; });
  for (int64_t i = 0; i < best.keep; ++i) {
    scores[i] = scratch[static_cast<size_t>(i)].score;
    ids[i] = scratch[static_cast<size_t>(i)].id;
  }
  best.counts[row] = static_cast<int32_t>(best.keep);
  std::atomic_ref(best.floors[row]).store(last->score, std::memory_order_relaxed);
}

void offer(const RunningBest& best, int64_t row, float score, int32_t id, std::vector<Candidate>& scratch) {
  if (!(score > floor_of(best.floors[row]))) return;
  const RowLock lock(best.locks[row]);
  if (!(score > best.floors[row])) return;
  const int64_t at = row * best.capacity + best.counts[row]++;
  best.scores[at] = score;
  best.ids[at] = id;
  if (best.counts[row] == best.capacity) trim_row(best, row, scratch);
}

// Buffers of one thread for its jobs.
struct Bench {
  std::vector<float> tail;  // the last rows, padded to a whole tile
  std::vector<float> row_floors;
  std::vector<float> column_floors;
  std::vector<Hit> hits;
  std::vector<Candidate> scratch;
};

// Columns of b as panels, one after another: packed once, not for every chunk of rows.
class Band {
 public:
  Band(const UnitRows& b, int64_t dim, const NeighbourKernels& kernels) : b_(b), dim_(dim), kernels_(kernels) {
    const int64_t width =
        std::clamp<int64_t>(kBandBytes / (dim * 4) / kColumns, 1, (b.count + kColumns - 1) / kColumns);
    columns_ = width * kColumns;
    panels_.resize(static_cast<size_t>(columns_ * dim));
  }

  int64_t columns() const { return columns_; }
  int64_t first() const { return first_; }
  int64_t last() const { return std::min(first_ + columns_, b_.count); }
  const float* panel(int64_t column) const { return panels_.data() + (column - first_) * dim_; }

  void pack(int64_t first, int64_t threads) {
    first_ = first;
    const int64_t width = kernels_.panel_columns, panels = (last() - first + width - 1) / width;
    fan_out(panels, kAlways, std::clamp<int64_t>(threads, 1, panels), [&](int64_t begin, int64_t end, int64_t) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t column = first + i * width, count = std::min(width, last() - column);
        kernels_.pack_panel(b_.rows + column * dim_, count, dim_, panels_.data() + i * width * dim_);
      }
    });
  }

 private:
  const UnitRows& b_;
  int64_t dim_;
  const NeighbourKernels& kernels_;
  int64_t columns_;
  int64_t first_ = 0;
  std::vector<float> panels_;
};

class PairsJob {
 public:
  PairsJob(const UnitRows& a, const RunningBest& best_a, const UnitRows& b, const RunningBest& best_b, const Band& band,
           int64_t dim, bool same)
      : a_(a),
        b_(b),
        best_a_(best_a),
        best_b_(best_b),
        band_(band),
        dim_(dim),
        same_(same),
        kernels_(neighbour_kernels()) {
    const int64_t tile = kernels_.tile_rows;
    chunk_rows_ = std::clamp<int64_t>(kTileBytes / (dim * 4) / tile * tile, 4 * tile, 64 * tile);
    column_jobs_ = (band.last() - band.first() + kColumns - 1) / kColumns;
    jobs_ = (a.count + chunk_rows_ - 1) / chunk_rows_ * column_jobs_;
  }

  int64_t jobs() const { return jobs_; }

  void run(int64_t job, Bench& bench) const {
    const int64_t first_row = job / column_jobs_ * chunk_rows_, rows = std::min(chunk_rows_, a_.count - first_row);
    const int64_t first = band_.first() + job % column_jobs_ * kColumns,
                  last = std::min(first + kColumns, band_.last());
    for (int64_t column = first; column < last; column += kernels_.panel_columns) {
      const int64_t columns = std::min(kernels_.panel_columns, last - column);
      // pairs of a block: row < column
      const int64_t met = same_ ? std::min(rows, column + columns - 1 - first_row) : rows;
      if (met > 0) meet(first_row, met, column, columns, bench);
    }
  }

 private:
  void meet(int64_t first_row, int64_t rows, int64_t column, int64_t columns, Bench& bench) const {
    const float* panel = band_.panel(column);
    bench.column_floors.assign(static_cast<size_t>(kernels_.panel_columns), kInfinity);
    if (best_b_.exists())
      for (int64_t j = 0; j < columns; ++j)
        bench.column_floors[static_cast<size_t>(j)] = floor_of(best_b_.floors[column + j]);
    bench.row_floors.assign(static_cast<size_t>(rows + kernels_.tile_rows), kInfinity);
    if (best_a_.exists())
      for (int64_t i = 0; i < rows; ++i)
        bench.row_floors[static_cast<size_t>(i)] = floor_of(best_a_.floors[first_row + i]);
    bench.hits.resize(static_cast<size_t>((chunk_rows_ + kernels_.tile_rows) * kernels_.panel_columns));

    const int64_t whole = rows / kernels_.tile_rows * kernels_.tile_rows;
    const float* at = a_.rows + first_row * dim_;
    drain(kernels_.panel_hits(at, whole, dim_, panel, bench.row_floors.data(), bench.column_floors.data(),
                              bench.hits.data()),
          first_row, rows, column, columns, bench);
    if (whole == rows) return;
    bench.tail.assign(static_cast<size_t>(kernels_.tile_rows * dim_), 0.0f);
    std::copy(at + whole * dim_, at + rows * dim_, bench.tail.begin());
    drain(kernels_.panel_hits(bench.tail.data(), kernels_.tile_rows, dim_, panel, bench.row_floors.data() + whole,
                              bench.column_floors.data(), bench.hits.data()),
          first_row + whole, rows - whole, column, columns, bench);
  }

  void drain(int64_t num_hits, int64_t first_row, int64_t rows, int64_t column, int64_t columns, Bench& bench) const {
    for (int64_t i = 0; i < num_hits; ++i) {
      const Hit& hit = bench.hits[static_cast<size_t>(i)];
      if (hit.row >= rows || hit.column >= columns) continue;
      const int64_t row = first_row + hit.row, other = column + hit.column;
      if (same_ && row >= other) continue;
      const int32_t id = a_.id(row), other_id = b_.id(other);
      if (id == other_id) continue;
      if (best_a_.exists()) offer(best_a_, row, hit.score, other_id, bench.scratch);
      if (best_b_.exists()) offer(best_b_, other, hit.score, id, bench.scratch);
    }
  }

  const UnitRows& a_;
  const UnitRows& b_;
  const RunningBest& best_a_;
  const RunningBest& best_b_;
  const Band& band_;
  int64_t dim_;
  bool same_;
  const NeighbourKernels& kernels_;
  int64_t chunk_rows_;
  int64_t column_jobs_;
  int64_t jobs_;
};

}  // namespace

void recall_pairs(const UnitRows& a, const RunningBest& best_a, const UnitRows& b, const RunningBest& best_b,
                  int64_t dim, bool same, int64_t threads) {
  if (a.count == 0 || b.count == 0) return;
  Band band(b, dim, neighbour_kernels());
  for (int64_t first = 0; first < b.count; first += band.columns()) {
    band.pack(first, threads);
    const PairsJob pairs(a, best_a, b, best_b, band, dim, same);
    std::atomic<int64_t> next{0};
    beside_each_other(std::clamp<int64_t>(threads, 1, pairs.jobs()), [&](int64_t) {
      FlushDenormals float_mode;
      Bench bench;
      for (int64_t job = next++; job < pairs.jobs(); job = next++) pairs.run(job, bench);
    });
  }
}

void trim_best(const RunningBest& best, int64_t count, int64_t threads) {
  const int64_t slices = std::clamp<int64_t>(threads, 1, std::max<int64_t>(count, 1));
  fan_out(count, kAlways, slices, [&](int64_t begin, int64_t end, int64_t) {
    std::vector<Candidate> scratch;
    for (int64_t row = begin; row < end; ++row) trim_row(best, row, scratch);
  });
}

}  // namespace geartrain
