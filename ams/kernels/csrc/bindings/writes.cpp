#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "bindings/conversions.hpp"
#include "base/failpoint.hpp"
#include "bindings/module.hpp"
#include "writes/completed_writes.hpp"
#include "writes/lease.hpp"
#include "writes/sync_groups.hpp"

namespace geartrain {
namespace {

nb::object of_ops(const char* name) { return nb::module_::import_("geartrain.ams.kernels.ops").attr(name); }

// The inputs of an UpdateHosted of ams/values/shard_messages.py.
class HostedUpdate : public HostedWrite {
 public:
  explicit HostedUpdate(nb::object update) : update_(kept(std::move(update))) {}

  const nb::object& update() const { return *update_; }

  size_t bytes() const override {
    const WithInterpreter interpreter;
    size_t sum = 0;
    for (const nb::handle inputs : update_->attr("inputs"))
      for (const nb::handle array : inputs.attr("arrays").attr("values")()) sum += nb::cast<size_t>(array.attr("nbytes"));
    return sum;
  }

  Fingerprint fingerprint(Fingerprint begin) const override {
    const WithInterpreter interpreter;
    const nb::callable sorted = nb::module_::import_("builtins").attr("sorted");
    Fingerprint seen = begin;
    for (const nb::handle inputs : update_->attr("inputs")) {
      const nb::object arrays = inputs.attr("arrays"), names = sorted(arrays);
      nb::list told;
      told.append(update_->attr("model"));
      told.append(sorted(inputs.attr("settings").attr("items")()));
      for (const char* number : {"seed", "step", "weight"}) told.append(inputs.attr(number));
      for (const nb::handle name : names)
        told.append(nb::make_tuple(name, arrays[name].attr("dtype").attr("name"), arrays[name].attr("shape")));
      const nb::str text = nb::repr(told);
      seen = murmur3(text.c_str(), static_cast<size_t>(nb::len(text.attr("encode")())), seen);
      for (const nb::handle name : names) {
        const auto array = nb::cast<nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>>(arrays[name]);
        seen = geartrain::fingerprint(array.data(), array.nbytes(), seen);
      }
    }
    return seen;
  }

 private:
  std::shared_ptr<nb::object> update_;
};

// A Push or UpdateHosted of ams/values/shard_messages.py, which has a group.
struct Write {
  explicit Write(nb::handle from) : table(nb::cast<std::string>(from.attr("table"))) {
    PushRequest& push = write.push;
    push.group = group_of(from.attr("group"));
    push.lr = nb::cast<std::optional<double>>(from.attr("lr"));
    push.scale = nb::cast<double>(from.attr("scale"));
    push.step_goes_on = nb::cast<bool>(from.attr("step_goes_on"));
    push.scalars = scalars_of(from.attr("optimizer_scalars"));
    if (!nb::hasattr(from, "gradients")) {
      write.hosted = std::make_shared<HostedUpdate>(nb::borrow(from));
      return;
    }
    const nb::object ids = of_ops("checked_ids")(from.attr("ids")), bits = of_ops("as_bits")(from.attr("gradients"), "gradients");
    const IdArray id_array = nb::cast<IdArray>(ids);
    const Matrix rows = nb::cast<Matrix>(bits[0]);
    if (rows.shape(0) != id_array.shape(0))
      throw Fault("InvalidRows", std::to_string(rows.shape(0)) + " gradients for " + std::to_string(id_array.shape(0)) +
                                     " ids; there must be one per id");
    push.ids = id_array.data();
    push.count = static_cast<int64_t>(id_array.shape(0));
    push.dim = static_cast<int64_t>(rows.shape(1));
    push.dtype = checked_dtype(rows, nb::cast<int>(bits[1]));
    push.gradients = static_cast<const char*>(rows.data());
    write.arrays = kept(nb::make_tuple(ids, bits));
  }

