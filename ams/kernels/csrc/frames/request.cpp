// Request: a frame of operations, written and read.
#include <cstring>
#include <string_view>

#include "frames/pieces.hpp"

namespace geartrain {
namespace {

enum class OperationKind : uint8_t { pull = 1, push = 2, assign = 3 };

constexpr uint16_t kLr = 1, kPresent = 2, kStepGoesOn = 4, kGroup = 8, kRequiredSync = 16, kStep = 32,
                   kUnixSeconds = 64, kPulledAt = 128, kOccurrences = 256;
constexpr uint16_t kBatch = kStep | kUnixSeconds | kPulledAt;  // any of these flags: a BatchNumbers follows the scalars

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

struct BatchNumbers {
  int64_t step = 0;
  double unix_seconds = 0;
  int64_t pulled_at = 0;
};
static_assert(sizeof(BatchNumbers) == 24);

size_t checked_text(const std::string& text, const char* what) {
  if (text.size() > kMaxText) throw Fault("ProtocolError", std::string(what) + " is longer than 65535 bytes");
  return text.size();
}

size_t scalars_bytes(const Scalars& scalars) {
  size_t bytes = 0;
  for (const auto& [name, value] : scalars)
    bytes += sizeof(double) + sizeof(uint16_t) + checked_text(name, "the name of a scalar");
  return bytes;
}

uint16_t flags_of(const BatchFacts& batch) {
  return static_cast<uint16_t>((batch.step ? kStep : 0) | (batch.unix_seconds ? kUnixSeconds : 0) |
                               (batch.pulled_at ? kPulledAt : 0) | (batch.occurrences != nullptr ? kOccurrences : 0));
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
    if (push->scalars.size() > kMaxText) throw Fault("ProtocolError", "a push has more than 65535 scalars");
    header.num_scalars = static_cast<uint16_t>(push->scalars.size());
    header.scalars_bytes = static_cast<uint32_t>(scalars_bytes(push->scalars));
    header.flags |= flags_of(push->batch);
  } else {
    header.kind = OperationKind::assign;
    rows_of(std::get<AssignRequest>(operation.request));
  }
  return header;
}

size_t texts_bytes(const OperationHeader& header) {
  return size_t{header.table_bytes} + header.stream_bytes + header.job_bytes + header.scalars_bytes +
         ((header.flags & kBatch) != 0 ? sizeof(BatchNumbers) : 0);
}

void write_texts(char* at, const Operation& operation, size_t padded_bytes) {
  Writer writer(at);
  writer.put(operation.table.data(), operation.table.size());
  writer.put(operation.context.stream.data(), operation.context.stream.size());
  const auto* push = std::get_if<PushRequest>(&operation.request);
  const auto* pull = std::get_if<PullRequest>(&operation.request);
  const std::optional<SyncGroup>* group = push != nullptr   ? &push->group
                                          : pull != nullptr ? &pull->required_sync
                                                            : nullptr;
  if (group != nullptr && *group) writer.put((*group)->job.data(), (*group)->job.size());
  if (push != nullptr) {
    for (const auto& [name, value] : push->scalars) {
      const auto bytes = static_cast<uint16_t>(name.size());
      writer.put(&value, sizeof(value));
      writer.put(&bytes, sizeof(bytes));
      writer.put(name.data(), name.size());
    }
    if ((flags_of(push->batch) & kBatch) != 0) {
      const BatchFacts& batch = push->batch;
      const BatchNumbers numbers{batch.step.value_or(0), batch.unix_seconds.value_or(0), batch.pulled_at.value_or(0)};
      writer.put(&numbers, sizeof(numbers));
    }
  }
  writer.zero_to(at + padded_bytes);
}

struct Arrays {
  const int64_t* ids;
  const char* rows;
  const uint32_t* occurrences;
};

Arrays arrays_of(const Operation& operation) {
  if (const auto* push = std::get_if<PushRequest>(&operation.request))
    return {push->ids, push->gradients, push->batch.occurrences};
  if (const auto* assign = std::get_if<AssignRequest>(&operation.request)) return {assign->ids, assign->rows, nullptr};
  return {std::get<PullRequest>(operation.request).ids, nullptr, nullptr};
}

// Cuts names and scalars out of an operation's texts, which are copied already.
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
    require_frame(bytes <= left_.size(), "a text is longer than the texts together");
    const std::string_view taken = left_.substr(0, bytes);
    left_.remove_prefix(bytes);
    return taken;
  }
  std::string_view left_;
};

