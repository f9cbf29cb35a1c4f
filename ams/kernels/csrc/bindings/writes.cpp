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

nb::list steps(const SyncGroups& groups) {
  nb::list found;
  for (const GroupStep& step : groups.steps())
    found.append(nb::make_tuple(step.table, step.job, step.world_size, step.next_sequence));
  return found;
}


// No call releases the interpreter lock: none waits, and releasing it costs more than the call.
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

// Streams at one moment. Copied in a shard's turn, and converted to Python objects after it, which takes 30 times as
// long.
struct HeldStreams {
  std::vector<HeldStream> streams;

  nb::tuple at(size_t place) const {
    if (place >= streams.size()) throw nb::index_error();
    const HeldStream& stream = streams[place];
    nb::list done;
    for (const HeldStream::Write& write : stream.done)
      done.append(nb::make_tuple(write.sequence, write.created, write.table->name));
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
      .def(nb::init<size_t, size_t>(), nb::arg("max_streams") = kMaxStreams,
           nb::arg("max_forgotten") = kMaxForgottenStreams)
      .def("dropped", &CompletedWrites::dropped, nb::arg("table"))
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
            new (self) SyncGroups(timeout_seconds, clock_of(std::move(clock), monotonic_seconds), max_groups,
                                  max_waiting_bytes);
          },
          nb::arg("timeout_seconds"), nb::arg("clock") = nb::none(), nb::arg("max_groups") = kMaxGroups,
          nb::arg("max_waiting_bytes") = 0)
      .def(
          "require_step",
          [](SyncGroups& groups, const std::string& table, nb::handle member) {
            groups.require_step(table, group_of(member));
          },
          nb::arg("table"), nb::arg("member"))
      .def("steps", &steps)
      .def(
          "restore",
          [](SyncGroups& groups, nb::sequence step) {
            groups.restore({nb::cast<std::string>(step[0]), nb::cast<std::string>(step[1]), nb::cast<int64_t>(step[2]),
                            nb::cast<int64_t>(step[3])});
          },
          nb::arg("step"))
      .def("next_deadline", &SyncGroups::next_deadline);
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
