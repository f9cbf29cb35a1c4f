// Reply: a frame of outcomes and rows, written and read.
#include <algorithm>
#include <cstring>
#include <string_view>

#include "frames/pieces.hpp"

namespace geartrain {
namespace {

struct OperationReply {
  uint8_t is_refused = 0, flags = 0;
  uint16_t name_bytes = 0;
  uint32_t reserved = 0;
  int64_t created = 0;
  double retry_after_seconds = 0;
  uint64_t offset = 0, bytes = 0;
  int64_t writes = 0;
  uint64_t reserved2 = 0;
  uint64_t check = 0;
};
static_assert(sizeof(OperationReply) == 64);
constexpr uint8_t kDuplicate = 1, kHasPresent = 2;
constexpr size_t kRefusalRoom = 1024;  // for the text of one refusal

// Returns the first `most` bytes of UTF-8 text, or a few less: no character is cut.
std::string_view cut(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  while (most != 0 && (static_cast<uint8_t>(text[most]) & 0xC0) == 0x80) --most;
  return text.substr(0, most);
}

}  // namespace

ReplyRows reply_rows(const PullRequest& pull, bool with_present) {
  const size_t row_bytes = row_bytes_of(pull.dim, pull.wire_dtype());
  const auto count = static_cast<uint64_t>(pull.count);
  require_frame(count <= (kMaxBytes >> 12) / (row_bytes + 1), "it asks for more rows than any memory holds");
  return {count * row_bytes, with_present ? count : 0};
}

ReplyLayout lay_out_reply(std::span<const ReplyRows> rows) {
  ReplyLayout layout;
  size_t at = sizeof(FrameHeader) + rows.size() * sizeof(OperationReply);
  for (const ReplyRows& one : rows) {
    at = rounded_up(at, kFrameAlignment);
    require_frame(one.rows_bytes + one.present_bytes < kMaxBytes - at, "it asks for more rows than any memory holds");
    layout.rows.push_back(at);
    at += one.rows_bytes + one.present_bytes;
  }
  layout.end = at;
  return layout;
}

size_t max_reply_bytes(const ReplyLayout& layout) {
  return rounded_up(layout.end + layout.rows.size() * kRefusalRoom, kFrameAlignment);
}

namespace {

// Writes replies to operations one after another; their rows start at `end`.
class ReplyWriter {
 public:
  ReplyWriter(char* frame, size_t room, uint64_t number, size_t count, size_t end)
      : frame_(frame), room_(room), number_(number), count_(count), end_(end) {}

  void done(const Done& done, const ReplyRows& rows, size_t offset) {
    OperationReply reply;
    reply.created = done.created;
    reply.writes = done.writes;
    reply.flags = static_cast<uint8_t>((done.duplicate ? kDuplicate : 0) | (rows.present_bytes != 0 ? kHasPresent : 0));
    reply.offset = offset;
    reply.bytes = rows.rows_bytes + rows.present_bytes;
    put(reply);
  }

  void refused(const Fault& fault) {
    const size_t left = (room_ - end_) / (count_ - written_);  // later refusals have texts, too
    const std::string_view name = cut(fault.name, std::min(left, kMaxText));
    const std::string_view message = cut(fault.message, left - name.size());
    OperationReply reply;
    reply.is_refused = 1;
    reply.retry_after_seconds = fault.retry_after_seconds;
    reply.name_bytes = static_cast<uint16_t>(name.size());
    reply.bytes = name.size() + message.size();
    reply.offset = end_;
    Writer writer(frame_ + end_);
    writer.put(name.data(), name.size());
    writer.put(message.data(), message.size());
    end_ += reply.bytes;
    put(reply);
  }

  // Returns the bytes of the frame.
  size_t finish() {
    FrameHeader whole;
    whole.kind = FrameKind::reply;
    whole.num_operations = static_cast<uint32_t>(count_);
    whole.number = number_;
    whole.body_bytes = end_ - sizeof(FrameHeader);
    write_header(frame_, whole);
    return end_;
  }

 private:
  void put(OperationReply& reply) {
    reply.check = checksum_of(number_, reply);
    std::memcpy(frame_ + sizeof(FrameHeader) + written_++ * sizeof(OperationReply), &reply, sizeof(reply));
  }

