// Map by name in order of use, so that a bounded number of entries can be kept. Every call is O(1).
#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/fingerprint.hpp"
#include "base/keyed_hash.hpp"

namespace geartrain {

// Keyed, so that a client cannot choose names that collide.
struct NameHash {
  using is_transparent = void;
  size_t operator()(std::string_view name) const {
    return murmur3(name.data(), name.size(), {hash_seed, hash_seed}).low;
  }
};

template <class Value>
using ByName = std::unordered_map<std::string, Value, NameHash, std::equal_to<>>;

// An entry is idle or held; only idle ones can be the oldest. Entries stay in place in memory until they are erased.
template <class Value>
class RecencyMap {
 public:
  struct Entry {
    std::string name;
    Value value;
    bool is_held = false;
    typename std::list<Entry>::iterator self = {};
  };

  size_t size() const { return places_.size(); }

  Entry* find(std::string_view name) const {
    const auto found = places_.find(name);
    return found == places_.end() ? nullptr : &*found->second;
  }

  // Adds an idle entry as the last used. The name must be new.
  Entry& add(std::string_view name, Value value) {
    const auto place = idle_.insert(idle_.end(), Entry{std::string(name), std::move(value)});
    place->self = place;
    try {
      places_.emplace(place->name, place);
    } catch (...) {
      idle_.erase(place);
      throw;
    }
    return *place;
  }

  // Marks an entry as used. A held one keeps its place among those held, in the order of holding.
  void touch(Entry& entry) {
    if (!entry.is_held) idle_.splice(idle_.end(), idle_, entry.self);
  }
  void hold(Entry& entry) {
    if (!std::exchange(entry.is_held, true)) held_.splice(held_.end(), idle_, entry.self);
  }
  // Makes it idle again, as the last used.
  void release(Entry& entry) {
    if (std::exchange(entry.is_held, false)) idle_.splice(idle_.end(), held_, entry.self);
  }

  // Least recently used idle entry, and the entry held for the longest; null if there is none.
  Entry* oldest() { return idle_.empty() ? nullptr : &idle_.front(); }
  Entry* first_held() { return held_.empty() ? nullptr : &held_.front(); }

  void erase(Entry& entry) {
    places_.erase(entry.name);
    (entry.is_held ? held_ : idle_).erase(entry.self);
  }

  // Visits each entry, which the visitor may erase.
  template <class Visit>
  void for_each(const Visit& visit) {
    for (std::list<Entry>* entries : {&idle_, &held_})
      for (auto next = entries->begin(); next != entries->end();) visit(*next++);
  }
  template <class Visit>
  void for_each(const Visit& visit) const {
    for (const std::list<Entry>* entries : {&idle_, &held_})
      for (const Entry& entry : *entries) visit(entry);
  }

 private:
  std::list<Entry> idle_, held_;
  std::unordered_map<std::string_view, typename std::list<Entry>::iterator, NameHash> places_;
};

}  // namespace geartrain
