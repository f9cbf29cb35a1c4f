// Python class of the client; retries are decided in ams/client/retries.py.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>

#include "base/scattered_rows.hpp"
#include "client/rows_client.hpp"
#include "bindings/conversions.hpp"
#include "bindings/module.hpp"

namespace geartrain {
namespace {

using Counts = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr double kLongestSeconds = 1e8;
constexpr const char* kArrays = "ids must be int64 [N] and rows [N, dim], both C-contiguous";

void create_client(RowsClient* self, const ShardMap& bucket_shards, int64_t num_shards) {
  const uint16_t* map = bucket_shards.data();
  require(*std::max_element(map, map + kNumBuckets) < num_shards, "bucket_shards names a shard beyond num_shards");
  new (self) RowsClient({.bucket_shards = {map, map + kNumBuckets}, .num_shards = num_shards});
}

void create_facts(TableFacts* self, std::string name, int64_t dim, int dtype_code, bool is_dense, int wire_code,
                  bool counts_occurrences) {
  require(dtype_code >= 0 && dtype_code < kNumDTypes && wire_code >= 0 && wire_code < kNumDTypes,
          "dtype code must be 0 (float32), 1 (float16) or 2 (bfloat16)");
  require(dtype_code == 0 || wire_code == dtype_code, "rows of 16 bits are sent in their own dtype");
  new (self) TableFacts{std::move(name),   dim, static_cast<DType>(dtype_code), is_dense, static_cast<DType>(wire_code),
                        counts_occurrences};
}

SteadyTime::duration duration_of(double seconds) {
  return std::chrono::duration_cast<SteadyTime::duration>(
      std::chrono::duration<double>(std::min(seconds, kLongestSeconds)));
}

// Returns an attempt whose `watch` receives the shards that have not replied, every 100 ms. Signals of the main thread
// end it, too.
Attempt attempt_of(double seconds, nb::handle watch) {
  return {.seconds = std::isfinite(seconds) ? seconds : 0,
          .deadline = std::chrono::steady_clock::now() + duration_of(seconds),
          .look = [watch](std::span<const int64_t> waiting) {
            if (look_for_signals()) return true;
            if (watch.is_none() || waiting.empty()) return false;
            const WithInterpreter interpreter;
            nb::list shards;
            for (const int64_t shard : waiting) shards.append(shard);
            watch(shards);
            return false;
          }};
}

// Returns None: no connection to the shard; False: no reply in time; an error: its answer; or (created, duplicate):
// success.
nb::object python_of(const PartOutcome& outcome) {
  if (std::holds_alternative<Late>(outcome)) return nb::bool_(false);
  if (const auto* fault = std::get_if<Fault>(&outcome)) return error_of(*fault);
  if (const auto* done = std::get_if<Done>(&outcome)) return nb::make_tuple(done->created, done->duplicate);
  return nb::none();
}

PullRequest pull_request(const TableFacts& table, const IdArray& ids, const MatrixOutput& out, int dtype_code,
                         const std::optional<Flags>& present, nb::handle required_sync) {
  PullRequest request;
  request.ids = ids.data();
  request.count = static_cast<int64_t>(ids.size());
  request.dim = static_cast<int64_t>(out.shape(1));
  request.dtype = checked_dtype(out, dtype_code);
  if (table.wire != table.dtype) request.wire = table.wire;
  request.rows = static_cast<char*>(out.data());
  request.present = present ? present->data() : nullptr;
  request.size = request.count;
  require(out.shape(0) == ids.size() && request.dim >= table.dim && request.dtype == table.dtype,
          "out must be [N, dim] of the table's dtype");
  require(!present || present->size() == ids.size(), "present must be [N]");
  if (!required_sync.is_none()) request.required_sync = group_of(required_sync);
  return request;
}

// Returns None if all shards are done; otherwise the outcome of each unfinished shard.
std::optional<nb::list> python_of(const Undone& undone) {
  if (undone.empty()) return std::nullopt;
  nb::list parts;
  for (const auto& [shard, outcome] : undone) parts.append(nb::make_tuple(shard, python_of(outcome)));
  return parts;
}

// Returns the joint outcome of all shards if each has done its part; otherwise each one's outcome.
nb::object python_of(const std::vector<PartOutcome>& parts) {
  Done joint;
  for (const PartOutcome& part : parts) {
    const Done* done = std::get_if<Done>(&part);
    if (done == nullptr) {
      nb::list each;
      for (const PartOutcome& item : parts) each.append(python_of(item));
      return each;
    }
    joint.created += done->created;
    joint.duplicate |= done->duplicate;
  }
  return nb::make_tuple(joint.created, joint.duplicate);
}

std::optional<nb::list> pull(RowsClient& client, const TableFacts& table, int64_t table_incarnation, const IdArray& ids,
                             const MatrixOutput& out, int dtype_code, const std::optional<Flags>& present,
                             nb::handle required_sync, double seconds, nb::handle watch,
                             const std::vector<int64_t>& shards) {
  const PullRequest request = pull_request(table, ids, out, dtype_code, present, required_sync);
  const Attempt attempt = attempt_of(seconds, watch);
  Undone undone;
  {
    const WithoutInterpreter release;
    undone = client.pull(table, table_incarnation, request, attempt, shards);
  }
  return python_of(undone);
}

void create_scattered(ScatteredRows* self, const nb::tuple& arrays, int64_t dim) {
  using Numbers = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  require(dim >= 1, "dim must be at least 1");
  std::vector<ScatteredRows::Range> ranges;
  for (const nb::handle item : arrays) {
    const auto numbers = nb::cast<Numbers>(item, false);
    ranges.push_back({reinterpret_cast<char*>(numbers.data()), numbers.nbytes()});
  }
  new (self) ScatteredRows(ranges, static_cast<size_t>(dim) * sizeof(float));
}

// Writes rows [N, dim] to the rows of these numbers, or to all.
void place_scattered(const ScatteredRows& self, const Matrix& rows, const std::optional<IdArray>& numbers) {
  require(rows.dtype() == nb::dtype<float>() && static_cast<int64_t>(rows.shape(0)) == self.count() &&
              rows.shape(1) * sizeof(float) == self.row_bytes(),
          "rows must be float32 [N, dim]");
  const int64_t count = numbers ? static_cast<int64_t>(numbers->size()) : self.count();
  for (int64_t i = 0; numbers && i < count; ++i)
    require(numbers->data()[i] >= 0 && numbers->data()[i] < self.count(), "numbers must be of rows");
  const WithoutInterpreter release;
  self.gather();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t number = numbers ? numbers->data()[i] : i;
    std::memcpy(self.each()[number],
                static_cast<const char*>(rows.data()) + static_cast<size_t>(number) * self.row_bytes(),
                self.row_bytes());
  }
  self.scatter();
}

std::optional<nb::list> pull_scattered(RowsClient& client, const TableFacts& table, int64_t table_incarnation,
                                       const IdArray& ids, const ScatteredRows& out, nb::handle required_sync,
                                       double seconds, nb::handle watch, const std::vector<int64_t>& shards) {
  require(out.count() == static_cast<int64_t>(ids.size()) && table.dtype == DType::float32 &&
              out.row_bytes() == static_cast<size_t>(table.dim) * sizeof(float),
          "out must be [N, dim] of the table's dtype");
  PullRequest request;
  request.ids = ids.data();
  request.count = request.size = out.count();
  request.dim = table.dim;
  if (table.wire != table.dtype) request.wire = table.wire;
  request.each = out.each();
  if (!required_sync.is_none()) request.required_sync = group_of(required_sync);
  const Attempt attempt = attempt_of(seconds, watch);
  Undone undone;
  {
    const WithoutInterpreter release;
    out.gather();  // rows that do not arrive stay unchanged
    undone = client.pull(table, table_incarnation, request, attempt, shards);
    out.scatter();
  }
  return python_of(undone);
}

// `pulls`: (table, table_incarnation, ids, out, dtype_code) each. Returns each pull's outcome as pull() does, or None
// if all are None; and for each pull the writes that each shard had applied.
nb::tuple pull_together(RowsClient& client, const nb::list& pulls, double seconds, nb::handle watch) {
  std::vector<TablePull> all;
  all.reserve(pulls.size());
  for (const nb::handle given : pulls) {
    const auto parts = nb::cast<nb::tuple>(given);
    require(parts.size() == 5, "a pull has five parts");
    const auto& table = nb::cast<const TableFacts&>(parts[0]);
    IdArray ids;
    MatrixOutput out;
    require(nb::try_cast(parts[2], ids, false) && nb::try_cast(parts[3], out, false), kArrays);
    all.push_back({&table, nb::cast<int64_t>(parts[1]),
                   pull_request(table, ids, out, nb::cast<int>(parts[4]), std::nullopt, nb::none())});
  }
  const Attempt attempt = attempt_of(seconds, watch);
  std::vector<Pulled> pulled;
  {
    const WithoutInterpreter release;
    pulled = client.pull(all, attempt);
  }
  const bool is_whole = std::ranges::all_of(pulled, [](const Pulled& item) { return item.undone.empty(); });
  nb::list left, writes;
  for (const Pulled& item : pulled) {
    if (!is_whole) left.append(python_of(item.undone));
    writes.append(item.writes);
  }
  return nb::make_tuple(is_whole ? nb::object(nb::none()) : nb::object(left), writes);
}

bool begin_pull(RowsClient& client, const TableFacts& table, int64_t table_incarnation, const IdArray& ids,
                const MatrixOutput& out, int dtype_code, nb::handle required_sync, double seconds, nb::object tag) {
  const PullRequest request = pull_request(table, ids, out, dtype_code, std::nullopt, required_sync);
  Attempt attempt = attempt_of(seconds, nb::none());
  std::shared_ptr<nb::object> label = kept(std::move(tag));
  const WithoutInterpreter release;
  return client.begin_pull(table, table_incarnation, request, std::move(attempt), std::move(label));
}

// Occurrences [N], step, unix seconds, and the writes of each shard when its rows were pulled (-1: not pulled).
using BatchFactsGiven = std::tuple<std::optional<Counts>, std::optional<int64_t>, std::optional<double>,
                                   std::optional<std::vector<int64_t>>>;

void fill_batch(WriteSettings& settings, const BatchFactsGiven& given, size_t count, const Placement& placement) {
  const auto& [occurrences, step, unix_seconds, pulled_at] = given;
  require(!occurrences || occurrences->size() == count, "occurrences must be [N]");
  require(!pulled_at || static_cast<int64_t>(pulled_at->size()) == placement.num_shards,
          "pulled_at must have a number for each shard");
  if (occurrences) settings.batch.occurrences = occurrences->data();
  settings.batch.step = step;
  settings.batch.unix_seconds = unix_seconds;
  if (pulled_at) settings.pulled_at = *pulled_at;
}

// `rows`: Matrix, or ScatteredRows, whose gathered copies stay.
template <class Rows>
void prepare(PreparedWrite* self, const RowsClient& client, const TableFacts& table, const IdArray& ids,
             const Rows& rows, int dtype_code, bool is_assign, int check, std::optional<double> lr, double scale,
             nb::handle scalars, nb::handle group, bool step_goes_on, bool every_shard, bool are_distinct,
             const std::optional<BatchFactsGiven>& batch) {
  require(check >= 0 && check <= static_cast<int>(RowCheck::finite), "check must be 0, 1 or 2");
  size_t num_rows = 0, row_bytes = 0;
  DType dtype = DType::float32;
  RowPlaces<const char> places;
  if constexpr (std::is_same_v<Rows, ScatteredRows>) {
    num_rows = static_cast<size_t>(rows.count());
    row_bytes = rows.row_bytes();
    places.each = rows.each();
    require(!is_assign && dtype_code == static_cast<int>(dtype), "rows in several arrays must be float32 and pushed");
  } else {
    num_rows = rows.shape(0);
    dtype = checked_dtype(rows, dtype_code);
    row_bytes = rows.shape(1) * item_bytes(dtype);
    places.first = static_cast<const char*>(rows.data());
  }
  require(num_rows == ids.size() && row_bytes == static_cast<size_t>(table.dim) * item_bytes(dtype),
          "rows must be [N, dim]");
  WriteSettings settings;
  settings.is_assign = is_assign;
  settings.lr = lr;
  settings.scale = scale;
  settings.scalars = scalars_of(scalars);
  if (!group.is_none()) settings.group = group_of(group);
  settings.step_goes_on = step_goes_on;
  settings.every_shard = every_shard;
  settings.are_distinct = are_distinct;
  if (batch) fill_batch(settings, *batch, ids.size(), client.placement());
  const WithoutInterpreter release;
  if constexpr (std::is_same_v<Rows, ScatteredRows>) rows.gather();
  new (self) PreparedWrite(table, client.placement(), ids.data(), places, static_cast<int64_t>(ids.size()), dtype,
                           std::move(settings), static_cast<RowCheck>(check));
}

// `pushes`: distinct ids and finite gradients of several tables, (table, ids, rows, dtype_code, every_shard, batch)
// each.
nb::list prepare_pushes(const RowsClient& client, const nb::list& pushes, std::optional<double> lr, double scale,
                        nb::handle scalars, nb::handle group) {
  struct Push {
    const TableFacts* table;
    IdArray ids;
    Matrix rows;
    DType dtype;
    WriteSettings settings;
  };
  WriteSettings common;
  common.lr = lr;
  common.scale = scale;
  common.scalars = scalars_of(scalars);
  if (!group.is_none()) common.group = group_of(group);
  common.are_distinct = true;
  std::vector<Push> all;
  all.reserve(pushes.size());
  for (const nb::handle given : pushes) {
    const auto parts = nb::cast<nb::tuple>(given);
    require(parts.size() == 6, "a push has six parts");
    Push push{&nb::cast<const TableFacts&>(parts[0]), {}, {}, {}, common};
    require(nb::try_cast(parts[1], push.ids, false) && nb::try_cast(parts[2], push.rows, false), kArrays);
    push.dtype = checked_dtype(push.rows, nb::cast<int>(parts[3]));
    push.settings.every_shard = nb::cast<bool>(parts[4]);
    require(push.rows.shape(0) == push.ids.size() && static_cast<int64_t>(push.rows.shape(1)) == push.table->dim,
            "rows must be [N, dim]");
    if (!parts[5].is_none())
      fill_batch(push.settings, nb::cast<BatchFactsGiven>(parts[5]), push.ids.size(), client.placement());
    all.push_back(std::move(push));
  }
  std::vector<std::unique_ptr<PreparedWrite>> prepared;
  {
    const WithoutInterpreter release;
    for (Push& push : all)
      prepared.push_back(std::make_unique<PreparedWrite>(
          *push.table, client.placement(), push.ids.data(),
          RowPlaces<const char>{static_cast<const char*>(push.rows.data())}, static_cast<int64_t>(push.ids.size()),
          push.dtype, std::move(push.settings), RowCheck::product));
  }
  nb::list writes;
  for (size_t i = 0; i < prepared.size(); ++i) {
    prepared[i]->hold(kept(nb::object(pushes[i])));
    writes.append(nb::cast(prepared[i].release(), nb::rv_policy::take_ownership));
  }
  return writes;
}

// Stream, incarnation, sequence, oldest sequence without an acknowledgement, expected incarnation of the table.
using ContextGiven = std::tuple<std::string, int64_t, int64_t, int64_t, int64_t>;

CallContext context_of(const ContextGiven& given) {
  const auto& [stream, incarnation, sequence, oldest, table_incarnation] = given;
  return {.stream = stream,
          .incarnation = incarnation,
          .sequence = sequence,
          .oldest_unacknowledged = oldest,
          .table_incarnation = table_incarnation};
}

// `calls`: writes with their contexts and shards; no shards: all.
nb::list write(RowsClient& client,
               const std::vector<std::tuple<const PreparedWrite*, ContextGiven, std::vector<int64_t>>>& calls,
               double seconds, nb::handle watch) {
  std::vector<Write> writes;
  writes.reserve(calls.size());
  for (const auto& [prepared, context, shards] : calls) writes.push_back({prepared, context_of(context), shards});
  const Attempt attempt = attempt_of(seconds, watch);
  WriteOutcomes outcomes;
  {
    const WithoutInterpreter release;
    outcomes = client.write(writes, attempt);
  }
  nb::list replies;
  for (const auto& parts : outcomes) replies.append(python_of(parts));
  return replies;
}

// Returns (outcome as of write(), the writes that each shard with rows had applied then, or None if some rows are
// missing).
nb::tuple write_and_pull(RowsClient& client, const PreparedWrite& prepared, const ContextGiven& context,
                         const ScatteredRows& out, double seconds, nb::handle watch) {
  PullRequest after;
  after.count = out.count();
  after.dim = prepared.dim();
  after.each = out.each();
  if (prepared.dtype() != DType::float32) after.wire = prepared.dtype();
  require(prepared.num_rows() == out.count() &&
              out.row_bytes() == static_cast<size_t>(prepared.dim()) * sizeof(float) && !prepared.is_merged() &&
              !prepared.group(),
          "a pull after a push must have the push's ids, which must be distinct and of no sync group");
  const Write write{&prepared, context_of(context), {}, &after};
  const Attempt attempt = attempt_of(seconds, watch);
  std::vector<PartOutcome> parts;
  std::optional<std::vector<int64_t>> writes;
  {
    const WithoutInterpreter release;
    out.gather();  // rows that do not arrive stay unchanged
    parts = client.write_and_pull(write, attempt, writes);
    out.scatter();
  }
  return nb::make_tuple(python_of(parts), writes ? nb::object(nb::tuple(nb::cast(*writes))) : nb::none());
}

bool begin_write(RowsClient& client, const PreparedWrite& prepared, const ContextGiven& context, double seconds,
                 nb::object tag) {
  const Write write{&prepared, context_of(context), {}};
  Attempt attempt = attempt_of(seconds, nb::none());
  std::shared_ptr<nb::object> label = kept(std::move(tag));
  const WithoutInterpreter release;
  return client.begin_write(write, std::move(attempt), std::move(label));
}

// Returns (tag, outcome as of pull() or write()); None: there is none within `seconds`.
std::optional<nb::tuple> next_reply(RowsClient& client, double seconds) {
  const auto until = std::chrono::steady_clock::now() + duration_of(seconds);
  std::optional<RowsClient::Reply> reply;
  {
    const WithoutInterpreter release;
    reply = client.next_reply(until);
  }
  if (!reply) return std::nullopt;
  const nb::object tag = *static_cast<nb::object*>(reply->tag.get());
  return nb::make_tuple(tag,
                        std::visit([](const auto& outcome) { return nb::cast(python_of(outcome)); }, reply->outcome));
}

}  // namespace