  char* const frame_;
  const size_t room_;
  const uint64_t number_;
  const size_t count_;
  size_t end_, written_ = 0;
};

static_assert(kMinRefusalBytes == sizeof(FrameHeader) + sizeof(OperationReply) &&
              kMaxRefusalBytes == kMinRefusalBytes + kRefusalRoom);

size_t reply_headers(size_t count) { return sizeof(FrameHeader) + count * sizeof(OperationReply); }

}  // namespace

size_t write_reply(char* frame, size_t room, const ReplyLayout& layout, uint64_t number,
                   std::span<const ReplyResult> results) {
  // Room of refused pulls is not part of the reply, unless rows of others lie behind it.
  size_t end = reply_headers(results.size());
  for (size_t i = 0; i < results.size(); ++i)
    if (std::holds_alternative<Done>(results[i].outcome))
      end = std::max(end, layout.rows[i] + results[i].rows.rows_bytes + results[i].rows.present_bytes);
  ReplyWriter writer(frame, room, number, results.size(), end);
  for (size_t i = 0; i < results.size(); ++i) {
    if (const auto* done = std::get_if<Done>(&results[i].outcome)) writer.done(*done, results[i].rows, layout.rows[i]);
    else writer.refused(std::get<Fault>(results[i].outcome));
  }
  return writer.finish();
}

size_t write_refusal(char* frame, size_t room, uint64_t number, size_t count, const Fault& fault) noexcept {
  ReplyWriter writer(frame, room, number, count, reply_headers(count));
  for (size_t i = 0; i < count; ++i) writer.refused(fault);
  return writer.finish();
}

std::vector<ParsedReply> parse_reply(const char* data, size_t bytes, uint64_t number, std::span<const ReplyRows> rows) {
  require_frame(bytes >= sizeof(FrameHeader), "it is shorter than its header");
  const FrameHeader header = parse_header(data, FrameKind::reply);
  require_frame(header.body_bytes == bytes - sizeof(FrameHeader), "its size differs from its header's");
  require_frame(header.number == number, "it answers another call");
  const size_t count = header.num_operations;
  require_frame(count == rows.size() || count == 1, "it answers another number of operations");
  const size_t first = sizeof(FrameHeader) + count * sizeof(OperationReply);
  require_frame(first <= bytes, "an operation's reply is missing");
  std::vector<ParsedReply> replies(count);
  for (size_t i = 0; i < count; ++i) {
    const auto reply = copied<OperationReply>(data + sizeof(FrameHeader) + i * sizeof(OperationReply));
    require_frame(reply.check == checksum_of(number, reply), "a reply's checksum is wrong");
    require_frame(reply.offset >= first && reply.offset <= bytes && reply.bytes <= bytes - reply.offset,
                  "an operation's rows or error lie outside the frame");
    require_frame(reply.is_refused <= 1 && (reply.flags & ~(kDuplicate | kHasPresent)) == 0 && reply.reserved == 0 &&
                      reply.reserved2 == 0,
                  "reserved bytes are not 0");
    const char* begin = data + reply.offset;
    if (reply.is_refused != 0) {
      require_frame(reply.name_bytes <= reply.bytes, "an error's name is longer than its text");
      Fault fault(std::string(begin, reply.name_bytes),
                  std::string(begin + reply.name_bytes, reply.bytes - reply.name_bytes), reply.retry_after_seconds);
      require_frame(is_utf8(fault.name) && is_utf8(fault.message), "an error's text is not UTF-8");
      replies[i].outcome = std::move(fault);
      continue;
    }
    require_frame(count == rows.size(), "it answers another number of operations");
    require_frame(reply.bytes == rows[i].rows_bytes + rows[i].present_bytes &&
                      ((reply.flags & kHasPresent) != 0) == (rows[i].present_bytes != 0),
                  "it has other rows than were requested");
    replies[i].outcome = Done{reply.created, (reply.flags & kDuplicate) != 0, reply.writes};
    replies[i].rows = begin;
    replies[i].present =
        rows[i].present_bytes != 0 ? reinterpret_cast<const uint8_t*>(begin) + rows[i].rows_bytes : nullptr;
  }
  replies.resize(rows.size(), replies.front());  // the frame was refused as a whole
  return replies;
}

}  // namespace geartrain
