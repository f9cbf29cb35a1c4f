#include "index/dense_items.hpp"

namespace geartrain {

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
