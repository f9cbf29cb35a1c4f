#include "frames/frame.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>

namespace geartrain {
namespace {

enum class OperationKind : uint8_t { pull = 1, push = 2, assign = 3 };

constexpr uint16_t kLr = 1, kPresent = 2, kStepGoesOn = 4, kGroup = 8, kRequiredSync = 16;

struct OperationHeader {
  OperationKind kind = OperationKind::pull;
  uint8_t dtype = 0;
  uint16_t flags = 0;
  uint32_t dim = 0;
  uint64_t num_ids = 0;
  int64_t table_incarnation = 0, stream_incarnation = 0, sequence = 0, oldest_unacknowledged = 0;
  double lr = 0, scale = 1;
  int64_t world_size = 0, rank = 0, group_sequence = 0, sample_count = 0;
  uint16_t table_bytes = 0, stream_bytes = 0, job_bytes = 0, num_scalars = 0;
  uint32_t scalars_bytes = 0, reserved = 0;
  uint64_t reserved2 = 0, check = 0;
};
static_assert(sizeof(OperationHeader) == 128);

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

constexpr size_t kMostText = std::numeric_limits<uint16_t>::max();
constexpr size_t kMostBytes = size_t{1} << 62;  // sums of a few of these do not overflow
constexpr size_t kRefusalRoom = 1024;           // for the text of one

[[noreturn]] void refuse(const std::string& what) { throw Fault("ProtocolError", "the frame is damaged: " + what); }

void require_frame(bool condition, const char* what) {
  if (!condition) refuse(what);
}

constexpr size_t rounded_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Reads once: afterwards whoever shares the memory can change nothing that was looked at.
template <class T>
T copied(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  asm volatile("" : : "r"(&value) : "memory");
  return value;
}

template <class Header>
uint64_t checksum_of(uint64_t number, const Header& header) {
  return frame_checksum(number, reinterpret_cast<const char*>(&header), sizeof(Header) - sizeof(uint64_t));
}

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

// The first `most` bytes of UTF-8 text, or a few less: no character is cut.
std::string_view cut(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  while (most != 0 && (static_cast<uint8_t>(text[most]) & 0xC0) == 0x80) --most;
  return text.substr(0, most);
}

size_t checked_text(const std::string& text, const char* what) {
  if (text.size() > kMostText) throw Fault("ProtocolError", std::string(what) + " is longer than 65535 bytes");
  return text.size();
}

size_t scalars_bytes(const Scalars& scalars) {
  size_t bytes = 0;
  for (const auto& [name, value] : scalars) bytes += sizeof(double) + sizeof(uint16_t) + checked_text(name, "the name of a scalar");
  return bytes;
}

size_t row_bytes_of(int64_t dim, DType dtype) {
  if (dim < 1 || dim > std::numeric_limits<uint32_t>::max()) throw Fault("ProtocolError", "rows of a frame have 1 to 4294967295 numbers");
  return static_cast<size_t>(dim) * item_bytes(dtype);
}

OperationHeader header_of(const Operation& operation) {
  OperationHeader header;
  const CallContext& context = operation.context;
  header.table_incarnation = context.table_incarnation;
  header.stream_incarnation = context.incarnation;
  header.sequence = context.sequence;
  header.oldest_unacknowledged = context.oldest_unacknowledged;
  header.table_bytes = static_cast<uint16_t>(checked_text(operation.table, "the name of a table"));
  header.stream_bytes = static_cast<uint16_t>(checked_text(context.stream, "the name of a stream"));
  const auto rows_of = [&](const auto& request) {
    header.dtype = static_cast<uint8_t>(request.dtype);
    row_bytes_of(request.dim, request.dtype);
    header.dim = static_cast<uint32_t>(request.dim);
    header.num_ids = static_cast<uint64_t>(request.count);
  };
  const auto group_of = [&](const std::optional<SyncGroup>& group, uint16_t flag) {
    if (!group) return;
    header.flags |= flag;
    header.job_bytes = static_cast<uint16_t>(checked_text(group->job, "the name of a job"));
    header.world_size = group->world_size;
    header.rank = group->rank;
    header.group_sequence = group->sequence;
    header.sample_count = group->sample_count;
  };
  if (const auto* pull = std::get_if<PullRequest>(&operation.request)) {
    header.kind = OperationKind::pull;
    rows_of(*pull);
    header.dtype = static_cast<uint8_t>(pull->wire_dtype());
    if (pull->present != nullptr) header.flags |= kPresent;
    group_of(pull->required_sync, kRequiredSync);
  } else if (const auto* push = std::get_if<PushRequest>(&operation.request)) {
    header.kind = OperationKind::push;
    rows_of(*push);
    header.scale = push->scale;
    if (push->lr) header.flags |= kLr;
    header.lr = push->lr.value_or(0);
    if (push->step_goes_on) header.flags |= kStepGoesOn;
    group_of(push->group, kGroup);
    if (push->scalars.size() > kMostText) throw Fault("ProtocolError", "a push has more than 65535 scalars");
    header.num_scalars = static_cast<uint16_t>(push->scalars.size());
    header.scalars_bytes = static_cast<uint32_t>(scalars_bytes(push->scalars));
  } else {
    header.kind = OperationKind::assign;
    rows_of(std::get<AssignRequest>(operation.request));
  }
  return header;
}

size_t texts_bytes(const OperationHeader& header) {
  return size_t{header.table_bytes} + header.stream_bytes + header.job_bytes + header.scalars_bytes;
}

// Writes pieces one after the other.
class Writer {
 public:
  explicit Writer(char* at) : at_(at) {}
  void put(const void* data, size_t bytes) {
    if (bytes != 0) std::memcpy(at_, data, bytes);
    at_ += bytes;
  }
  void zero_to(char* end) {
    std::memset(at_, 0, static_cast<size_t>(end - at_));
    at_ = end;
  }

