#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <map>

#include "client/row_call.hpp"
#include "python/conversions.hpp"
#include "python/module.hpp"

namespace geartrain {
namespace {

using Flags = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// As values of ams/values/shard_messages.py.
std::optional<SyncGroup> group_from(nb::handle group) {
  if (group.is_none()) return std::nullopt;
  return group_of(group);
}

void require_rows(const IdArray& ids, size_t rows) {
  if (rows != ids.size())
    throw Fault("InvalidRows", std::to_string(rows) + " rows for " + std::to_string(ids.size()) + " ids; there must be one per id");
}

std::unique_ptr<RowCall> sent(Connection& connection, const Operation& operation, double seconds) {
  const nb::gil_scoped_release release;
  return std::make_unique<RowCall>(connection, operation, seconds);
}

std::unique_ptr<RowCall> begin_pull(Connection& connection, nb::handle context, const std::string& table, const IdArray& ids, int64_t dim,
                                    int dtype_code, bool with_present, nb::handle required_sync, double seconds) {
  static uint8_t wanted;
  PullRequest request;
  request.ids = ids.data();
  request.count = static_cast<int64_t>(ids.size());
  request.dim = dim;
  require(dtype_code >= 0 && dtype_code < kNumDTypes, "dtype code must be 0 (float32), 1 (float16) or 2 (bfloat16)");
  request.dtype = static_cast<DType>(dtype_code);
  if (with_present) request.present = &wanted;
  request.required_sync = group_from(required_sync);
  return sent(connection, {context_of(context), table, std::move(request)}, seconds);
}

std::unique_ptr<RowCall> begin_push(Connection& connection, nb::handle context, const std::string& table, const IdArray& ids,
                                    const Matrix& gradients, int dtype_code, const std::optional<double>& lr, double scale,
                                    const std::map<std::string, double>& scalars, nb::handle group, bool step_goes_on, double seconds) {
  require_rows(ids, gradients.shape(0));
  PushRequest request;
  request.ids = ids.data();
  request.count = static_cast<int64_t>(ids.size());
  request.dim = static_cast<int64_t>(gradients.shape(1));
  request.dtype = checked_dtype(gradients, dtype_code);
  request.gradients = static_cast<const char*>(gradients.data());
  request.lr = lr;
  request.scale = scale;
  request.scalars.assign(scalars.begin(), scalars.end());
  request.group = group_from(group);
  request.step_goes_on = step_goes_on;
  return sent(connection, {context_of(context), table, std::move(request)}, seconds);
}

std::unique_ptr<RowCall> begin_assign(Connection& connection, nb::handle context, const std::string& table, const IdArray& ids,
                                      const Matrix& rows, int dtype_code, double seconds) {
  require_rows(ids, rows.shape(0));
  AssignRequest request;
  request.ids = ids.data();
  request.count = static_cast<int64_t>(ids.size());
  request.dim = static_cast<int64_t>(rows.shape(1));
  request.dtype = checked_dtype(rows, dtype_code);
  request.rows = static_cast<const char*>(rows.data());
  return sent(connection, {context_of(context), table, std::move(request)}, seconds);
}

// Asked while a caller waits: signals are Python's, and raise there what their handlers raise.
bool look_for_signals() {
  const nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
  return false;
}

bool wait(RowCall& call, double seconds) {
  using Clock = std::chrono::steady_clock;
  const nb::gil_scoped_release release;
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e8)));
  return call.wait(deadline, look_for_signals);
}

nb::object done(RowCall& call) { return python_of(call.done()); }

void place(RowCall& call, const MatrixOutput& out, int dtype_code, const IdArray& ids, const std::optional<IdArray>& positions,
           const std::optional<Flags>& present) {
  if (positions ? positions->size() != ids.size() : out.shape(0) < ids.size())
    throw Fault("InvalidRows", std::to_string(positions ? positions->size() : out.shape(0)) + " places for " + std::to_string(ids.size()) +
                                   " rows; there must be one per id");
  if (present && present->size() != out.shape(0))
    throw Fault("InvalidRows", "present is [" + std::to_string(present->size()) + "]; it must be [" + std::to_string(out.shape(0)) +
                                   "], as many as out has rows");
  PullRequest request;
  request.ids = ids.data();
  request.count = static_cast<int64_t>(ids.size());
  request.dim = static_cast<int64_t>(out.shape(1));
  request.dtype = checked_dtype(out, dtype_code);
  request.rows = static_cast<char*>(out.data());
  request.present = present ? present->data() : nullptr;
  request.positions = positions ? positions->data() : nullptr;
  request.size = static_cast<int64_t>(out.shape(0));
  const nb::gil_scoped_release release;
  call.place(request);
}

}  // namespace

void bind_row_call(nb::module_& m) {
  nb::class_<RowCall>(m, "RowCall")
      .def("wait", &wait, nb::arg("seconds"))
      .def("done", &done)
      .def("place", &place, nb::arg("out").noconvert(), nb::arg("dtype_code"), nb::arg("ids").noconvert(),
           nb::arg("positions").noconvert().none(), nb::arg("present").noconvert().none());
  m.def("begin_pull", &begin_pull, nb::arg("connection"), nb::arg("context"), nb::arg("table"), nb::arg("ids").noconvert(),
        nb::arg("dim"), nb::arg("dtype_code"), nb::arg("with_present"), nb::arg("required_sync").none(), nb::arg("seconds"),
        nb::keep_alive<0, 1>());
  m.def("begin_push", &begin_push, nb::arg("connection"), nb::arg("context"), nb::arg("table"), nb::arg("ids").noconvert(),
        nb::arg("gradients").noconvert(), nb::arg("dtype_code"), nb::arg("lr").none(), nb::arg("scale"), nb::arg("scalars"),
        nb::arg("group").none(), nb::arg("step_goes_on"), nb::arg("seconds"), nb::keep_alive<0, 1>());
  m.def("begin_assign", &begin_assign, nb::arg("connection"), nb::arg("context"), nb::arg("table"), nb::arg("ids").noconvert(),
        nb::arg("rows").noconvert(), nb::arg("dtype_code"), nb::arg("seconds"), nb::keep_alive<0, 1>());
}

}  // namespace geartrain
