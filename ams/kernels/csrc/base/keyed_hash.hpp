// Keyed hash of ids, for hash tables of this process.
//
// Not the hash that places ids on shards (hashed_bucket): ids of one shard share its upper bits, and would fill one run
// of a table. It is keyed, so that a client cannot choose ids that collide. No visible result may depend on it: tables
// list their content in order of insertion, or sorted.
#pragma once

#include <cstdint>

#include "base/common.hpp"

namespace geartrain {

// Drawn when the process loads the module; a forked child has its parent's, with its tables.
extern const uint64_t hash_seed;

// Tables use the upper bits.
inline uint64_t keyed_hash(int64_t id) { return splitmix64(static_cast<uint64_t>(id) ^ hash_seed); }

}  // namespace geartrain