  std::string table;
  RankWrite write;
};

SyncGroups::Groups::Entry& entry_of(SyncGroups& groups, nb::handle write) {
  return groups.group(nb::cast<std::string>(write.attr("table")), group_of(write.attr("group")));
}

nb::list python_of(const std::vector<CallContext>& contexts) {
  nb::list found;
  for (const CallContext& context : contexts) found.append(python_of(context));
  return found;
}

nb::tuple python_of(const RefusedPart& part) { return nb::make_tuple(python_of(part.context), error_of(part.fault)); }

nb::list python_of(const std::vector<RefusedPart>& parts) {
  nb::list found;
  for (const RefusedPart& part : parts) found.append(python_of(part));
  return found;
}

bool is_applied(SyncGroups& groups, nb::handle from) {
  const Write write(from);
  const WithoutInterpreter release;
  return groups.is_applied(write.table, write.write);
}

// The part of the same rank that it is in the place of with its error, or None; and the callers of all ranks, none if one is missing.
nb::tuple join(SyncGroups& groups, nb::handle context, nb::handle from) {
  const Write write(from);
  const CallContext caller = context_of(context);
  SyncGroups::Joined joined;
  {
    const WithoutInterpreter release;
    joined = groups.join(caller, write.table, write.write);
  }
  nb::list callers;
  if (joined.complete != nullptr)
    for (const auto& [rank, part] : joined.complete->value.waiting) callers.append(python_of(part.context));
  nb::object replaced = nb::none();
  if (joined.replaced) replaced = python_of(*joined.replaced);
  return nb::make_tuple(replaced, callers);
}

// The hosted updates of all ranks, in their order. Throws the Fault StepMismatch if some of them push.
nb::list updates(SyncGroups& groups, nb::handle from) {
  const std::string table = nb::cast<std::string>(from.attr("table"));
  const std::vector<const RankWrite*> parts = SyncGroups::parts(entry_of(groups, from));
  require(are_hosted(table, parts), "the parts are pushes, which the engine makes one of");
  nb::list found;
  for (const RankWrite* part : parts) found.append(dynamic_cast<const HostedUpdate&>(*part->hosted).update());
  return found;
}

nb::list steps(const SyncGroups& groups) {
  nb::list found;
  for (const GroupStep& step : groups.steps())
    found.append(nb::make_tuple(step.table, step.job, step.world_size, step.next_sequence));
  return found;
}


// No call gives up the interpreter lock: none waits for anything, and giving it up costs more than they do.
void bind_lease(nb::module_& m) {
  nb::class_<Lease>(m, "Lease")
      .def(
          "__init__",
          [](Lease* self, int64_t shard, double seconds, nb::object clock) {
            new (self) Lease(shard, seconds, clock_of(std::move(clock), boot_seconds));
          },
          nb::arg("shard"), nb::arg("seconds"), nb::arg("clock") = nb::none())
      .def_prop_ro("seconds", &Lease::seconds)
      .def("now", &Lease::now)
      .def("pulse", &Lease::pulse)
      .def("check", &Lease::check)
      .def("confirm", &Lease::confirm, nb::arg("began"))
      .def("revoke", &Lease::revoke, nb::arg("reason"));
  m.def("boot_seconds", &boot_seconds);
}

std::vector<std::string> names_of(nb::iterable names) {
  std::vector<std::string> found;
  for (const nb::handle name : names) found.push_back(nb::cast<std::string>(name));
  return found;
}

// Streams as they were at one moment. Made in a shard's turn, and turned into objects of Python after it: that takes 30 times as long.
struct HeldStreams {
  std::vector<HeldStream> streams;

