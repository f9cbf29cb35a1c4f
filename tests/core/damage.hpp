// Frames that are damaged on purpose: what the tests of the reader are made of.
#pragma once

#include <cstdint>
#include <string>

namespace geartrain {

struct DamageCounts {
  int64_t refused = 0;    // with a Fault("ProtocolError")
  int64_t taken = 0;      // read as if nothing were wrong with them
  int64_t undamaged = 0;  // the change left the frame as it was
};

// Changes headers, texts and size of `frame` `count` times, each time of the whole one, and reads it where a page that
// nobody may touch follows its last byte. Half of the damaged headers get a new checksum, so that what they say is
// looked at. `frame` is a request, or the reply to call `number` for `num_operations` that bring no rows.
DamageCounts read_damaged_frames(const std::string& frame, bool is_reply, uint64_t number, int64_t num_operations,
                                 uint64_t seed, int64_t count);

}  // namespace geartrain
