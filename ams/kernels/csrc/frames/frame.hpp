// Frame format of row requests and replies: docs/explanation/frames.md.
//
// Readers trust nothing: every header is copied before it is read (the memory may be the sender's), every length is
// compared with the frame's size before use, and errors are a Fault("ProtocolError").
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "calls/call.hpp"

namespace geartrain {

static_assert(std::endian::native == std::endian::little,
              "frames are little endian, and are copied as they lie in memory");

inline constexpr uint32_t kFrameMagic = 0x46525447;  // "GTRF"
inline constexpr uint16_t kFrameVersion = 1;
inline constexpr size_t kFrameAlignment = 64;  // of rows and of whole operations, counted from the frame's first byte
inline constexpr uint32_t kMaxOperations = 1024;
inline constexpr size_t kSecretBytes = 32;  // the body of a hello

enum class FrameKind : uint16_t { request = 1, reply = 2, hello = 3 };

struct FrameHeader {
  uint32_t magic = kFrameMagic;
  uint16_t version = kFrameVersion;
  FrameKind kind = FrameKind::request;
  uint32_t num_operations = 0;
  uint32_t reserved = 0;
  uint64_t number = 0;      // of the call; chosen by the caller, the same in its reply
  uint64_t body_bytes = 0;  // bytes after this header
  int64_t shard_incarnation = 0, cluster_version = 0;
  double seconds = 0;  // time limit of the caller's wait for the reply; 0: unknown
  uint64_t check = 0;
};
static_assert(sizeof(FrameHeader) == 64);

// Checksum of the words of headers and texts, whose bytes are a multiple of 8; `sum` is the start value.
uint64_t frame_checksum(uint64_t sum, const char* data, size_t bytes);

// Request of one operation: arguments, table and caller.
struct Operation {
  CallContext context;  // its shard_incarnation and cluster_version are those of the frame
  std::string table;
  std::variant<PullRequest, PushRequest, AssignRequest> request;
};

// Offsets of an operation's arrays in its frame, and its end (a pull has no rows, and few pushes have occurrences).
struct OperationPlace {
  size_t ids, rows, rows_bytes, occurrences, occurrences_bytes, end;
};

struct RequestLayout {
  std::vector<OperationPlace> places;
  size_t frame_bytes = 0;
};

// Throws Fault("ProtocolError") beyond the format's limits: no operation or too many, texts beyond 65,535 bytes, `dim`
// 0.
RequestLayout lay_out_request(std::span<const Operation> operations);
// `frame` has layout.frame_bytes. Rows whose pointer is null are written by the caller, at `layout`'s offsets.
void write_request(char* frame, const RequestLayout& layout, uint64_t number, double seconds,
                   std::span<const Operation> operations);

// Returns a frame's checked header: kind, magic, version, checksum. `data` has all 64 bytes.
FrameHeader parse_header(const char* data, FrameKind kind);
void write_header(char* frame, FrameHeader header);

struct ParsedRequest {
  FrameHeader header;
  // Ids point into `ids`, occurrences into `occurrences`, gradients and rows of writes into the frame; of a pull only
  // `wants_present` is set.
  std::vector<Operation> operations;
  std::vector<bool> wants_present;
  std::vector<int64_t> ids;  // a copy: ids must not change between their check and their use
  std::vector<uint32_t> occurrences;
};
// `data` is a whole frame of `bytes` bytes.
ParsedRequest parse_request(const char* data, size_t bytes);

// Size of the rows of a reply for one operation.
struct ReplyRows {
  size_t rows_bytes = 0, present_bytes = 0;
};
// Throws Fault("ProtocolError") if it does not fit 62 bits.
ReplyRows reply_rows(const PullRequest& pull, bool with_present);

struct ReplyLayout {
  std::vector<size_t> rows;  // start of each operation's rows, which its present bytes follow
  size_t end = 0;            // end of the last ones
};
// Throws as reply_rows does.
ReplyLayout lay_out_reply(std::span<const ReplyRows> rows);
// Most bytes of a reply, texts of refusals included.
size_t max_reply_bytes(const ReplyLayout& layout);

struct ReplyResult {
  Outcome outcome;
  ReplyRows rows;  // of a pull that succeeded
};
// Writes everything but rows into `frame`, which has `room` bytes; longer texts are cut. Returns the frame's bytes.
// Needs room for layout.end.
size_t write_reply(char* frame, size_t room, const ReplyLayout& layout, uint64_t number,
                   std::span<const ReplyResult> results);
// Least and most bytes of the refusal of a whole frame.
inline constexpr size_t kMinRefusalBytes = 128, kMaxRefusalBytes = kMinRefusalBytes + 1024;
// Writes a reply that refuses all `count` operations. Allocates nothing. Needs room for their headers.
size_t write_refusal(char* frame, size_t room, uint64_t number, size_t count, const Fault& fault) noexcept;

struct ParsedReply {
  Outcome outcome;
  const char* rows = nullptr;        // rows of a pull, in the frame
  const uint8_t* present = nullptr;  // if requested
};
// Parses the reply to call `number`, whose operations expect `rows`.
std::vector<ParsedReply> parse_reply(const char* data, size_t bytes, uint64_t number, std::span<const ReplyRows> rows);

}  // namespace geartrain
