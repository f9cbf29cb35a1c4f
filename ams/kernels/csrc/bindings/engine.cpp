#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "base/text.hpp"
#include "engine/engine.hpp"
#include "engine/engine_handler.hpp"
#include "engine/turn.hpp"
#include "bindings/conversions.hpp"
#include "bindings/module.hpp"

namespace geartrain {
namespace {

void on_ring(Alarm& alarm, nb::object ring) {
  alarm.on_ring([held = kept(std::move(ring))] {
    const WithInterpreter interpreter;
    (*held)();
  });
}

// Python caller that may stop waiting.
struct Waiter {
  std::atomic<bool> has_left{false};
};

// Returns a caller whose wait for the turn Ctrl-C ends, on the main thread.
Caller caller_of(const Waiter* waiter, bool has_turn) {
  return {.has_left = waiter == nullptr ? nullptr : &waiter->has_left,
          .look = [waiter] { return look_for_signals() || (waiter != nullptr && waiter->has_left); },
          .has_turn = has_turn};
}

// A request with few bytes of rows takes less time than acquiring the interpreter lock again, for which another thread
// may make this one wait for milliseconds.
constexpr size_t kFewBytes = size_t{64} << 10;

// Calls ask(caller), without the interpreter lock unless it is short. No thread waits for the turn with that lock.
template <class Ask>
void ask_engine(Engine& engine, size_t bytes, const Waiter* waiter, bool has_turn, const Ask& ask) {
  Caller caller = caller_of(waiter, has_turn);
  if (has_turn || bytes > kFewBytes || !engine.turn().try_acquire()) {
    const WithoutInterpreter release;
    ask(caller);
    return;
  }
  const std::unique_ptr<Turn, void (*)(Turn*)> turn(&engine.turn(), [](Turn* taken) { taken->release(); });
  caller.has_turn = true;
  ask(caller);
}

void create_table(ServedTable* self, const std::string& name, int64_t incarnation, std::shared_ptr<RowStore> rows,
                  double lr, const std::string& optimizer, const std::map<std::string, double>& scalars,
                  const std::map<std::string, std::string>& fixed, bool is_open) {
  std::shared_ptr<const Optimizer> own = rows->spec().optimizer;
  new (self) ServedTable(name, incarnation, std::move(rows), lr,
                         PushOptimizers(optimizer, scalars, fixed, std::move(own)), is_open);
}

void alter_table(ServedTable& table, double lr, const std::string& optimizer,
                 const std::map<std::string, double>& scalars, const std::map<std::string, std::string>& fixed) {
  table.alter(lr, PushOptimizers(optimizer, scalars, fixed, table.rows().spec().optimizer));
}

// Returns the error of a refusal of the table's rows.
nb::any refusal(const ServedTable& table, int reason, int64_t index, int64_t value, const std::string& label) {
  return any_of(
      error_of(fault_of(Refusal{static_cast<Reason>(reason), index}, value, table.name(), table.rows().spec(), label)));
}

int64_t count_of(size_t count) { return static_cast<int64_t>(count); }

// Returns the number of writes of the table.
int64_t pull(Engine& engine, int64_t shard_incarnation, int64_t cluster_version, int64_t table_incarnation,
             const std::string& table, const IdArray& ids, const MatrixOutput& out, int dtype_code,
             const std::optional<Flags>& present, nb::handle required_sync, const Waiter* waiter, bool has_turn) {
  const DType dtype = checked_dtype(out, dtype_code);
  if (out.shape(0) < ids.size())
    throw Fault("InvalidRows", std::to_string(out.shape(0)) + " rows of out for " + std::to_string(ids.size()) +
                                   " ids; there must be one per id");
  if (present && present->size() != out.shape(0))
    throw Fault("InvalidRows", "present is [" + std::to_string(present->size()) + "]; it must be [" +
                                   std::to_string(out.shape(0)) + "], as many as out has rows");
  CallContext context;
  context.shard_incarnation = shard_incarnation;
  context.cluster_version = cluster_version;
  context.table_incarnation = table_incarnation;
  PullRequest request;
  request.ids = ids.data();
  request.count = count_of(ids.size());
  request.dim = count_of(out.shape(1));
  request.dtype = dtype;
  request.rows = static_cast<char*>(out.data());
  request.present = present ? present->data() : nullptr;
  request.size = count_of(out.shape(0));
  if (!required_sync.is_none()) request.required_sync = group_of(required_sync);
  int64_t writes = 0;
  ask_engine(engine, out.nbytes(), waiter, has_turn,
             [&](const Caller& caller) { writes = engine.pull(context, table, request, caller); });
  return writes;
}

// Outcome of a write, and the Future that receives it if it comes after the call.
class Reply {
 public:
  void settle(const Outcome& outcome) {
    Completion later;
    {
      const std::lock_guard lock(mutex_);
      if (!later_) {
        outcome_ = outcome;
        return;
      }
      later = later_;
    }
    later(outcome);
  }

