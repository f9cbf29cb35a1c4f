#include "damage.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "frames/frame.hpp"

namespace geartrain {
namespace {

// Where the tests lie: offsets of docs/explanation/frames.md, in a frame's header and in an operation's.
struct Field {
  size_t offset, bytes;
};
constexpr size_t kHeader = 64, kOperation = 128, kReply = 64, kBatchNumbers = 24;
constexpr uint64_t kBatchFlags = 32 | 64 | 128;
constexpr Field kBodyBytes{24, 8}, kNumOperations{8, 4};
constexpr Field kKind{0, 1}, kDType{1, 1}, kFlags{2, 2}, kDim{4, 4}, kNumIds{8, 8}, kTexts{96, 2}, kNumScalars{102, 2},
    kScalarsBytes{104, 4};
constexpr Field kReplyOffset{24, 8}, kReplyBytes{32, 8}, kIsRefused{0, 1};

uint64_t number_at(const char* at, Field field) {
  uint64_t value = 0;
  std::memcpy(&value, at + field.offset, field.bytes);
  return value;
}

// Memory that ends where nobody may read.
class GuardedMemory {
 public:
  explicit GuardedMemory(size_t most_bytes) : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    bytes_ = (most_bytes + page_ - 1) / page_ * page_;
    void* mapped = mmap(nullptr, bytes_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<char*>(mapped);
    if (mprotect(begin_ + page_, bytes_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  }
  ~GuardedMemory() { munmap(begin_, bytes_ + 2 * page_); }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;
  // So many bytes right before the end.
  char* last(size_t bytes) { return begin_ + page_ + bytes_ - bytes; }

 private:
  size_t page_, bytes_;
  char* begin_;
};

class Damage {
 public:
  Damage(const std::string& frame, bool is_reply, uint64_t number, uint64_t seed)
      : frame_(frame), is_reply_(is_reply), number_(number), random_(seed) {
    if (is_reply) {
      for (uint64_t i = 0; i < number_at(frame.data(), kNumOperations); ++i)
        headers_.push_back({kHeader + i * kReply, kReply});
    } else {
      const ParsedRequest request = parse_request(frame.data(), frame.size());
      const RequestLayout layout = lay_out_request(request.operations);
      size_t begin = kHeader;
      for (const OperationPlace& place : layout.places) {
        headers_.push_back({begin, place.ids - begin});
        begin = place.end;
      }
    }
  }

  std::string next() {
    std::string damaged = frame_;
    switch (below(4)) {
      case 0: resize(damaged); break;
      case 1: flip(damaged); break;
      default: lie(damaged);
    }
    return damaged;
  }

 private:
  uint64_t below(uint64_t end) { return random_() % end; }

  void resize(std::string& damaged) {
    if (below(2) == 0) damaged.resize(below(damaged.size()));
    else damaged.append(1 + below(200), static_cast<char>(below(256)));
  }

  void flip(std::string& damaged) {
    const size_t place = below(headers_.size() + 1);
    const Field where = place == 0 ? Field{0, kHeader} : headers_[place - 1];
    const uint64_t first = below(where.bytes * 8);
    const uint64_t step = 1 + below(64);
    for (uint64_t bit = first, flips = 1 + below(8); flips != 0 && bit < where.bytes * 8; bit += step, --flips)
      damaged[where.offset + bit / 8] = static_cast<char>(damaged[where.offset + bit / 8] ^ (1 << bit % 8));
  }

  // Gives a field another value than it has: at least `least` away from it, near it or anywhere.
  void set(std::string& damaged, size_t header, Field field, uint64_t least) {
    const uint64_t mask = field.bytes == 8 ? ~uint64_t{0} : (uint64_t{1} << 8 * field.bytes) - 1;
    const uint64_t before = number_at(damaged.data() + header, field);
    uint64_t value = before;
    while ((value > before ? value - before : before - value) < least) {
      const uint64_t near = least + below(256);
      value = below(3) == 0 ? random_() & mask : (below(2) == 0 ? before + near : before - near) & mask;
      if (below(8) == 0) value = mask - below(64);
    }
    std::memcpy(damaged.data() + header + field.offset, &value, field.bytes);
  }

  // A header that says what is not so, with a checksum that agrees.
  void lie(std::string& damaged) {
    const size_t place = below(headers_.size() + 1);
    if (place == 0) {
      set(damaged, 0, below(2) == 0 ? kBodyBytes : kNumOperations, 1);
    } else if (is_reply_) {
      lie_in_reply(damaged, headers_[place - 1].offset);
    } else {
      lie_in_operation(damaged, headers_[place - 1].offset);
    }
    sign(damaged, 0, kHeader, 0);
    if (place != 0) sign(damaged, headers_[place - 1].offset, is_reply_ ? kReply : kOperation, number_);
  }

  void lie_in_reply(std::string& damaged, size_t header) {
    switch (below(3)) {
      case 0: {
        const uint64_t beyond = std::max<uint64_t>(random_(), damaged.size() + 1);
        std::memcpy(damaged.data() + header + kReplyOffset.offset, &beyond, sizeof(beyond));
        break;
      }
      case 1: {
        const uint64_t beyond = std::max<uint64_t>(random_(), damaged.size());
        std::memcpy(damaged.data() + header + kReplyBytes.offset, &beyond, sizeof(beyond));
        break;
      }
      default: damaged[header + kIsRefused.offset] = static_cast<char>(2 + below(254));
    }
  }

  void lie_in_operation(std::string& damaged, size_t header) {
    const bool is_pull = damaged[header] == 1, is_push = damaged[header] == 2;
    switch (below(6)) {
      case 0: damaged[header + kKind.offset] = static_cast<char>(4 + below(252)); break;
      case 1: damaged[header + kDType.offset] = static_cast<char>(3 + below(253)); break;
      case 2:  // of a pull's rows the frame holds none: only their number can be too large
        if (is_pull || number_at(damaged.data() + header, kNumIds) == 0) set(damaged, header, kNumIds, 64);
        else set(damaged, header, kDim, 64);
        break;
      case 3: set(damaged, header, kNumIds, 64); break;
      case 4: set(damaged, header, {kTexts.offset + 2 * below(3), 2}, 128); break;
      default:
        if (is_push && below(2) == 0) set(damaged, header, kNumScalars, 1);
        else set(damaged, header, kScalarsBytes, 128);
    }
  }

  void sign(std::string& damaged, size_t header, size_t bytes, uint64_t seed) {
    char* at = damaged.data() + header;
    uint64_t sum = frame_checksum(seed, at, bytes - 8);
    if (bytes == kOperation) {
      uint64_t texts = number_at(at, kScalarsBytes);
      for (size_t i = 0; i < 3; ++i) texts += number_at(at, {kTexts.offset + 2 * i, 2});
      if ((number_at(at, kFlags) & kBatchFlags) != 0) texts += kBatchNumbers;
      texts = (texts + 7) / 8 * 8;
      if (header + bytes + texts <= damaged.size()) sum = frame_checksum(sum, at + bytes, texts);
    }
    std::memcpy(at + bytes - 8, &sum, sizeof(sum));
  }

  const std::string& frame_;
  bool is_reply_;
  uint64_t number_;
  std::mt19937_64 random_;
  std::vector<Field> headers_;  // of operations, texts included
};

}  // namespace

DamageCounts read_damaged_frames(const std::string& frame, bool is_reply, uint64_t number, int64_t num_operations,
                                 uint64_t seed, int64_t count) {
  Damage damage(frame, is_reply, number, seed);
  GuardedMemory memory(frame.size() + 4096);
  const std::vector<ReplyRows> rows(static_cast<size_t>(num_operations));
  DamageCounts counts;
  for (int64_t i = 0; i < count; ++i) {
    const std::string damaged = damage.next();
    char* at = memory.last(damaged.size());
    std::memcpy(at, damaged.data(), damaged.size());
    try {
      if (is_reply) parse_reply(at, damaged.size(), number, rows);
      else parse_request(at, damaged.size());
      ++(damaged == frame ? counts.undamaged : counts.taken);
    } catch (const Fault& fault) {
      if (fault.name != "ProtocolError") throw;
      ++counts.refused;
    }
  }
  return counts;
}

}  // namespace geartrain
