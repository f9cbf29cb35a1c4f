// The two ends of the data plane in Python: a server over a handler, and connections to it.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/conversions.hpp"
#include "bindings/module.hpp"
#include "ring/ring_client.hpp"
#include "server/server.hpp"
#include "tcp/tcp_client.hpp"

namespace geartrain {
namespace {

// Calls a Python callable with messages for an operator, from a thread without the interpreter lock.
Greeter::Warn warn_of(const nb::object& tell) {
  if (tell.is_none()) return nullptr;
  return [told = kept(tell)](const std::string& words) {
    if (is_interpreter_gone()) return;  // the thread that ends it may wait for this one
    const WithInterpreter interpreter;
    try {
      told->operator()(words);
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("a warning of the data plane");
    }
  };
}

// If not closed, the server ends with its object: a call of it may need the interpreter lock, or the turn of a caller
// that waits for the lock.
class ServerOfPython : public DataServer {
 public:
  using DataServer::DataServer;
  ~ServerOfPython() {
    const WithoutInterpreter release;
    close();
  }
};

// Connections share the grant itself, so that their threads can release it without the interpreter lock.
struct GrantOfPython {
  std::shared_ptr<Grant> grant;
};

}  // namespace

void bind_carriers(nb::module_& m) {
  static PyObject* lost = new_exception(m, "ConnectionLost", PyExc_ConnectionError);
  static PyObject* full = new_exception(m, "ConnectionFull", PyExc_RuntimeError);
  translate<Lost, [](const Lost& error) { PyErr_SetString(lost, error.what()); }>();
  translate<Full, [](const Full& error) { PyErr_SetString(full, error.what()); }>();
  translate<Refused, [](const Refused& error) { PyErr_SetString(full, error.what()); }>();
  translate<std::system_error, [](const std::system_error& error) { PyErr_SetString(PyExc_OSError, error.what()); }>();
  nb::class_<Handler>(m, "Handler");
  nb::class_<GrantOfPython>(m, "Grant")
      .def(
          "__init__",
          [](GrantOfPython* self, const std::string& job, std::vector<Grant::Rule> rules, double until) {
            new (self) GrantOfPython{std::make_shared<Grant>(job, std::move(rules), until)};
          },
          nb::arg("job"), nb::arg("rules"), nb::arg("until"))
      .def(
          "rights", [](const GrantOfPython& self, const std::string& table) { return self.grant->rights(table); },
          nb::arg("table"))
      .def(
          "owns", [](const GrantOfPython& self, const std::string& name) { return self.grant->owns(name); },
          nb::arg("name"))
      .def("end", [](const GrantOfPython& self) { self.grant->end(); })
      .def("pop_refused",
           [](const GrantOfPython& self) {
             const auto [kept, count] = self.grant->pop_refused();
             nb::list refusals;
             for (const auto& [table, rights] : kept) refusals.append(nb::make_tuple(table, rights));
             return nb::make_tuple(refusals, count);
           })
      .def_prop_ro("is_over", [](const GrantOfPython& self) { return self.grant->is_over(); })
      .def_prop_ro("is_in_use", [](const GrantOfPython& self) { return self.grant.use_count() > 1; });
  nb::class_<ServerOfPython>(m, "DataServer")
      .def(
          "__init__",
          [](ServerOfPython* self, std::shared_ptr<Handler> handler, size_t max_mailboxes, size_t max_connections,
             double greeting_seconds, double silence_seconds, double spin_seconds, size_t max_frame_bytes,
             size_t most_bytes, size_t max_received_bytes, bool uses_tls, const std::string& host, uint16_t port,
             const nb::object& warn) {
            new (self) ServerOfPython(std::move(handler),
                                      {max_mailboxes, max_connections, greeting_seconds, silence_seconds, spin_seconds,
                                       max_frame_bytes, most_bytes, max_received_bytes, uses_tls},
                                      host, port, warn_of(warn));
          },
          nb::arg("handler"), nb::kw_only(), nb::arg("max_mailboxes") = ServerLimits().max_mailboxes,
          nb::arg("max_connections") = ServerLimits().max_connections,
          nb::arg("greeting_seconds") = ServerLimits().greeting_seconds,
          nb::arg("silence_seconds") = ServerLimits().silence_seconds,
          nb::arg("spin_seconds") = ServerLimits().spin_seconds,
          nb::arg("max_frame_bytes") = ServerLimits().max_frame_bytes,
          nb::arg("most_bytes") = ServerLimits().most_bytes,
          nb::arg("max_received_bytes") = ServerLimits().max_received_bytes, nb::arg("uses_tls") = false,
          nb::arg("host") = "", nb::arg("port") = 0, nb::arg("warn") = nb::none())
      .def(
          "offer",
          [](ServerOfPython& server, const GrantOfPython* grant) {
            const DataPlaneOffer offer = server.offer(grant == nullptr ? nullptr : grant->grant);
            return nb::make_tuple(offer.socket, nb::bytes(offer.secret.data(), offer.secret.size()), offer.port);
          },
          nb::arg("grant") = nb::none())
      .def("close", &DataServer::close, nb::call_guard<WithoutInterpreter>())
      .def_prop_ro("num_connections", &DataServer::num_connections)
      .def_prop_ro("num_mailboxes", &DataServer::num_mailboxes);
  m.attr("CALLER_SPIN_SECONDS") = RingLimits().spin_seconds;
  m.attr("SERVER_SPIN_SECONDS") = ServerLimits().spin_seconds;
  nb::class_<Connection>(m, "DataConnection")
      .def("close", &Connection::close, nb::call_guard<WithoutInterpreter>())
      .def_prop_ro("is_lost", &Connection::is_lost);
  nb::class_<RingConnection, Connection>(m, "RingConnection")
      .def_prop_ro("num_mailboxes", &RingConnection::num_mailboxes)
      .def_prop_ro("has_refused", &RingConnection::has_refused);
  m.def(
      "connect_tcp",
      [](const std::string& host, uint16_t port, const nb::bytes& secret, double timeout_seconds, bool uses_tls,
         size_t max_frame_bytes, size_t max_in_flight_bytes, size_t max_records) {
        const std::string shown(secret.c_str(), secret.size());
        WithoutInterpreter release;
        return connect_tcp(host, port, shown, timeout_seconds, uses_tls,
                           {max_frame_bytes, max_in_flight_bytes, max_records});
      },
      nb::arg("host"), nb::arg("port"), nb::arg("secret"), nb::arg("timeout_seconds"), nb::kw_only(),
      nb::arg("uses_tls") = false, nb::arg("max_frame_bytes") = TcpLimits().max_frame_bytes,
      nb::arg("max_in_flight_bytes") = TcpLimits().max_in_flight_bytes,
      nb::arg("max_records") = TcpLimits().max_records);
  m.def("load_tls", &Tls::load, "Raises ConfigError unless OpenSSL 3 of the system can be loaded.");
  m.def(
      "connect_ring",
      [](const std::string& socket, const nb::bytes& secret, double timeout_seconds, double spin_seconds,
         double idle_seconds, double answer_seconds, size_t max_pool_bytes, size_t max_mailboxes) {
        const std::string shown(secret.c_str(), secret.size());
        WithoutInterpreter release;
        return connect_ring(socket, shown, timeout_seconds,
                            {spin_seconds, idle_seconds, answer_seconds, max_pool_bytes, max_mailboxes});
      },
      nb::arg("socket"), nb::arg("secret"), nb::arg("timeout_seconds"), nb::kw_only(),
      nb::arg("spin_seconds") = RingLimits().spin_seconds, nb::arg("idle_seconds") = RingLimits().idle_seconds,
      nb::arg("answer_seconds") = RingLimits().answer_seconds, nb::arg("max_pool_bytes") = RingLimits().max_pool_bytes,
      nb::arg("max_mailboxes") = RingLimits().max_mailboxes);
}

}  // namespace geartrain