  // Returns Done, or a Future of it if it waits for others. Throws the Fault of the write. Called once, with the
  // interpreter lock.
  nb::object take() {
    nb::object future;
    if (!outcome()) {
      future = nb::module_::import_("concurrent.futures").attr("Future")();
      Completion later = completion_of(future);
      const std::lock_guard lock(mutex_);
      if (!outcome_) {
        later_ = std::move(later);
        return future;
      }
    }
    if (const Fault* fault = std::get_if<Fault>(&*outcome_)) throw *fault;
    return python_of(std::get<Done>(*outcome_));
  }

 private:
  bool outcome() {
    const std::lock_guard lock(mutex_);
    return outcome_.has_value();
  }

  std::mutex mutex_;
  std::optional<Outcome> outcome_;
  Completion later_;
};

template <class Write>
nb::any written(Engine& engine, size_t bytes, const Waiter* waiter, bool has_turn, const Write& write) {
  const auto reply = std::make_shared<Reply>();
  ask_engine(engine, bytes, waiter, has_turn, [&](const Caller& caller) {
    write([reply](const Outcome& outcome) { reply->settle(outcome); }, caller);
  });
  return any_of(reply->take());
}

void require_a_row_each(const IdArray& ids, const Matrix& rows, const char* label, const std::string& table) {
  if (rows.shape(0) != ids.size())
    throw Fault("InvalidRows", std::string(label) + " of table " + quoted(table) + " is [" +
                                   std::to_string(rows.shape(0)) + ", " + std::to_string(rows.shape(1)) +
                                   "]; it must have a row for each of " + std::to_string(ids.size()) + " ids");
}

// Common part of a push and an assign.
template <class Request>
Request request_of(const IdArray& ids, const Matrix& rows, int dtype_code, const char* label,
                   const std::string& table) {
  require_a_row_each(ids, rows, label, table);
  Request request;
  request.ids = ids.data();
  request.count = count_of(ids.size());
  request.dim = count_of(rows.shape(1));
  request.dtype = checked_dtype(rows, dtype_code);
  return request;
}

nb::any push(Engine& engine, nb::handle context, const std::string& table, const IdArray& ids, const Matrix& gradients,
             int dtype_code, std::optional<double> lr, double scale, nb::handle scalars, nb::handle group,
             bool step_goes_on, nb::handle batch, bool ids_are_distinct, const Waiter* waiter, bool has_turn) {
  PushRequest request = request_of<PushRequest>(ids, gradients, dtype_code, "gradients", table);
  request.gradients = static_cast<const char*>(gradients.data());
  request.lr = lr;
  request.scale = scale;
  request.scalars = scalars_of(scalars);
  if (!group.is_none()) request.group = group_of(group);
  request.step_goes_on = step_goes_on;
  request.batch = batch_of(batch, ids.size());
  const CallContext who = context_of(context);
  return written(engine, gradients.nbytes(), waiter, has_turn, [&](const Completion& completion, const Caller& caller) {
    engine.push(who, table, request, ids_are_distinct, completion, caller);
  });
}

nb::any assign(Engine& engine, nb::handle context, const std::string& table, const IdArray& ids, const Matrix& rows,
                  int dtype_code, bool ids_are_distinct, const Waiter* waiter, bool has_turn) {
  AssignRequest request = request_of<AssignRequest>(ids, rows, dtype_code, "rows", table);
  request.rows = static_cast<const char*>(rows.data());
  const CallContext who = context_of(context);
  return written(engine, rows.nbytes(), waiter, has_turn, [&](const Completion& completion, const Caller& caller) {
    engine.assign(who, table, request, ids_are_distinct, completion, caller);
  });
}


// A Python exception becomes the fault of the write.
template <class... Arguments>
int64_t call_of(const nb::callable& apply, const Arguments&... arguments) {
  try {
    return nb::cast<int64_t>(apply(arguments...));
  } catch (nb::python_error& error) {
    throw fault_of(error.value());
  }
}

void write(Engine& engine, nb::handle context, const std::string& table, RowChange::Kind kind, nb::object future,
           const nb::callable& apply) {
  engine.write(context_of(context), table, kind, completion_of(std::move(future)), [&] { return call_of(apply); });
}

void update_jointly(Engine& engine, nb::handle context, nb::object update, nb::object future,
                    const nb::callable& apply) {
  const std::string table = nb::cast<std::string>(update.attr("table"));
  engine.update_jointly(context_of(context), table, rank_write_of(std::move(update)), completion_of(std::move(future)),
                        [&](const Engine::Parts& parts) {
                          if (!are_hosted(table, parts)) throw std::logic_error("the parts are pushes");
                          nb::list updates;
                          for (const RankWrite* part : parts)
                            updates.append(dynamic_cast<const HostedUpdate&>(*part->hosted).update());
                          return call_of(apply, updates);
                        });
}

// [(carrier, RPC, calls up to each bound of duration, seconds, bytes in, bytes out, {fault: calls})]
nb::list call_counts(Engine& engine) {
  constexpr const char* kCarriers[] = {"ring", "tcp"};
  constexpr const char* kKinds[] = {"Pull", "Push", "Assign", "Several", "Unread"};
  nb::list all;
  for (const CallCounters::Counted& each : engine.counters().read()) {
    nb::list by_seconds;
    for (const int64_t count : each.by_seconds) by_seconds.append(count);
    nb::dict faults;
    for (const auto& [name, count] : each.faults) faults[name.c_str()] = count;
    all.append(nb::make_tuple(kCarriers[static_cast<size_t>(each.carrier)], kKinds[static_cast<size_t>(each.kind)],
                              by_seconds, each.seconds, each.bytes_in, each.bytes_out, faults));
  }
  return all;
}

// Never away in the queue: a thread may have several places, and waits for them in their order.
void wait(Turn::Place& place) {
  const WithoutInterpreter release;
  place.wait();
}

void acquire(Turn& turn) {
  Turn::Place place(turn);
  {
    const WithoutInterpreter release;
    place.wait(look_for_signals);
  }
  place.keep();
}

// Returns false if the turn did not come in time.
bool acquire_within(Turn& turn, double seconds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  Turn::Place place(turn);
  {
    const WithoutInterpreter release;
    if (!place.wait([until] { return std::chrono::steady_clock::now() >= until; })) return false;
  }
  place.keep();
  return true;
}

void exit(Turn& turn, nb::handle, nb::handle, nb::handle) { turn.release(); }

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<Waiter>(m, "Waiter")
      .def(nb::init<>())
      .def("leave", [](Waiter& waiter) { waiter.has_left = true; })
      .def_prop_ro("has_left", [](const Waiter& waiter) { return waiter.has_left.load(); });
  nb::class_<ServedTable>(m, "ServedTable")
      .def("__init__", &create_table, nb::kw_only(), nb::arg("name"), nb::arg("incarnation"), nb::arg("rows"),
           nb::arg("lr"), nb::arg("optimizer"), nb::arg("scalars"), nb::arg("fixed"), nb::arg("is_open"))
      .def("alter", &alter_table, nb::kw_only(), nb::arg("lr"), nb::arg("optimizer"), nb::arg("scalars"),
           nb::arg("fixed"))
      .def("require_meant", &ServedTable::require_meant, nb::arg("incarnation"))
      .def("require_open", &ServedTable::require_open, nb::arg("table_incarnation"))
      .def("require_whole", &ServedTable::require_whole)
      .def("refusal", &refusal, nb::arg("reason"), nb::arg("index"), nb::arg("value"), nb::arg("label"))
      .def_rw("is_open", &ServedTable::is_open)
      .def_rw("torn", &ServedTable::torn)
      .def_rw("writes", &ServedTable::writes)
      .def_rw("writes_before", &ServedTable::writes_before)
      .def_ro("created", &ServedTable::created)
      .def_rw("expiry_step", &ServedTable::expiry_step)
      .def_rw("expiry_seconds", &ServedTable::expiry_seconds)
      .def_prop_ro("is_expiry_due", &ServedTable::is_expiry_due)
      .def_prop_ro("all_writes", &ServedTable::all_writes)
      .def_prop_ro("staleness", [](const ServedTable& table) {
        const ServedTable::Staleness& all = table.staleness();
        const auto end = std::find_if(all.rbegin(), all.rend(), [](int64_t count) { return count != 0; }).base();
        return std::vector<int64_t>(all.begin(), end);
      });
  nb::enum_<RowChange::Kind>(m, "Kind")
      .value("remove", RowChange::Kind::remove)
      .value("hosted", RowChange::Kind::hosted);
  nb::class_<Alarm>(m, "Alarm")
      .def_prop_rw("at", &Alarm::at, &Alarm::set)
      .def("note", &Alarm::note, nb::arg("deadline").none())
      .def("on_ring", &on_ring, nb::arg("ring"));
  nb::class_<Engine>(m, "Engine")
      .def(nb::init<int64_t, int64_t, int64_t, std::shared_ptr<Lease>, std::shared_ptr<CompletedWrites>,
                    std::shared_ptr<SyncGroups>>(),
           nb::kw_only(), nb::arg("shard"), nb::arg("incarnation"), nb::arg("cluster_version"), nb::arg("lease").none(),
           nb::arg("completed_writes"), nb::arg("groups"))
      .def_prop_ro("turn", &Engine::turn, nb::rv_policy::reference_internal)
      .def_prop_ro("alarm", &Engine::alarm, nb::rv_policy::reference_internal)
      .def_prop_rw(
          "cluster_version", [](Engine& engine) { return engine.cluster_version().load(); },
          [](Engine& engine, int64_t version) { engine.cluster_version() = version; })
      .def("call_counts", &call_counts)
      .def_prop_ro("busy_seconds", [](Engine& engine) { return engine.counters().busy_seconds(); })
      .def("check_fence", &Engine::check_fence, nb::arg("shard_incarnation"), nb::arg("cluster_version"))
      .def("pull", &pull, nb::arg("shard_incarnation"), nb::arg("cluster_version"), nb::arg("table_incarnation"),
           nb::arg("table"), nb::arg("ids").noconvert(), nb::arg("out").noconvert(), nb::arg("dtype_code"),
           nb::arg("present").noconvert().none(), nb::arg("required_sync").none(), nb::arg("waiter").none(),
           nb::arg("has_turn"))
      .def("push", &push, nb::arg("context"), nb::arg("table"), nb::arg("ids").noconvert(),
           nb::arg("gradients").noconvert(), nb::arg("dtype_code"), nb::arg("lr").none(), nb::arg("scale"),
           nb::arg("scalars"), nb::arg("group").none(), nb::arg("step_goes_on"), nb::arg("batch").none(),
           nb::arg("ids_are_distinct"), nb::arg("waiter").none(), nb::arg("has_turn"))
      .def("assign", &assign, nb::arg("context"), nb::arg("table"), nb::arg("ids").noconvert(),
           nb::arg("rows").noconvert(), nb::arg("dtype_code"), nb::arg("ids_are_distinct"), nb::arg("waiter").none(),
           nb::arg("has_turn"))
      .def("write", &write, nb::arg("context"), nb::arg("table"), nb::arg("kind"), nb::arg("future"), nb::arg("apply"))
      .def("update_jointly", &update_jointly, nb::arg("context"), nb::arg("update"), nb::arg("future"),
           nb::arg("apply"))
      .def(
          "expire",
          [](Engine& engine, const std::string& table, nb::callable apply) {
            return engine.expire(table, [&] { return nb::cast<int64_t>(apply()); });
          },
          nb::arg("table"), nb::arg("apply"))
      .def("expire_sync_groups", &Engine::expire_sync_groups)
      .def("fence", &Engine::fence, nb::arg("job"), nb::arg("incarnation"), nb::arg("forget"))
      .def(
          "fail_waiting",
          [](Engine& engine, const std::string& table, nb::handle error) {
            engine.fail_waiting(table, fault_of(error));
          },
          nb::arg("table"), nb::arg("error"))
      .def("close", &Engine::close)
      .def("end", &Engine::end)
      .def("fail", &Engine::fail, nb::arg("reason"))
      .def("add_table", &Engine::add_table, nb::arg("table"))
      .def("remove_table", &Engine::remove_table, nb::arg("name"))
      .def(
          "not_found",
          [](const Engine& engine, const std::string& name) { return any_of(error_of(engine.not_found(name))); },
          nb::arg("name"));
  nb::list bounds;
  for (double bound = CallCounters::kFirstBoundSeconds; nb::len(bounds) < CallCounters::kNumBounds;
       bound *= CallCounters::kGrowth)
    bounds.append(bound);
  m.attr("CALL_SECONDS_BOUNDS") = bounds;
  nb::class_<EngineHandler, Handler>(m, "EngineHandler").def(nb::init<std::shared_ptr<Engine>>(), nb::arg("engine"));
  nb::class_<Turn::Place>(m, "Place").def("wait", &wait).def("leave", &Turn::Place::leave);
  nb::class_<Turn>(m, "Turn")
      .def(nb::init<>())
      .def("try_acquire", &Turn::try_acquire)
      .def("acquire", &acquire)
      .def("acquire_within", &acquire_within, nb::arg("seconds"))
      .def("release", &Turn::release)
      .def_prop_ro("num_waiting", &Turn::num_waiting)
      .def("__enter__", &acquire)
      .def("__exit__", &exit, nb::arg().none(), nb::arg().none(), nb::arg().none())
      .def("enter", [](Turn& turn) { return new Turn::Place(turn); }, nb::keep_alive<0, 1>());
}

}  // namespace geartrain
