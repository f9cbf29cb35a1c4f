// The header of every frame.
#include "frames/frame.hpp"

#include <cstring>
#include <limits>

#include "frames/pieces.hpp"

namespace geartrain {

// As Unicode defines it (table 3-7): no surrogates, nothing longer than it must be.
bool is_utf8(std::string_view text) {
  const auto in = [&](size_t at, uint8_t low, uint8_t high) {
    return at < text.size() && static_cast<uint8_t>(text[at]) >= low && static_cast<uint8_t>(text[at]) <= high;
  };
  for (size_t at = 0; at < text.size();) {
    const auto first = static_cast<uint8_t>(text[at]);
    size_t more = 0;
    uint8_t low = 0x80, high = 0xBF;
    if (first < 0x80) {
      ++at;
      continue;
    }
    if (first >= 0xC2 && first <= 0xDF) more = 1;
    else if (first >= 0xE0 && first <= 0xEF) more = 2;
    else if (first >= 0xF0 && first <= 0xF4) more = 3;
    else return false;
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
    if (!in(at + 1, low, high)) return false;
    for (size_t next = 2; next <= more; ++next)
      if (!in(at + next, 0x80, 0xBF)) return false;
    at += more + 1;
  }
  return true;
}

size_t row_bytes_of(int64_t dim, DType dtype) {
  if (dim < 1 || dim > std::numeric_limits<uint32_t>::max())
    throw Fault("ProtocolError", "rows of " + std::to_string(dim) + " numbers; a frame's have 1 to 4294967295");
  return static_cast<size_t>(dim) * item_bytes(dtype);
}

// Chained splitmix64 over 8-byte words: each step is a bijection of the sum so far, so that no change of a single word
// is missed.
uint64_t frame_checksum(uint64_t sum, const char* data, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 8) {
    uint64_t word;
    std::memcpy(&word, data + at, 8);
    sum = splitmix64(sum ^ word);
  }
  return sum;
}

void write_header(char* frame, FrameHeader header) {
  header.check = checksum_of(0, header);
  std::memcpy(frame, &header, sizeof(header));
}

FrameHeader parse_header(const char* data, FrameKind kind) {
  const auto header = copied<FrameHeader>(data);
  if (header.magic != kFrameMagic) throw Fault("ProtocolError", "this is not a frame: it does not begin with \"GTRF\"");
  if (header.version != kFrameVersion)
    throw Fault("ProtocolError", "the frame has version " + std::to_string(header.version) + ", this process version " +
                                     std::to_string(kFrameVersion) + "; use the same release on both ends");
  require_frame(header.check == checksum_of(0, header), "the header's checksum is wrong");
  require_frame(header.kind == kind, "it is of another kind than was expected");
  require_frame(header.reserved == 0, "reserved bytes are not 0");
  require_frame(header.body_bytes < kMaxBytes, "its size is 2^62 bytes or more");
  return header;
}

}  // namespace geartrain