 private:
  char* at_;
};

void write_texts(char* at, const Operation& operation, size_t padded_bytes) {
  Writer writer(at);
  writer.put(operation.table.data(), operation.table.size());
  writer.put(operation.context.stream.data(), operation.context.stream.size());
  const auto* push = std::get_if<PushRequest>(&operation.request);
  const auto* pull = std::get_if<PullRequest>(&operation.request);
  const std::optional<SyncGroup>* group = push != nullptr ? &push->group : pull != nullptr ? &pull->required_sync : nullptr;
  if (group != nullptr && *group) writer.put((*group)->job.data(), (*group)->job.size());
  if (push != nullptr) {
    for (const auto& [name, value] : push->scalars) {
      const auto bytes = static_cast<uint16_t>(name.size());
      writer.put(&value, sizeof(value));
      writer.put(&bytes, sizeof(bytes));
      writer.put(name.data(), name.size());
    }
  }
  writer.zero_to(at + padded_bytes);
}

std::pair<const int64_t*, const char*> arrays_of(const Operation& operation) {
  if (const auto* push = std::get_if<PushRequest>(&operation.request)) return {push->ids, push->gradients};
  if (const auto* assign = std::get_if<AssignRequest>(&operation.request)) return {assign->ids, assign->rows};
  return {std::get<PullRequest>(operation.request).ids, nullptr};
}

// The pieces of a frame that is being read, one after the other; what is not there is refused.
class Reader {
 public:
  Reader(const char* data, size_t bytes) : data_(data), bytes_(bytes) {}
  const char* take(size_t bytes, const char* what) {
    require_frame(bytes <= bytes_ - at_, what);
    const char* begin = data_ + at_;
    at_ += bytes;
    return begin;
  }
  void align(size_t to) { take(rounded_up(at_, to) - at_, "it ends too early"); }
  size_t left() const { return bytes_ - at_; }

 private:
  const char* data_;
  size_t bytes_, at_ = 0;
};

// Cuts names and scalars out of the texts of an operation, which are our own copy.
class Texts {
 public:
  explicit Texts(std::string_view texts) : left_(texts) {}
  std::string name(size_t bytes) {
    const std::string_view text = take(bytes);
    require_frame(is_utf8(text), "a name is not UTF-8");
    return std::string(text);
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }

