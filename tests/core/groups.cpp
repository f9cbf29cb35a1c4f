// Sync groups and completed writes for the tests, which ask them without a shard.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "bindings/conversions.hpp"
#include "bindings/module.hpp"
#include "writes/completed_writes.hpp"
#include "writes/sync_groups.hpp"

namespace geartrain {
namespace {

nb::object python_of(const CallContext& context) {
  return nb::module_::import_("geartrain.ams.values.shard_messages").attr("CallContext")(
      nb::arg("stream") = context.stream, nb::arg("incarnation") = context.incarnation,
      nb::arg("sequence") = context.sequence, nb::arg("oldest_unacknowledged") = context.oldest_unacknowledged,
      nb::arg("shard_incarnation") = context.shard_incarnation, nb::arg("cluster_version") = context.cluster_version,
      nb::arg("table_incarnation") = context.table_incarnation);
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

nb::object of_ops(const char* name) { return nb::module_::import_("geartrain.ams.kernels.ops").attr(name); }

// A Push or UpdateHosted of ams/values/shard_messages.py, which has a group.
struct Write {
  explicit Write(nb::handle from) : table(nb::cast<std::string>(from.attr("table"))) {
    write = rank_write_of(nb::borrow(from));
    if (!nb::hasattr(from, "gradients")) return;
    PushRequest& push = write.push;
    write.hosted = nullptr;
    const nb::object ids = of_ops("checked_ids")(from.attr("ids")),
                     bits = of_ops("as_bits")(from.attr("gradients"), "gradients");
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

bool is_applied(SyncGroups& groups, nb::handle from) {
  const Write write(from);
  const WithoutInterpreter release;
  return groups.is_applied(write.table, write.write);
}

// The part of the same rank that it is in the place of with its error, or None; and the callers of all ranks, none if
// one is missing.
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

}  // namespace

template <class Function, class... Extra>
void add(nb::handle kind, const char* name, Function function, const Extra&... extra) {
  kind.attr(name) = nb::cpp_function(function, nb::name(name), nb::scope(kind), nb::is_method(), extra...);
}

void bind_groups(nb::module_& m) {
  const nb::object groups = m.attr("SyncGroups"), writes = m.attr("CompletedWrites");
  add(groups, "is_applied", &is_applied);
  add(groups, "join", &join);
  add(groups, "updates", &updates);
  add(groups, "complete", [](SyncGroups& self, nb::handle from) { self.complete(entry_of(self, from)); });
  add(groups, "abandon", [](SyncGroups& self, nb::handle from) { self.abandon(entry_of(self, from)); });
  add(groups, "drop_table",
      [](SyncGroups& self, const std::string& table) { return python_of(self.drop_table(table)); });
  add(groups, "expire", [](SyncGroups& self) { return python_of(self.expire()); });
  add(groups, "fence", [](SyncGroups& self, const std::string& job, int64_t incarnation, bool forget) {
    return python_of(self.fence(job, incarnation, forget));
  }, nb::arg("job"), nb::arg("incarnation"), nb::kw_only(), nb::arg("forget"));
  add(writes, "admit", [](CompletedWrites& self, nb::handle context, nb::object future) {
    return self.admit(context_of(context), completion_of(std::move(future)));
  });
  add(
      writes, "applied",
      [](CompletedWrites& self, nb::handle context, nb::handle done, const std::string& table) {
        self.applied(context_of(context),
                     {nb::cast<int64_t>(done.attr("created")), nb::cast<bool>(done.attr("duplicate"))}, table);
      },
      nb::arg("context"), nb::arg("done"), nb::arg("table"));
  add(writes, "failed", [](CompletedWrites& self, nb::handle context, nb::handle error) {
    self.failed(context_of(context), fault_of(error));
  });
  add(writes, "fence", &CompletedWrites::fence, nb::arg("job"), nb::arg("incarnation"), nb::kw_only(),
      nb::arg("forget"));
}

}  // namespace geartrain
