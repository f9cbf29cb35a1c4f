// Where an id lies in a hash table of this process.
//
// Not the hash that places ids on shards (hashed_bucket): all ids of one shard share its upper bits, so that a table that used
// them would be one run of full places. And keyed, or whoever chooses ids could choose them to fall into one place. Nothing
// that anybody sees may depend on it: tables list what they hold in order of insertion, or sorted.
#pragma once

#include <cstdint>

#include "base/common.hpp"

namespace geartrain {

// Drawn when the process loads the module; a forked child has its parent's, with its tables.
extern const uint64_t hash_seed;

// A table takes the upper bits.
inline uint64_t keyed_hash(int64_t id) { return splitmix64(static_cast<uint64_t>(id) ^ hash_seed); }

}  // namespace geartrain