void bind_rows_client(nb::module_& m) {
  nb::class_<TableFacts>(m, "TableFacts")
      .def("__init__", &create_facts, nb::arg("name"), nb::arg("dim"), nb::arg("dtype_code"), nb::arg("is_dense"),
           nb::arg("wire_code"), nb::arg("counts_occurrences") = false)
      .def_ro("name", &TableFacts::name)
      .def_ro("dim", &TableFacts::dim)
      .def_prop_ro("wire_code", [](const TableFacts& table) { return static_cast<int>(table.wire); })
      .def_ro("is_dense", &TableFacts::is_dense);
  nb::class_<ScatteredRows>(m, "ScatteredRows")
      .def("__init__", &create_scattered, nb::arg("arrays"), nb::arg("dim"), nb::keep_alive<1, 2>())
      .def("__len__", &ScatteredRows::count)
      .def("place", &place_scattered, nb::arg("rows").noconvert(), nb::arg("numbers").noconvert().none());
  nb::class_<RowsClient>(m, "RowsClient")
      .def("__init__", &create_client, nb::arg("bucket_shards").noconvert(), nb::arg("num_shards"))
      .def("set_endpoint", &RowsClient::set_endpoint, nb::arg("shard"), nb::arg("incarnation"),
           nb::arg("engine").none(), nb::arg("connection").none(), nb::call_guard<WithoutInterpreter>())
      .def("set_cluster_version", &RowsClient::set_cluster_version, nb::arg("version"),
           nb::call_guard<WithoutInterpreter>())
      .def("pull", &pull, nb::arg("table"), nb::arg("table_incarnation"), nb::arg("ids").noconvert(),
           nb::arg("out").noconvert(), nb::arg("dtype_code"), nb::arg("present").noconvert().none(),
           nb::arg("required_sync").none(), nb::arg("seconds"), nb::arg("watch").none(),
           nb::arg("shards") = std::vector<int64_t>())
      .def("pull_scattered", &pull_scattered, nb::arg("table"), nb::arg("table_incarnation"),
           nb::arg("ids").noconvert(), nb::arg("out"), nb::arg("required_sync").none(), nb::arg("seconds"),
           nb::arg("watch").none(), nb::arg("shards") = std::vector<int64_t>())
      .def("pull_together", &pull_together, nb::arg("pulls"), nb::arg("seconds"), nb::arg("watch").none())
      .def("prepare_pushes", &prepare_pushes, nb::arg("pushes"), nb::arg("lr").none(), nb::arg("scale"),
           nb::arg("scalars"), nb::arg("group").none())
      .def("write", &write, nb::arg("writes"), nb::arg("seconds"), nb::arg("watch").none())
      .def("write_and_pull", &write_and_pull, nb::arg("prepared"), nb::arg("context"), nb::arg("out"),
           nb::arg("seconds"), nb::arg("watch").none())
      .def("begin_pull", &begin_pull, nb::arg("table"), nb::arg("table_incarnation"), nb::arg("ids").noconvert(),
           nb::arg("out").noconvert(), nb::arg("dtype_code"), nb::arg("required_sync").none(), nb::arg("seconds"),
           nb::arg("tag"))
      .def("begin_write", &begin_write, nb::arg("prepared"), nb::arg("context"), nb::arg("seconds"), nb::arg("tag"))
      .def("next_reply", &next_reply, nb::arg("seconds"))
      .def(
          "waiting",
          [](const RowsClient& client, double seconds) {
            return client.waiting(std::chrono::steady_clock::now() - duration_of(seconds));
          },
          nb::arg("seconds"))
      .def("nudge", &RowsClient::nudge, nb::call_guard<WithoutInterpreter>());
  const auto add_prepare = [](nb::class_<PreparedWrite>& write, auto* prepare) {
    write.def("__init__", prepare, nb::arg("client"), nb::arg("table"), nb::arg("ids").noconvert(),
              nb::arg("rows").noconvert(), nb::arg("dtype_code"), nb::kw_only(), nb::arg("is_assign"), nb::arg("check"),
              nb::arg("lr").none(), nb::arg("scale"), nb::arg("scalars"), nb::arg("group").none(),
              nb::arg("step_goes_on"), nb::arg("every_shard"), nb::arg("are_distinct") = false,
              nb::arg("batch") = nb::none(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>());
  };
  nb::class_<PreparedWrite> write(m, "PreparedWrite");
  add_prepare(write, &prepare<Matrix>);
  add_prepare(write, &prepare<ScatteredRows>);
  write
      .def("keep_rows", &PreparedWrite::keep_rows, nb::call_guard<WithoutInterpreter>())
      .def_prop_ro("num_parts", [](const PreparedWrite& write) { return write.parts().size(); })
      .def_prop_ro("shards", [](const PreparedWrite& write) {
        std::vector<int64_t> shards;
        for (const ShardPart& part : write.parts()) shards.push_back(part.shard);
        return shards;
      });
}

}  // namespace geartrain
