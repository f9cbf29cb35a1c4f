// Pauses between the blocks of a large request.
#pragma once

#include <cstddef>

namespace geartrain {

// Approximate bytes of rows and slots between two pauses, and the largest request that counts as small: some hundred
// microseconds of work.
inline constexpr size_t kBlockBytes = size_t{1} << 20;

// Used by the thread that performs the request.
class Pauses {
 public:
  virtual ~Pauses() = default;
  // Whether a pause is requested. Called between any two blocks, so it is cheap.
  virtual bool are_wanted() = 0;
  // Called between blocks. At most reads rows.
  virtual void pause() noexcept = 0;
};

}  // namespace geartrain