uint16_t flags_of_kind(OperationKind kind) {
  switch (kind) {
    case OperationKind::pull: return kPresent | kRequiredSync;
    case OperationKind::push: return kLr | kStepGoesOn | kGroup | kBatch | kOccurrences;
    case OperationKind::assign: return 0;
  }
  refuse("an operation is neither pull, push nor assign");
}

void check_header(const OperationHeader& header) {
  require_frame((header.flags & ~flags_of_kind(header.kind)) == 0,
                "an operation has a flag that its kind does not have");
  require_frame(header.dtype < kNumDTypes, "an operation has an unknown dtype");
  require_frame(header.dim >= 1, "rows have no columns");
  require_frame(header.reserved == 0 && header.reserved2 == 0, "reserved bytes are not 0");
  require_frame(header.kind == OperationKind::push || (header.num_scalars == 0 && header.scalars_bytes == 0),
                "an operation other than a push has scalars");
  require_frame((header.flags & (kGroup | kRequiredSync)) != 0 || header.job_bytes == 0,
                "an operation without a group names a job");
}

// Headers and texts of one operation; its arrays are null, its count is that of the header.
Operation parse_operation(Reader& reader, const FrameHeader& frame, bool& wants_present, bool& has_occurrences) {
  const auto header = copied<OperationHeader>(reader.take(sizeof(OperationHeader), "an operation's header is missing"));
  const size_t bytes = rounded_up(texts_bytes(header), 8);
  const char* theirs = reader.take(bytes, "texts are longer than the frame");
  std::string texts(theirs, bytes);
  asm volatile("" : : "r"(texts.data()) : "memory");
  require_frame(header.check == frame_checksum(checksum_of(frame.number, header), texts.data(), bytes),
                "an operation's checksum is wrong");
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
    group = SyncGroup{names.name(header.job_bytes), header.world_size, header.rank, header.group_sequence,
                      header.sample_count};
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
    const size_t before = size_t{header.table_bytes} + header.stream_bytes + header.job_bytes;
    Texts scalars(std::string_view(texts).substr(before, header.scalars_bytes));
    size_t used = 0;
    for (uint16_t i = 0; i < header.num_scalars; ++i) {
      const double value = scalars.number<double>();
      const auto name_bytes = scalars.number<uint16_t>();
      push.scalars.emplace_back(scalars.name(name_bytes), value);
      used += sizeof(double) + sizeof(uint16_t) + name_bytes;
    }
    require_frame(used == header.scalars_bytes, "scalars are shorter than their header says");
    if ((header.flags & kBatch) != 0) {
      const auto numbers = Texts(std::string_view(texts).substr(before + header.scalars_bytes)).number<BatchNumbers>();
      if ((header.flags & kStep) != 0) push.batch.step = numbers.step;
      if ((header.flags & kUnixSeconds) != 0) push.batch.unix_seconds = numbers.unix_seconds;
      if ((header.flags & kPulledAt) != 0) push.batch.pulled_at = numbers.pulled_at;
    }
    has_occurrences = (header.flags & kOccurrences) != 0;
    operation.request = std::move(push);
  } else {
    AssignRequest assign;
    rows_of(assign);
    operation.request = std::move(assign);
  }
  return operation;
}

}  // namespace

RequestLayout lay_out_request(std::span<const Operation> operations) {
  if (operations.empty() || operations.size() > kMaxOperations)
    throw Fault("ProtocolError", "a frame holds 1 to " + std::to_string(kMaxOperations) + " operations");
  RequestLayout layout;
  size_t at = sizeof(FrameHeader);
  for (const Operation& operation : operations) {
    const OperationHeader header = header_of(operation);
    at += sizeof(OperationHeader) + rounded_up(texts_bytes(header), 8);
    const size_t ids = at;
    at = rounded_up(at + header.num_ids * sizeof(int64_t), kFrameAlignment);
    const bool has_rows = header.kind != OperationKind::pull;
    const size_t rows_bytes = has_rows ? header.num_ids * header.dim * item_bytes(static_cast<DType>(header.dtype)) : 0;
    const size_t rows = at, occurrences = rounded_up(rows + rows_bytes, kFrameAlignment);
    const size_t occurrences_bytes = (header.flags & kOccurrences) != 0 ? header.num_ids * sizeof(uint32_t) : 0;
    at = rounded_up(occurrences + occurrences_bytes, kFrameAlignment);
    layout.places.push_back({ids, rows, rows_bytes, occurrences, occurrences_bytes, at});
  }
  layout.frame_bytes = at;
  return layout;
}

