#include "base/keyed_hash.hpp"

#include <random>

namespace geartrain {
namespace {

uint64_t drawn() {
  std::random_device source;
  return uint64_t{source()} << 32 | source();
}

}  // namespace

const uint64_t hash_seed = drawn();

}  // namespace geartrain