 private:
  std::string_view take(size_t bytes) {
    require_frame(bytes <= left_.size(), "a text is longer than all texts together");
    const std::string_view taken = left_.substr(0, bytes);
    left_.remove_prefix(bytes);
    return taken;
  }
  std::string_view left_;
};

uint16_t flags_of_kind(OperationKind kind) {
  switch (kind) {
    case OperationKind::pull: return kPresent | kRequiredSync;
    case OperationKind::push: return kLr | kStepGoesOn | kGroup;
    case OperationKind::assign: return 0;
  }
  refuse("an operation is neither pull, push nor assign");
}

void check_header(const OperationHeader& header) {
  require_frame((header.flags & ~flags_of_kind(header.kind)) == 0, "an operation has a flag that its kind does not have");
  require_frame(header.dtype < kNumDTypes, "an operation has an unknown dtype");
  require_frame(header.dim >= 1, "rows have no columns");
  require_frame(header.reserved == 0 && header.reserved2 == 0, "reserved bytes are not 0");
  require_frame(header.kind == OperationKind::push || (header.num_scalars == 0 && header.scalars_bytes == 0),
                "an operation other than a push has scalars");
  require_frame((header.flags & (kGroup | kRequiredSync)) != 0 || header.job_bytes == 0, "a job is named without a group");
}

// Headers and texts of one operation; its arrays are null, its count is that of the header.
Operation parse_operation(Reader& reader, const FrameHeader& frame, bool& wants_present) {
  const auto header = copied<OperationHeader>(reader.take(sizeof(OperationHeader), "an operation's header is not there"));
  const size_t bytes = rounded_up(texts_bytes(header), 8);
  const char* theirs = reader.take(bytes, "texts are longer than the frame");
  std::string texts(theirs, bytes);
  asm volatile("" : : "r"(texts.data()) : "memory");
  require_frame(header.check == frame_checksum(checksum_of(frame.number, header), texts.data(), bytes), "an operation's checksum is wrong");
  check_header(header);
  Texts names(texts);
  Operation operation;
  operation.table = names.name(header.table_bytes);
  CallContext& context = operation.context;
  context.stream = names.name(header.stream_bytes);
  context.incarnation = header.stream_incarnation;
  context.sequence = header.sequence;
  context.oldest_unacknowledged = header.oldest_unacknowledged;
  context.table_incarnation = header.table_incarnation;
  context.shard_incarnation = frame.shard_incarnation;
  context.cluster_version = frame.cluster_version;
  std::optional<SyncGroup> group;
  if ((header.flags & (kGroup | kRequiredSync)) != 0)
    group = SyncGroup{names.name(header.job_bytes), header.world_size, header.rank, header.group_sequence, header.sample_count};
  const auto rows_of = [&](auto& request) {
    request.count = static_cast<int64_t>(header.num_ids);
    request.dim = header.dim;
    request.dtype = static_cast<DType>(header.dtype);
  };
  if (header.kind == OperationKind::pull) {
    PullRequest pull;
    rows_of(pull);
    pull.size = pull.count;
    pull.required_sync = std::move(group);
    wants_present = (header.flags & kPresent) != 0;
    operation.request = std::move(pull);
  } else if (header.kind == OperationKind::push) {
    PushRequest push;
    rows_of(push);
    if ((header.flags & kLr) != 0) push.lr = header.lr;
    push.scale = header.scale;
    push.step_goes_on = (header.flags & kStepGoesOn) != 0;
    push.group = std::move(group);
    const size_t before = texts_bytes(header) - header.scalars_bytes;
    Texts scalars(std::string_view(texts).substr(before, header.scalars_bytes));
    size_t used = 0;
    for (uint16_t i = 0; i < header.num_scalars; ++i) {
      const double value = scalars.number<double>();
      const auto name_bytes = scalars.number<uint16_t>();
      push.scalars.emplace_back(scalars.name(name_bytes), value);
      used += sizeof(double) + sizeof(uint16_t) + name_bytes;
    }
    require_frame(used == header.scalars_bytes, "scalars do not fill their place");
    operation.request = std::move(push);
  } else {
    AssignRequest assign;
    rows_of(assign);
    operation.request = std::move(assign);
  }
  return operation;
}

}  // namespace

// Chained splitmix64 over 8-byte words: each step is a bijection of the sum so far, so that no change of a single word is missed.
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
  if (header.magic != kFrameMagic) throw Fault("ProtocolError", "this is no frame: it does not begin with \"GTRF\"");
  if (header.version != kFrameVersion)
    throw Fault("ProtocolError", "the frame is of version " + std::to_string(header.version) + "; this is version " +
                                     std::to_string(kFrameVersion) + ": use the same release on both ends");
  require_frame(header.check == checksum_of(0, header), "the header's checksum is wrong");
  require_frame(header.kind == kind, "it is of another kind than is due");
  require_frame(header.reserved == 0, "reserved bytes are not 0");
  require_frame(header.body_bytes < kMostBytes, "no memory is as large");
  return header;
}

