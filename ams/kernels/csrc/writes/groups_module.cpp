#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "python/conversions.hpp"
#include "python/module.hpp"
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

}  // namespace

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

}  // namespace geartrain