void write_request(char* frame, const RequestLayout& layout, uint64_t number, double seconds,
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
    begin = place.end;
    const auto [ids, rows, occurrences] = arrays_of(operations[i]);
    Writer writer(frame + place.ids);
    writer.put(ids, static_cast<size_t>(header.num_ids) * sizeof(int64_t));
    writer.zero_to(frame + place.rows);
    writer.put(rows, place.rows_bytes);
    writer.zero_to(frame + place.occurrences);
    writer.put(occurrences, place.occurrences_bytes);
    writer.zero_to(frame + place.end);
  }
}

ParsedRequest parse_request(const char* data, size_t bytes) {
  Reader reader(data, bytes);
  ParsedRequest request;
  request.header = parse_header(reader.take(sizeof(FrameHeader), "it is shorter than its header"), FrameKind::request);
  require_frame(request.header.body_bytes == reader.left(), "its size differs from its header's");
  const uint32_t count = request.header.num_operations;
  require_frame(count >= 1 && count <= kMaxOperations, "it holds no operation, or too many");
  struct Taken {
    const char *ids = nullptr, *occurrences = nullptr;
  };
  std::vector<Taken> taken(count);
  size_t num_ids = 0, num_occurrences = 0;
  bool has_any_occurrences = false;
  for (uint32_t i = 0; i < count; ++i) {
    bool wants_present = false, has_occurrences = false;
    request.operations.push_back(parse_operation(reader, request.header, wants_present, has_occurrences));
    request.wants_present.push_back(wants_present);
    std::visit(
        [&](auto& one) {
          const auto claimed = static_cast<uint64_t>(one.count);
          require_frame(claimed <= reader.left() / sizeof(int64_t), "ids are more than the frame holds");
          taken[i].ids = reader.take(claimed * sizeof(int64_t), "ids are more than the frame holds");
          num_ids += claimed;
          reader.align(kFrameAlignment);
          const size_t row_bytes = static_cast<size_t>(one.dim) * item_bytes(one.dtype);
          if constexpr (!std::is_same_v<std::decay_t<decltype(one)>, PullRequest>) {
            require_frame(claimed <= reader.left() / row_bytes, "rows are more than the frame holds");
            const char* rows = reader.take(claimed * row_bytes, "rows are more than the frame holds");
            if constexpr (std::is_same_v<std::decay_t<decltype(one)>, PushRequest>) one.gradients = rows;
            else one.rows = rows;
            reader.align(kFrameAlignment);
            if (has_occurrences) {
              require_frame(claimed <= reader.left() / sizeof(uint32_t), "occurrences are more than the frame holds");
              taken[i].occurrences =
                  reader.take(claimed * sizeof(uint32_t), "occurrences are more than the frame holds");
              has_any_occurrences = true;
              num_occurrences += claimed;
              reader.align(kFrameAlignment);
            }
          } else {
            reply_rows(one, true);
          }
        },
        request.operations.back().request);
  }
  require_frame(reader.left() == 0, "bytes follow its last operation");
  request.ids.resize(num_ids);
  // so that an empty array has an address, too
  if (has_any_occurrences) request.occurrences.resize(num_occurrences + 1);
  int64_t* next = request.ids.data();
  uint32_t* next_occurrences = request.occurrences.data();
  for (uint32_t i = 0; i < count; ++i) {
    std::visit(
        [&](auto& one) {
          if (one.count != 0) std::memcpy(next, taken[i].ids, static_cast<size_t>(one.count) * sizeof(int64_t));
          one.ids = next;
          next += one.count;
          if constexpr (std::is_same_v<std::decay_t<decltype(one)>, PushRequest>) {
            if (taken[i].occurrences == nullptr) return;
            if (one.count != 0)
              std::memcpy(next_occurrences, taken[i].occurrences, static_cast<size_t>(one.count) * sizeof(uint32_t));
            one.batch.occurrences = next_occurrences;
            next_occurrences += one.count;
          }
        },
        request.operations[i].request);
  }
  return request;
}

}  // namespace geartrain