RequestLayout lay_out_request(std::span<const Operation> operations) {
  if (operations.empty() || operations.size() > kMostOperations)
    throw Fault("ProtocolError", "a frame holds 1 to " + std::to_string(kMostOperations) + " operations");
  RequestLayout layout;
  size_t at = sizeof(FrameHeader);
  for (const Operation& operation : operations) {
    const OperationHeader header = header_of(operation);
    at += sizeof(OperationHeader) + rounded_up(texts_bytes(header), 8);
    const size_t ids = at;
    at = rounded_up(at + header.num_ids * sizeof(int64_t), kFrameAlignment);
    const bool has_rows = header.kind != OperationKind::pull;
    const size_t rows_bytes = has_rows ? header.num_ids * header.dim * item_bytes(static_cast<DType>(header.dtype)) : 0;
    layout.places.push_back({ids, at, rows_bytes});
    at = rounded_up(at + rows_bytes, kFrameAlignment);
  }
  layout.frame_bytes = at;
  return layout;
}

void write_request_headers(char* frame, const RequestLayout& layout, uint64_t number, double seconds,
                           std::span<const Operation> operations) {
  FrameHeader whole;
  whole.kind = FrameKind::request;
  whole.num_operations = static_cast<uint32_t>(operations.size());
  whole.number = number;
  whole.body_bytes = layout.frame_bytes - sizeof(FrameHeader);
  whole.shard_incarnation = operations.front().context.shard_incarnation;
  whole.cluster_version = operations.front().context.cluster_version;
  whole.seconds = seconds;
  write_header(frame, whole);
  size_t begin = sizeof(FrameHeader);
  for (size_t i = 0; i < operations.size(); ++i) {
    OperationHeader header = header_of(operations[i]);
    const OperationPlace& place = layout.places[i];
    char* texts = frame + begin + sizeof(OperationHeader);
    const size_t bytes = place.ids - begin - sizeof(OperationHeader);
    write_texts(texts, operations[i], bytes);
    header.check = frame_checksum(checksum_of(number, header), texts, bytes);
    std::memcpy(frame + begin, &header, sizeof(header));
    begin = rounded_up(place.rows + place.rows_bytes, kFrameAlignment);
  }
}

void write_request(char* frame, const RequestLayout& layout, uint64_t number, double seconds,
                   std::span<const Operation> operations) {
  write_request_headers(frame, layout, number, seconds, operations);
  for (size_t i = 0; i < operations.size(); ++i) {
    const OperationPlace& place = layout.places[i];
    const auto [ids, rows] = arrays_of(operations[i]);
    const int64_t count = std::visit([](const auto& request) { return request.count; }, operations[i].request);
    Writer writer(frame + place.ids);
    writer.put(ids, static_cast<size_t>(count) * sizeof(int64_t));
    writer.zero_to(frame + place.rows);
    writer.put(rows, place.rows_bytes);
    writer.zero_to(frame + rounded_up(place.rows + place.rows_bytes, kFrameAlignment));
  }
}

ParsedRequest parse_request(const char* data, size_t bytes) {
  Reader reader(data, bytes);
  ParsedRequest request;
  request.header = parse_header(reader.take(sizeof(FrameHeader), "it is shorter than its header"), FrameKind::request);
  require_frame(request.header.body_bytes == reader.left(), "its header tells another size");
  const uint32_t count = request.header.num_operations;
  require_frame(count >= 1 && count <= kMostOperations, "it holds no operation, or too many");
  std::vector<const char*> ids(count);
  size_t num_ids = 0;
  for (uint32_t i = 0; i < count; ++i) {
    bool wants_present = false;
    request.operations.push_back(parse_operation(reader, request.header, wants_present));
    request.wants_present.push_back(wants_present);
    std::visit(
        [&](auto& one) {
          const auto claimed = static_cast<uint64_t>(one.count);
          require_frame(claimed <= reader.left() / sizeof(int64_t), "ids are more than the frame holds");
          ids[i] = reader.take(claimed * sizeof(int64_t), "ids are more than the frame holds");
          num_ids += claimed;
          reader.align(kFrameAlignment);
          const size_t row_bytes = static_cast<size_t>(one.dim) * item_bytes(one.dtype);
          if constexpr (!std::is_same_v<std::decay_t<decltype(one)>, PullRequest>) {
            require_frame(claimed <= reader.left() / row_bytes, "rows are more than the frame holds");
            const char* rows = reader.take(claimed * row_bytes, "rows are more than the frame holds");
            if constexpr (std::is_same_v<std::decay_t<decltype(one)>, PushRequest>) one.gradients = rows;
            else one.rows = rows;
            reader.align(kFrameAlignment);
          } else {
            reply_rows(one, true);
          }
        },
        request.operations.back().request);
  }
  require_frame(reader.left() == 0, "bytes follow its last operation");
  request.ids.resize(num_ids);
  int64_t* next = request.ids.data();
  for (uint32_t i = 0; i < count; ++i) {
    std::visit(
        [&](auto& one) {
          if (one.count != 0) std::memcpy(next, ids[i], static_cast<size_t>(one.count) * sizeof(int64_t));
          one.ids = next;
          next += one.count;
        },
        request.operations[i].request);
  }
  return request;
}

