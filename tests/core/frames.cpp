// Frames for the tests, which compare them with what they write and read themselves.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "damage.hpp"
#include "frames/frame.hpp"
#include "bindings/module.hpp"

namespace geartrain {
namespace {

template <class T>
T item(const nb::dict& from, const char* key, T otherwise) {
  return from.contains(key) ? nb::cast<T>(from[key]) : otherwise;
}

std::optional<SyncGroup> group_from(const nb::dict& from, const char* key) {
  if (!from.contains(key)) return std::nullopt;
  const auto group = nb::cast<nb::dict>(from[key]);
  return SyncGroup{nb::cast<std::string>(group["job"]), nb::cast<int64_t>(group["world_size"]),
                   nb::cast<int64_t>(group["rank"]), nb::cast<int64_t>(group["sequence"]),
                   nb::cast<int64_t>(group["sample_count"])};
}

// `ids` and `rows` are bytes.
Operation operation_from(const nb::dict& from) {
  Operation operation;
  CallContext& context = operation.context;
  context.stream = item<std::string>(from, "stream", "");
  context.incarnation = item<int64_t>(from, "incarnation", 0);
  context.sequence = item<int64_t>(from, "sequence", 0);
  context.oldest_unacknowledged = item<int64_t>(from, "oldest_unacknowledged", 0);
  context.table_incarnation = item<int64_t>(from, "table_incarnation", 0);
  context.shard_incarnation = item<int64_t>(from, "shard_incarnation", 0);
  context.cluster_version = item<int64_t>(from, "cluster_version", 0);
  operation.table = nb::cast<std::string>(from["table"]);
  const auto kind = nb::cast<std::string>(from["kind"]);
  const auto ids = nb::cast<nb::bytes>(from["ids"]);
  const auto fill = [&](auto& request) {
    request.ids = reinterpret_cast<const int64_t*>(ids.c_str());
    request.count = static_cast<int64_t>(ids.size() / sizeof(int64_t));
    request.dim = nb::cast<int64_t>(from["dim"]);
    request.dtype = static_cast<DType>(nb::cast<int>(from["dtype"]));
    if constexpr (!std::is_same_v<std::decay_t<decltype(request)>, PullRequest>)
      require(nb::cast<nb::bytes>(from["rows"]).size() ==
                  static_cast<size_t>(request.count * request.dim) * item_bytes(request.dtype),
              "rows must be [N, dim]");
  };
  if (kind == "pull") {
    PullRequest pull;
    fill(pull);
    static uint8_t wanted;
    if (item(from, "with_present", false)) pull.present = &wanted;
    pull.required_sync = group_from(from, "required_sync");
    operation.request = std::move(pull);
  } else if (kind == "push") {
    PushRequest push;
    fill(push);
    push.gradients = nb::cast<nb::bytes>(from["rows"]).c_str();
    if (from.contains("lr")) push.lr = nb::cast<double>(from["lr"]);
    push.scale = item(from, "scale", 1.0);
    push.step_goes_on = item(from, "step_goes_on", false);
    push.group = group_from(from, "group");
    push.scalars = item<Scalars>(from, "scalars", {});
    if (from.contains("step")) push.batch.step = nb::cast<int64_t>(from["step"]);
    if (from.contains("unix_seconds")) push.batch.unix_seconds = nb::cast<double>(from["unix_seconds"]);
    if (from.contains("pulled_at")) push.batch.pulled_at = nb::cast<int64_t>(from["pulled_at"]);
    if (from.contains("occurrences")) {
      const auto occurrences = nb::cast<nb::bytes>(from["occurrences"]);
      require(occurrences.size() == static_cast<size_t>(push.count) * sizeof(uint32_t), "occurrences must be [N]");
      push.batch.occurrences = reinterpret_cast<const uint32_t*>(occurrences.c_str());
    }
    operation.request = std::move(push);
  } else {
    AssignRequest assign;
    fill(assign);
    assign.rows = nb::cast<nb::bytes>(from["rows"]).c_str();
    operation.request = std::move(assign);
  }
  return operation;
}

nb::bytes build_request_frame(uint64_t number, double seconds, const std::vector<nb::dict>& described) {
  std::vector<Operation> operations;
  for (const nb::dict& described_item : described) operations.push_back(operation_from(described_item));
  const RequestLayout layout = lay_out_request(operations);
  std::string frame(layout.frame_bytes, '\xff');
  write_request(frame.data(), layout, number, seconds, operations);
  return nb::bytes(frame.data(), frame.size());
}

nb::dict group_to(const SyncGroup& group) {
  nb::dict to;
  to["job"] = group.job;
  to["world_size"] = group.world_size;
  to["rank"] = group.rank;
  to["sequence"] = group.sequence;
  to["sample_count"] = group.sample_count;
  return to;
}

nb::dict operation_to(const Operation& operation, bool wants_present) {
  nb::dict to;
  const CallContext& context = operation.context;
  to["stream"] = context.stream;
  to["incarnation"] = context.incarnation;
  to["sequence"] = context.sequence;
  to["oldest_unacknowledged"] = context.oldest_unacknowledged;
  to["table_incarnation"] = context.table_incarnation;
  to["shard_incarnation"] = context.shard_incarnation;
  to["cluster_version"] = context.cluster_version;
  to["table"] = operation.table;
  std::visit(
      [&](const auto& request) {
        to["ids"] =
            nb::bytes(reinterpret_cast<const char*>(request.ids), static_cast<size_t>(request.count) * sizeof(int64_t));
        to["dim"] = request.dim;
        to["dtype"] = static_cast<int>(request.dtype);
      },
      operation.request);
  const auto rows = [&](const char* from, int64_t count, int64_t dim, DType dtype) {
    to["rows"] = nb::bytes(from, static_cast<size_t>(count * dim) * item_bytes(dtype));
  };
  if (const auto* pull = std::get_if<PullRequest>(&operation.request)) {
    to["kind"] = "pull";
    to["with_present"] = wants_present;
    if (pull->required_sync) to["required_sync"] = group_to(*pull->required_sync);
  } else if (const auto* push = std::get_if<PushRequest>(&operation.request)) {
    to["kind"] = "push";
    rows(push->gradients, push->count, push->dim, push->dtype);
    if (push->lr) to["lr"] = *push->lr;
    to["scale"] = push->scale;
    to["step_goes_on"] = push->step_goes_on;
    if (push->group) to["group"] = group_to(*push->group);
    to["scalars"] = push->scalars;
    if (push->batch.step) to["step"] = *push->batch.step;
    if (push->batch.unix_seconds) to["unix_seconds"] = *push->batch.unix_seconds;
    if (push->batch.pulled_at) to["pulled_at"] = *push->batch.pulled_at;
    if (push->batch.occurrences != nullptr)
      to["occurrences"] = nb::bytes(reinterpret_cast<const char*>(push->batch.occurrences),
                                    static_cast<size_t>(push->count) * sizeof(uint32_t));
  } else {
    const auto& assign = std::get<AssignRequest>(operation.request);
    to["kind"] = "assign";
    rows(assign.rows, assign.count, assign.dim, assign.dtype);
  }
  return to;
}

nb::tuple parse_request_frame(const nb::bytes& frame) {
  const ParsedRequest request = parse_request(frame.c_str(), frame.size());
  nb::list operations;
  for (size_t i = 0; i < request.operations.size(); ++i)
    operations.append(operation_to(request.operations[i], request.wants_present[i]));
  return nb::make_tuple(request.header.number, request.header.seconds, operations);
}

// Each result: {"rows": bytes, "present": bytes} of a pull, {"created", "duplicate"} of a write, {"error", "message",
// "retry_after_seconds"} of a refusal, which may come with the "rows" that were asked for.
nb::bytes build_reply_frame(uint64_t number, const std::vector<nb::dict>& described, size_t room) {
  std::vector<ReplyRows> sizes;
  for (const nb::dict& described_item : described)
    sizes.push_back(
        {item(described_item, "rows", nb::bytes("")).size(), item(described_item, "present", nb::bytes("")).size()});
  const ReplyLayout layout = lay_out_reply(sizes);
  std::string frame(room == 0 ? max_reply_bytes(layout) : room, '\0');
  require(frame.size() >= layout.end, "room must hold the rows");
  std::vector<ReplyResult> results;
  for (size_t i = 0; i < described.size(); ++i) {
    const nb::dict& described_item = described[i];
    if (described_item.contains("error")) {
      results.push_back(
          {Fault(nb::cast<std::string>(described_item["error"]), nb::cast<std::string>(described_item["message"]),
                 item(described_item, "retry_after_seconds", 0.0)),
           {}});
      continue;
    }
    const nb::bytes rows = item(described_item, "rows", nb::bytes("")),
                    present = item(described_item, "present", nb::bytes(""));
    frame.replace(layout.rows[i], rows.size(), rows.c_str(), rows.size());
    frame.replace(layout.rows[i] + rows.size(), present.size(), present.c_str(), present.size());
    results.push_back({Done{item<int64_t>(described_item, "created", 0), item(described_item, "duplicate", false),
                            item<int64_t>(described_item, "writes", 0)},
                       sizes[i]});
  }
  const size_t bytes = write_reply(frame.data(), frame.size(), layout, number, results);
  return nb::bytes(frame.data(), bytes);
}

nb::list parse_reply_frame(const nb::bytes& frame, uint64_t number,
                           const std::vector<std::pair<size_t, size_t>>& expected) {
  std::vector<ReplyRows> sizes;
  for (const auto& [rows, present] : expected) sizes.push_back({rows, present});
  nb::list replies;
  const std::vector<ParsedReply> parsed = parse_reply(frame.c_str(), frame.size(), number, sizes);
  for (size_t i = 0; i < parsed.size(); ++i) {
    nb::dict to;
    if (const auto* fault = std::get_if<Fault>(&parsed[i].outcome)) {
      to["error"] = fault->name;
      to["message"] = fault->message;
      to["retry_after_seconds"] = fault->retry_after_seconds;
    } else {
      const Done& done = std::get<Done>(parsed[i].outcome);
      to["created"] = done.created;
      to["writes"] = done.writes;
      to["duplicate"] = done.duplicate;
      to["rows"] = nb::bytes(parsed[i].rows, sizes[i].rows_bytes);
      if (parsed[i].present != nullptr)
        to["present"] = nb::bytes(reinterpret_cast<const char*>(parsed[i].present), sizes[i].present_bytes);
    }
    replies.append(to);
  }
  return replies;
}

nb::tuple read_damaged(const nb::bytes& frame, bool is_reply, uint64_t number, int64_t num_operations, uint64_t seed,
                       int64_t count) {
  const std::string whole(frame.c_str(), frame.size());
  WithoutInterpreter release;
  const DamageCounts counts = read_damaged_frames(whole, is_reply, number, num_operations, seed, count);
  WithInterpreter acquire;
  return nb::make_tuple(counts.refused, counts.taken, counts.undamaged);
}

}  // namespace

void bind_frames(nb::module_& m) {
  m.def("build_request_frame", &build_request_frame, nb::arg("number"), nb::arg("seconds"), nb::arg("operations"));
  m.def("parse_request_frame", &parse_request_frame, nb::arg("frame"));
  m.def("build_reply_frame", &build_reply_frame, nb::arg("number"), nb::arg("results"), nb::arg("room") = 0);
  m.def("parse_reply_frame", &parse_reply_frame, nb::arg("frame"), nb::arg("number"), nb::arg("expected"));
  m.def("read_damaged_frames", &read_damaged, nb::arg("frame"), nb::arg("is_reply"), nb::arg("number"),
        nb::arg("num_operations"), nb::arg("seed"), nb::arg("count"));
}

}  // namespace geartrain
