#include "index/dense_items.hpp"

#include "index/bits.hpp"

namespace geartrain {

static_assert(DenseItems::kMaxRegionRows <= Bits::kPageBits);

DenseItems::Full DenseItems::when_full(const std::vector<int64_t>& owned) const {
  std::vector<uint8_t> is_owned(kNumBuckets);
  std::vector<int64_t> owned_of_range(static_cast<size_t>(layout_.num_ranges()));
  for (int64_t bucket : owned) {
    is_owned[static_cast<size_t>(bucket)] = 1;
    ++owned_of_range[static_cast<size_t>(bucket & (layout_.num_ranges() - 1))];
  }
  Full full;
  int64_t chunks = 0, pages = 0, last_page = -1;
  const auto count_chunks = [&](int64_t rows) { chunks += ((rows - 1) >> chunk_bits_) + 1; };
  const auto count_pages = [&](int64_t first, int64_t last) {
    pages += last / Bits::kPageBits - std::max(first / Bits::kPageBits - 1, last_page);
    last_page = last / Bits::kPageBits;
  };
  for (int64_t range = 0; range < layout_.num_ranges(); ++range) {
    const int64_t rows = layout_.rows_of_range(range), first = layout_.position_of(range);
    const int64_t buckets = owned_of_range[static_cast<size_t>(range)];
    if (rows == 0 || buckets == 0) continue;
    if (buckets == kNumBuckets / layout_.num_ranges()) {
      full.rows += rows;
      count_chunks(rows);
      count_pages(first, first + rows - 1);
      continue;
    }
    // A border to another shard may cut this range: its regions may never be half full.
    const bool are_alike = layout_.region_rows() >= kNumBuckets / layout_.num_ranges();  // all regions but the last
    int64_t there = 0, runs = 0;
    for (int64_t begin = first; begin < first + rows; begin += layout_.region_rows()) {
      const int64_t end = std::min(begin + layout_.region_rows(), first + rows);
      if (begin == first || !are_alike || end - begin < layout_.region_rows()) {
        there = runs = 0;
        for (int64_t run = begin; run < end; run += kRunRows) {
          const int64_t before = there;
          for (int64_t position = run; position < std::min(run + kRunRows, end); ++position)
            there += is_owned[static_cast<size_t>(dense_bucket(layout_.id_at(position)))];
          if (there > before) ++runs;
        }
      }
      if (there == 0) continue;
      count_pages(begin, begin);  // a region is not longer than a page
      full.rows += there;
      const bool is_in_order = 2 * there >= end - begin;
      count_chunks(is_in_order ? end - begin : there);
      if (!is_in_order)
        full.index_bytes += layout_.region_rows() / kRunRows * static_cast<int64_t>(sizeof(std::unique_ptr<Run>)) +
                            runs * static_cast<int64_t>(sizeof(Run));
    }
  }
  full.items = chunks << chunk_bits_;
  full.index_bytes += chunks * static_cast<int64_t>(sizeof(uint32_t)) + pages * Bits::kPageBytes;
  return full;
}

void DenseItems::Growth::number(int64_t position) {
  const int64_t index = items_.layout_.region_of(position), place = items_.layout_.place_in_region(position);
  Region& region = items_.regions_.make_place(index);
  if (region.is_in_order()) return;
  Made made{position, false, false};
  if (region.numbers) {
    const uint16_t* number = region.numbers->find(place);
    if (number != nullptr && *number != 0) return;
  }
  if (!region.grows) {
    grown_.push_back({index, region.num_numbers, region.chunks.size()});
    region.grows = true;
  }
  made_.push_back(made);
  if (!region.numbers) {
    region.numbers = std::make_unique<Numbers>(items_.layout_.region_rows());
    items_.numbers_bytes_ += region.numbers->list_bytes();
    made_.back().numbers = true;
  }
  auto& run = region.numbers->run_of(place);
  if (run == nullptr) {
    run = std::make_unique<Run>();
    items_.numbers_bytes_ += static_cast<int64_t>(sizeof(Run));
    made_.back().run = true;
  }
  run->numbers[static_cast<size_t>(place % kRunRows)] = static_cast<uint16_t>(++region.num_numbers);
}

void DenseItems::Growth::add_chunk(Region& region) {
  if (items_.num_chunks_ > int64_t{UINT32_MAX}) throw std::bad_alloc();
  region.chunks.push_back(static_cast<uint32_t>(items_.num_chunks_));
  ++items_.num_chunks_;
}

DenseItems::Growth::~Growth() {
  if (grown_.empty()) return;
  for (auto made = made_.rbegin(); made != made_.rend(); ++made) {
    Region& region = items_.regions_.at(items_.layout_.region_of(made->position));
    const int64_t place = items_.layout_.place_in_region(made->position);
    if (region.numbers == nullptr) continue;
    auto& run = region.numbers->run_of(place);
    if (run != nullptr) run->numbers[static_cast<size_t>(place % kRunRows)] = 0;
    if (made->run) {
      run.reset();
      items_.numbers_bytes_ -= static_cast<int64_t>(sizeof(Run));
    }
    if (made->numbers) {
      items_.numbers_bytes_ -= region.numbers->list_bytes();
      region.numbers.reset();
    }
  }
  for (const Grown& grown : grown_) {
    Region& region = items_.regions_.at(grown.region);
    region.chunks.resize(grown.chunks_before);
    region.num_numbers = grown.num_old;
    region.grows = false;
  }
  items_.num_chunks_ = chunks_before_;
}

}  // namespace geartrain