ReplyRows reply_rows(const PullRequest& pull, bool with_present) {
  const size_t row_bytes = row_bytes_of(pull.dim, pull.wire_dtype());
  const auto count = static_cast<uint64_t>(pull.count);
  require_frame(count <= (kMostBytes >> 12) / (row_bytes + 1), "it asks for more rows than any memory holds");
  return {count * row_bytes, with_present ? count : 0};
}

ReplyLayout lay_out_reply(std::span<const ReplyRows> rows) {
  ReplyLayout layout;
  size_t at = sizeof(FrameHeader) + rows.size() * sizeof(OperationReply);
  for (const ReplyRows& one : rows) {
    at = rounded_up(at, kFrameAlignment);
    require_frame(one.rows_bytes + one.present_bytes < kMostBytes - at, "it asks for more rows than any memory holds");
    layout.rows.push_back(at);
    at += one.rows_bytes + one.present_bytes;
  }
  layout.end = at;
  return layout;
}

size_t most_reply_bytes(const ReplyLayout& layout) {
  return rounded_up(layout.end + layout.rows.size() * kRefusalRoom, kFrameAlignment);
}

namespace {

// Writes operations' replies one after the other, from `end` on what they bring.
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
    const size_t left = (room_ - end_) / (count_ - written_);  // the refusals behind this one have texts, too
    const std::string_view name = cut(fault.name, std::min(left, kMostText));
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

  // The frame's bytes.
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

static_assert(kLeastRefusalBytes == sizeof(FrameHeader) + sizeof(OperationReply) && kMostRefusalBytes == kLeastRefusalBytes + kRefusalRoom);

size_t reply_headers(size_t count) { return sizeof(FrameHeader) + count * sizeof(OperationReply); }

}  // namespace

size_t write_reply(char* frame, size_t room, const ReplyLayout& layout, uint64_t number, std::span<const ReplyResult> results) {
  // Room of pulls that were refused is not part of the reply, unless others' rows lie behind it.
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
  require_frame(header.body_bytes == bytes - sizeof(FrameHeader), "its header tells another size");
  require_frame(header.number == number, "it answers another call");
  const size_t count = header.num_operations;
  require_frame(count == rows.size() || count == 1, "it answers another number of operations");
  const size_t first = sizeof(FrameHeader) + count * sizeof(OperationReply);
  require_frame(first <= bytes, "an operation's reply is not there");
  std::vector<ParsedReply> replies(count);
  for (size_t i = 0; i < count; ++i) {
    const auto reply = copied<OperationReply>(data + sizeof(FrameHeader) + i * sizeof(OperationReply));
    require_frame(reply.check == checksum_of(number, reply), "a reply's checksum is wrong");
    require_frame(reply.offset >= first && reply.offset <= bytes && reply.bytes <= bytes - reply.offset,
                  "what an operation brought is not in the frame");
    require_frame(reply.is_refused <= 1 && (reply.flags & ~(kDuplicate | kHasPresent)) == 0 && reply.reserved == 0 &&
                      reply.reserved2 == 0,
                  "reserved bytes are not 0");
    const char* begin = data + reply.offset;
    if (reply.is_refused != 0) {
      require_frame(reply.name_bytes <= reply.bytes, "an error's name is longer than its text");
      Fault fault(std::string(begin, reply.name_bytes), std::string(begin + reply.name_bytes, reply.bytes - reply.name_bytes),
                  reply.retry_after_seconds);
      require_frame(is_utf8(fault.name) && is_utf8(fault.message), "an error's text is not UTF-8");
      replies[i].outcome = std::move(fault);
      continue;
    }
    require_frame(count == rows.size(), "it answers another number of operations");
    require_frame(reply.bytes == rows[i].rows_bytes + rows[i].present_bytes &&
                      ((reply.flags & kHasPresent) != 0) == (rows[i].present_bytes != 0),
                  "other rows came than were asked for");
    replies[i].outcome = Done{reply.created, (reply.flags & kDuplicate) != 0, reply.writes};
    replies[i].rows = begin;
    replies[i].present = rows[i].present_bytes != 0 ? reinterpret_cast<const uint8_t*>(begin) + rows[i].rows_bytes : nullptr;
  }
  replies.resize(rows.size(), replies.front());  // the frame was refused as a whole
  return replies;
}

}  // namespace geartrain
