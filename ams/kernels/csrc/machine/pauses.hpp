// What happens between two blocks of a large request.
#pragma once

#include <cstddef>

namespace geartrain {

// About how many bytes of rows and slots lie between two pauses, which is also the most that a request without pauses may have and still be
// small: some hundred microseconds of work.
inline constexpr size_t kBlockBytes = size_t{1} << 20;

// Used by the thread that performs the request.
class Pauses {
 public:
  virtual ~Pauses() = default;
  // Whether anybody waits for a pause. Asked between any two blocks, so it is cheap.
  virtual bool are_wanted() = 0;
  // Called while no block is under way. What it does reads rows at most.
  virtual void pause() noexcept = 0;
};

}  // namespace geartrain
