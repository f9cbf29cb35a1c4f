#include "base/module.hpp"
#include "engine/turn.hpp"

namespace geartrain {
namespace {

// Lets Ctrl-C end a wait of the main thread.
bool look_for_signals() {
  const nb::gil_scoped_acquire interpreter;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
  return false;
}

void wait(Turn::Place& place) {
  const nb::gil_scoped_release release;
  place.wait(look_for_signals);
}

void acquire(Turn& turn) {
  Turn::Place place(turn);
  wait(place);
  place.keep();
}

void exit(Turn& turn, nb::handle, nb::handle, nb::handle) { turn.release(); }

}  // namespace

void bind_turn(nb::module_& m) {
  nb::class_<Turn::Place>(m, "Place").def("wait", &wait).def("leave", &Turn::Place::leave);
  nb::class_<Turn>(m, "Turn")
      .def(nb::init<>())
      .def("try_acquire", &Turn::try_acquire)
      .def("acquire", &acquire)
      .def("release", &Turn::release)
      .def("__enter__", &acquire)
      .def("__exit__", &exit, nb::arg().none(), nb::arg().none(), nb::arg().none())
      .def("enter", [](Turn& turn) { return new Turn::Place(turn); }, nb::keep_alive<0, 1>());
}

}  // namespace geartrain
