#include "cache/position_lru.hpp"

#include <algorithm>
#include <bit>

namespace geartrain {
namespace {

constexpr int64_t kBlock = 32;  // ids whose entries are fetched ahead

}  // namespace

void SlotIndex::prefetch(const int64_t* ids, int64_t begin, int64_t end) const {
  for (int64_t i = begin; i < end; ++i) prefetch_bytes(&table_[home(ids[i])], 1);
}

size_t SlotIndex::seek(int64_t id) const {
  size_t at = home(id);
  while (table_[at].slot != kNone && table_[at].id != id) at = next(at);
  return at;
}

void SlotIndex::find(const int64_t* ids, int64_t count, int64_t* slots, bool touch) {
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    prefetch(ids, begin, end);
    for (int64_t i = begin; i < end; ++i) {
      slots[i] = table_[seek(ids[i])].slot;
      if (touch && slots[i] >= 0) prefetch_bytes(&links_[static_cast<size_t>(slots[i])], 1);
    }
    if (!touch) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (slots[i] < 0) continue;
      unlink(static_cast<int32_t>(slots[i]));
      link_newest(static_cast<int32_t>(slots[i]));
    }
  }
}

int64_t SlotIndex::place(const int64_t* ids, int64_t count, int64_t* slots) {
  int64_t evicted = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    prefetch(ids, begin, end);
    for (int64_t i = begin; i < end; ++i) {
      size_t at = seek(ids[i]);
      if (table_[at].slot == kNone) {
        if (size_ == capacity()) {
          erase(seek(ids_[static_cast<size_t>(oldest_)]));
          ++evicted;
          at = seek(ids[i]);  // entries may have moved
        }
        const int32_t slot = take_slot();
        table_[at] = {ids[i], slot};
        ids_[static_cast<size_t>(slot)] = ids[i];
        ++size_;
      } else {
        unlink(static_cast<int32_t>(table_[at].slot));
      }
      slots[i] = table_[at].slot;
      link_newest(static_cast<int32_t>(slots[i]));
    }
  }
  return evicted;
}

void SlotIndex::remove(const int64_t* ids, int64_t count, int64_t* slots) {
  for (int64_t i = 0; i < count; ++i) {
    const size_t at = seek(ids[i]);
    slots[i] = table_[at].slot;
    if (slots[i] >= 0) erase(at);
  }
}

int64_t SlotIndex::oldest(int64_t count, int64_t* ids, int64_t* slots) const {
  int64_t found = 0;
  for (int32_t slot = oldest_; slot != kNone && found < count; slot = links_[static_cast<size_t>(slot)].newer) {
    ids[found] = ids_[static_cast<size_t>(slot)];
    slots[found++] = slot;
  }
  return found;
}

void SlotIndex::grow(int64_t capacity) {
  const size_t slots = static_cast<size_t>(capacity);
  if (slots <= ids_.size()) return;
  const size_t places = std::bit_ceil(std::max<size_t>(2 * slots, 16));
  std::vector<Entry> table(places);
  std::vector<int64_t> ids(slots);
  std::vector<Link> links(slots);
  free_.reserve(slots);
  std::copy(ids_.begin(), ids_.end(), ids.begin());
  std::copy(links_.begin(), links_.end(), links.begin());
  ids_.swap(ids);
  links_.swap(links);
  table_.swap(table);
  shift_ = 64 - std::countr_zero(places);
  for (int32_t slot = oldest_; slot != kNone; slot = links_[static_cast<size_t>(slot)].newer)
    table_[seek(ids_[static_cast<size_t>(slot)])] = {ids_[static_cast<size_t>(slot)], slot};
}

// Frees the slot of this entry and closes the gap: whatever a probe would no longer reach moves back into it.
void SlotIndex::erase(size_t at) {
  const int32_t slot = static_cast<int32_t>(table_[at].slot);
  unlink(slot);
  free_.push_back(slot);
  --size_;
  const size_t mask = table_.size() - 1;
  for (size_t after = next(at); table_[after].slot != kNone; after = next(after)) {
    if (((after - home(table_[after].id)) & mask) < ((after - at) & mask)) continue;  // its home lies behind the gap
    table_[at] = table_[after];
    at = after;
  }
  table_[at].slot = kNone;
}

int32_t SlotIndex::take_slot() {
  if (free_.empty()) return fresh_++;
  const int32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

void SlotIndex::unlink(int32_t slot) {
  const Link link = links_[static_cast<size_t>(slot)];
  (link.older == kNone ? oldest_ : links_[static_cast<size_t>(link.older)].newer) = link.newer;
  (link.newer == kNone ? newest_ : links_[static_cast<size_t>(link.newer)].older) = link.older;
}

void SlotIndex::link_newest(int32_t slot) {
  links_[static_cast<size_t>(slot)] = {newest_, kNone};
  (newest_ == kNone ? oldest_ : links_[static_cast<size_t>(newest_)].newer) = slot;
  newest_ = slot;
}

}  // namespace geartrain
