#include "cache/position_lru.hpp"

#include <algorithm>
#include <bit>

namespace geartrain {
namespace {

constexpr int64_t kBlock = 32;  // ids whose entries are prefetched

}  // namespace

void PositionLru::prefetch(const int64_t* ids, int64_t begin, int64_t end) const {
  for (int64_t i = begin; i < end; ++i) prefetch_bytes(&table_[home(ids[i])], 1);
}

size_t PositionLru::seek(int64_t id) const {
  size_t at = home(id);
  while (table_[at].position != kNone && table_[at].id != id) at = next(at);
  return at;
}

void PositionLru::find(const int64_t* ids, int64_t count, int64_t* positions, bool touch) {
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    prefetch(ids, begin, end);
    for (int64_t i = begin; i < end; ++i) {
      positions[i] = table_[seek(ids[i])].position;
      if (touch && positions[i] >= 0) prefetch_bytes(&links_[static_cast<size_t>(positions[i])], 1);
    }
    if (!touch) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (positions[i] < 0) continue;
      unlink(static_cast<int32_t>(positions[i]));
      link_newest(static_cast<int32_t>(positions[i]));
    }
  }
}

int64_t PositionLru::place(const int64_t* ids, int64_t count, int64_t* positions) {
  int64_t evicted = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    prefetch(ids, begin, end);
    for (int64_t i = begin; i < end; ++i) {
      size_t at = seek(ids[i]);
      if (table_[at].position == kNone) {
        if (size_ == capacity()) {
          erase(seek(ids_[static_cast<size_t>(oldest_)]));
          ++evicted;
          at = seek(ids[i]);  // entries may have moved
        }
        const int32_t position = take_position();
        table_[at] = {ids[i], position};
        ids_[static_cast<size_t>(position)] = ids[i];
        ++size_;
      } else {
        unlink(static_cast<int32_t>(table_[at].position));
      }
      positions[i] = table_[at].position;
      link_newest(static_cast<int32_t>(positions[i]));
    }
  }
  return evicted;
}

void PositionLru::remove(const int64_t* ids, int64_t count, int64_t* positions) {
  for (int64_t i = 0; i < count; ++i) {
    const size_t at = seek(ids[i]);
    positions[i] = table_[at].position;
    if (positions[i] >= 0) erase(at);
  }
}

int64_t PositionLru::oldest(int64_t count, int64_t* ids, int64_t* positions) const {
  int64_t found = 0;
  for (int32_t position = oldest_; position != kNone && found < count;
       position = links_[static_cast<size_t>(position)].newer) {
    ids[found] = ids_[static_cast<size_t>(position)];
    positions[found++] = position;
  }
  return found;
}

void PositionLru::grow(int64_t capacity) {
  const size_t positions = static_cast<size_t>(capacity);
  if (positions <= ids_.size()) return;
  const size_t places = std::bit_ceil(std::max<size_t>(2 * positions, 16));
  std::vector<Entry> table(places);
  std::vector<int64_t> ids(positions);
  std::vector<Link> links(positions);
  free_.reserve(positions);
  std::copy(ids_.begin(), ids_.end(), ids.begin());
  std::copy(links_.begin(), links_.end(), links.begin());
  ids_.swap(ids);
  links_.swap(links);
  table_.swap(table);
  shift_ = 64 - std::countr_zero(places);
  for (int32_t position = oldest_; position != kNone; position = links_[static_cast<size_t>(position)].newer)
    table_[seek(ids_[static_cast<size_t>(position)])] = {ids_[static_cast<size_t>(position)], position};
}

// Frees the position of this entry and closes the gap: entries that a probe would no longer reach move into it.
void PositionLru::erase(size_t at) {
  const int32_t position = static_cast<int32_t>(table_[at].position);
  unlink(position);
  free_.push_back(position);
  --size_;
  const size_t mask = table_.size() - 1;
  for (size_t after = next(at); table_[after].position != kNone; after = next(after)) {
    if (((after - home(table_[after].id)) & mask) < ((after - at) & mask)) continue;  // its home lies behind the gap
    table_[at] = table_[after];
    at = after;
  }
  table_[at].position = kNone;
}

int32_t PositionLru::take_position() {
  if (free_.empty()) return fresh_++;
  const int32_t position = free_.back();
  free_.pop_back();
  return position;
}

void PositionLru::unlink(int32_t position) {
  const Link link = links_[static_cast<size_t>(position)];
  (link.older == kNone ? oldest_ : links_[static_cast<size_t>(link.older)].newer) = link.newer;
  (link.newer == kNone ? newest_ : links_[static_cast<size_t>(link.newer)].older) = link.older;
}

void PositionLru::link_newest(int32_t position) {
  links_[static_cast<size_t>(position)] = {newest_, kNone};
  (newest_ == kNone ? oldest_ : links_[static_cast<size_t>(newest_)].newer) = position;
  newest_ = position;
}

}  // namespace geartrain