  nb::tuple at(size_t place) const {
    if (place >= streams.size()) throw nb::index_error();
    const HeldStream& stream = streams[place];
    nb::list done;
    for (const HeldStream::Write& write : stream.done) done.append(nb::make_tuple(write.sequence, write.created, write.table->name));
    return nb::make_tuple(stream.name, nb::make_tuple(stream.incarnation, stream.oldest_unacknowledged, done));
  }
};

HeldStreams streams(const CompletedWrites& writes, nb::iterable tables) {
  const std::vector<std::string> names = names_of(tables);
  WithoutInterpreter release;
  return {writes.streams(names)};
}

void restore_stream(CompletedWrites& writes, const std::string& name, nb::sequence marked, nb::iterable tables) {
  StreamWrites stream{nb::cast<int64_t>(marked[0]), nb::cast<int64_t>(marked[1]), {}};
  for (const nb::handle write : marked[2])
    stream.done.push_back({nb::cast<int64_t>(write[0]), nb::cast<int64_t>(write[1]), nb::cast<std::string>(write[2])});
  writes.restore(name, std::move(stream), names_of(tables));
}

void bind_completed_writes(nb::module_& m) {
  nb::class_<HeldStreams>(m, "HeldStreams")
      .def("__len__", [](const HeldStreams& held) { return held.streams.size(); })
      .def("__getitem__", &HeldStreams::at, nb::arg("place"))
      .def("__iter__", [](nb::handle held) { return nb::steal<nb::iterator>(PySeqIter_New(held.ptr())); });
  nb::class_<CompletedWrites>(m, "CompletedWrites")
      .def(nb::init<size_t, size_t>(), nb::arg("max_streams") = kMaxStreams, nb::arg("max_forgotten") = kMaxForgottenStreams)
      .def(
          "admit",
          [](CompletedWrites& writes, nb::handle context, nb::object future) {
            return writes.admit(context_of(context), completion_of(std::move(future)));
          },
          nb::arg("context"), nb::arg("future"))
      .def(
          "applied",
          [](CompletedWrites& writes, nb::handle context, nb::handle done, const std::string& table) {
            writes.applied(context_of(context), done_of(done), table);
          },
          nb::arg("context"), nb::arg("done"), nb::arg("table"))
      .def(
          "failed",
          [](CompletedWrites& writes, nb::handle context, nb::handle error) { writes.failed(context_of(context), fault_of(error)); },
          nb::arg("context"), nb::arg("error"))
      .def("dropped", &CompletedWrites::dropped, nb::arg("table"))
      .def("fence", &CompletedWrites::fence, nb::arg("job"), nb::arg("incarnation"), nb::kw_only(), nb::arg("forget"))
      .def(
          "require_current",
          [](const CompletedWrites& writes, nb::handle context) { writes.require_current(context_of(context)); },
          nb::arg("context"))
      .def("require_possible", &CompletedWrites::require_possible, nb::arg("of_whom"), nb::arg("incarnation"))
      .def("hear_given", &CompletedWrites::hear_given, nb::arg("incarnation"))
      .def("streams", &streams, nb::arg("tables"))
      .def("restore", &restore_stream, nb::arg("name"), nb::arg("marked"), nb::arg("tables"))
      .def_prop_ro("highest_incarnation", &CompletedWrites::highest_incarnation)
      .def_prop_ro("num_forgotten_streams", &CompletedWrites::num_forgotten_streams);
}

void bind_sync_groups(nb::module_& m) {
  nb::class_<SyncGroups>(m, "SyncGroups")
      .def(
          "__init__",
          [](SyncGroups* self, double timeout_seconds, nb::object clock, size_t max_groups, size_t max_waiting_bytes) {
            new (self) SyncGroups(timeout_seconds, clock_of(std::move(clock), monotonic_seconds), max_groups, max_waiting_bytes);
          },
          nb::arg("timeout_seconds"), nb::arg("clock") = nb::none(), nb::arg("max_groups") = kMaxGroups,
          nb::arg("max_waiting_bytes") = 0)
      .def("is_applied", &is_applied, nb::arg("write"))
      .def("join", &join, nb::arg("context"), nb::arg("write"))
      .def("updates", &updates, nb::arg("update"))
      .def(
          "complete", [](SyncGroups& groups, nb::handle from) { groups.complete(entry_of(groups, from)); }, nb::arg("write"))
      .def(
          "abandon", [](SyncGroups& groups, nb::handle from) { groups.abandon(entry_of(groups, from)); }, nb::arg("write"))
      .def(
          "require_step",
          [](SyncGroups& groups, const std::string& table, nb::handle member) { groups.require_step(table, group_of(member)); },
          nb::arg("table"), nb::arg("member"))
      .def(
          "fence",
          [](SyncGroups& groups, const std::string& job, int64_t incarnation, bool forget) {
            return python_of(groups.fence(job, incarnation, forget));
          },
          nb::arg("job"), nb::arg("incarnation"), nb::kw_only(), nb::arg("forget"))
      .def(
          "drop_table", [](SyncGroups& groups, const std::string& table) { return python_of(groups.drop_table(table)); },
          nb::arg("table"))
      .def("steps", &steps)
      .def(
          "restore",
          [](SyncGroups& groups, nb::sequence step) {
            groups.restore({nb::cast<std::string>(step[0]), nb::cast<std::string>(step[1]), nb::cast<int64_t>(step[2]),
                            nb::cast<int64_t>(step[3])});
          },
          nb::arg("step"))
      .def("next_deadline", &SyncGroups::next_deadline)
      .def("expire", [](SyncGroups& groups) { return python_of(groups.expire()); });
}

}  // namespace

void bind_writes(nb::module_& m) {
  bind_sync_groups(m);
  bind_lease(m);
  bind_completed_writes(m);
  reach_failpoint = [](const char* name) {
    const WithInterpreter interpreter;
    try {
      nb::module_::import_("geartrain.ams.observe.failpoints").attr("reach")(name);
    } catch (nb::python_error& error) {
      throw fault_of(error.value());
    }
  };
  m.def("arm_failpoints", [](bool armed) { failpoints_armed = armed; }, nb::arg("armed"));
  m.def("reach_failpoint", [](const char* name) { failpoint(name); }, nb::arg("name"));
}

}  // namespace geartrain
