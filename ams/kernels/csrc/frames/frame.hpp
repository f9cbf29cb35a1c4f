// The frame in which a request for rows travels to a shard, and its reply back: docs/explanation/frames.md.
//
// Readers trust nothing: every header is copied before it is looked at (the memory may be the sender's), every length is compared
// with the frame's size before it is used, and what is wrong is a Fault("ProtocolError").
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

static_assert(std::endian::native == std::endian::little, "frames are little endian, and are copied as they lie in memory");

inline constexpr uint32_t kFrameMagic = 0x46525447;  // "GTRF"
inline constexpr uint16_t kFrameVersion = 1;
inline constexpr size_t kFrameAlignment = 64;  // of rows and of whole operations, counted from the frame's first byte
inline constexpr uint32_t kMostOperations = 1024;
inline constexpr size_t kSecretBytes = 32;  // the body of a hello

enum class FrameKind : uint16_t { request = 1, reply = 2, hello = 3 };

struct FrameHeader {
  uint32_t magic = kFrameMagic;
  uint16_t version = kFrameVersion;
  FrameKind kind = FrameKind::request;
  uint32_t num_operations = 0;
  uint32_t reserved = 0;
  uint64_t number = 0;      // of the call; chosen by the caller, the same in its reply
  uint64_t body_bytes = 0;  // after this header
  int64_t shard_incarnation = 0, cluster_version = 0;
  double seconds = 0;  // that the caller waits for the reply; 0: it does not say
  uint64_t check = 0;
};
static_assert(sizeof(FrameHeader) == 64);

// Of the words of headers and texts, whose bytes are a multiple of 8; `sum` is what to begin with.
uint64_t frame_checksum(uint64_t sum, const char* data, size_t bytes);

// A request for one operation: what is asked, of which table, by whom.
struct Operation {
  CallContext context;  // its shard_incarnation and cluster_version are those of the frame
  std::string table;
  std::variant<PullRequest, PushRequest, AssignRequest> request;
};

// Where in its frame the arrays of an operation lie, and its end (a pull has no rows, and few pushes have occurrences).
struct OperationPlace {
  size_t ids, rows, rows_bytes, occurrences, occurrences_bytes, end;
};

struct RequestLayout {
  std::vector<OperationPlace> places;
  size_t frame_bytes = 0;
};

// Throws Fault("ProtocolError") for what no frame can hold: no operation or too many, texts beyond 65,535 bytes, a `dim` of 0.
RequestLayout lay_out_request(std::span<const Operation> operations);
// `frame` has layout.frame_bytes. Rows whose pointer is null are put by the caller, where `layout` says.
void write_request(char* frame, const RequestLayout& layout, uint64_t number, double seconds, std::span<const Operation> operations);

// A frame's first 64 bytes, checked: kind, magic, version, checksum. `data` has them all.
FrameHeader parse_header(const char* data, FrameKind kind);
void write_header(char* frame, FrameHeader header);

struct ParsedRequest {
  FrameHeader header;
  // Ids point into `ids`, occurrences into `occurrences`, gradients and rows of writes into the frame; a pull's `rows` and `present` are
  // not set, but for `wants_present`.
  std::vector<Operation> operations;
  std::vector<bool> wants_present;
  std::vector<int64_t> ids;  // copied: what was checked of them must still be so when they are used
  std::vector<uint32_t> occurrences;
};
// `data` is a whole frame of `bytes` bytes.
ParsedRequest parse_request(const char* data, size_t bytes);

// What the rows of a reply take for one operation.
struct ReplyRows {
  size_t rows_bytes = 0, present_bytes = 0;
};
// Throws Fault("ProtocolError") if they cannot be counted in 62 bits.
ReplyRows reply_rows(const PullRequest& pull, bool with_present);

struct ReplyLayout {
  std::vector<size_t> rows;  // where those of each operation begin; its present bytes follow them
  size_t end = 0;            // of the last of them
};
// Throws as reply_rows does.
ReplyLayout lay_out_reply(std::span<const ReplyRows> rows);
// Bytes that a reply may take, texts of refusals included.
size_t most_reply_bytes(const ReplyLayout& layout);

struct ReplyResult {
  Outcome outcome;
  ReplyRows rows;  // of a pull that was answered
};
// Writes everything but rows into `frame`, which has `room` bytes; texts that do not fit are cut. Returns the frame's bytes.
// Needs room for layout.end.
size_t write_reply(char* frame, size_t room, const ReplyLayout& layout, uint64_t number, std::span<const ReplyResult> results);
// Bytes of a refusal of a whole frame: at least, and with whatever text.
inline constexpr size_t kLeastRefusalBytes = 128, kMostRefusalBytes = kLeastRefusalBytes + 1024;
// The reply to `count` operations that are all refused so. Takes no memory. Needs room for their headers.
size_t write_refusal(char* frame, size_t room, uint64_t number, size_t count, const Fault& fault) noexcept;

struct ParsedReply {
  Outcome outcome;
  const char* rows = nullptr;        // of a pull: in the frame
  const uint8_t* present = nullptr;  // if asked for
};
// The reply to call `number`, whose operations expect `rows`.
std::vector<ParsedReply> parse_reply(const char* data, size_t bytes, uint64_t number, std::span<const ReplyRows> rows);

}  // namespace geartrain
