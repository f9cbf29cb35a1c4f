// Calls over a connection step by step, and the parts of a write, for the tests.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "bindings/conversions.hpp"
#include "bindings/module.hpp"
#include "carriers/connection.hpp"
#include "client/prepared_write.hpp"

namespace geartrain {
namespace {

using Clock = std::chrono::steady_clock;

Clock::time_point after(double seconds) {
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e8)));
}

bool wait_for(Connection::Call& call, double seconds) {
  WithoutInterpreter release;
  return call.wait(after(seconds), look_for_signals);
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> room_of(Connection::Call& call, size_t bytes) {
  const size_t shape[1] = {bytes};
  return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(call.request(), 1, shape, nb::find(&call));
}

nb::bytes reply_of(Connection::Call& call) {
  const auto reply = call.reply();
  return nb::bytes(reply.data(), reply.size());
}

template <class T>
nb::object array(T* data, std::vector<size_t> shape, nb::handle owner) {
  return nb::cast(nb::ndarray<nb::numpy, T>(data, shape.size(), shape.data(), owner), nb::rv_policy::reference);
}

// A part's ids [N] and rows [N, dim], half types as uint16: its own, or, where all rows are of one shard, those of the
// write. Then what it says of its batch, or None.
nb::tuple part_of(nb::handle_t<PreparedWrite> self, size_t index) {
  const auto& write = nb::cast<const PreparedWrite&>(self);
  const auto parts = write.parts();
  if (index >= parts.size()) throw nb::index_error();
  const ShardPart& part = parts[index];
  const size_t count = static_cast<size_t>(part.count), dim = static_cast<size_t>(write.dim());
  nb::object owner = nb::borrow(self);
  const char* rows = write.rows_of(part);
  if (rows == nullptr) {
    std::unique_ptr<char[]> copy(new char[std::max<size_t>(1, count * write.row_bytes())]);
    write.copy_rows_of(part, copy.get());
    rows = copy.get();
    owner = nb::capsule(copy.release(), [](void* bytes) noexcept { delete[] static_cast<char*>(bytes); });
  }
  const nb::object bits =
      write.dtype() == DType::float32
          ? array(const_cast<float*>(reinterpret_cast<const float*>(rows)), {count, dim}, owner)
          : array(const_cast<uint16_t*>(reinterpret_cast<const uint16_t*>(rows)), {count, dim}, owner);
  const BatchFacts batch = write.batch_of(part);
  nb::object said = nb::none();
  if (batch.occurrences != nullptr || batch.step || batch.unix_seconds || batch.pulled_at)
    said = nb::make_tuple(
        batch.occurrences == nullptr ? nb::none() : array(const_cast<uint32_t*>(batch.occurrences), {count}, self),
        batch.step, batch.unix_seconds, batch.pulled_at);
  return nb::make_tuple(part.shard, array(const_cast<int64_t*>(part.ids), {count}, self), bits,
                        static_cast<int>(write.dtype()), said);
}

template <class... Extra>
void add_method(nb::module_& m, const char* type, const char* name, auto function, const Extra&... extra) {
  const nb::object owner = m.attr(type);
  owner.attr(name) = nb::cpp_function(function, nb::name(name), nb::scope(owner), nb::is_method(), extra...);
}

}  // namespace

void bind_test_connections(nb::module_& m) {
  nb::class_<Connection::Call>(m, "DataCall")
      .def("room", &room_of, nb::arg("bytes"))
      .def(
          "send", [](Connection::Call& call, double seconds) { call.send(after(seconds), look_for_signals); },
          nb::arg("seconds") = 1e8, nb::call_guard<WithoutInterpreter>())
      .def("wait", &wait_for, nb::arg("seconds"))
      .def("reply", &reply_of);
  add_method(
      m, "DataConnection", "begin",
      [](Connection& connection, size_t request_bytes, size_t max_reply_bytes) {
        return connection.begin(request_bytes, max_reply_bytes);
      },
      nb::arg("request_bytes"), nb::arg("max_reply_bytes"), nb::call_guard<WithoutInterpreter>(),
      nb::keep_alive<0, 1>());
  add_method(m, "PreparedWrite", "part", &part_of, nb::arg("index"));
}

}  // namespace geartrain
