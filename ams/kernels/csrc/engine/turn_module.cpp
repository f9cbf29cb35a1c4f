#include "engine/turn.hpp"
#include "python/conversions.hpp"
#include "python/module.hpp"

namespace geartrain {
namespace {

// Never away: one thread may have several places, and waits for them in their order.
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

void exit(Turn& turn, nb::handle, nb::handle, nb::handle) { turn.release(); }

}  // namespace

void bind_turn(nb::module_& m) {
  nb::class_<Turn::Place>(m, "Place").def("wait", &wait).def("leave", &Turn::Place::leave);
  nb::class_<Turn>(m, "Turn")
      .def(nb::init<>())
      .def("try_acquire", &Turn::try_acquire)
      .def("acquire", &acquire)
      .def("release", &Turn::release)
      .def_prop_ro("num_waiting", &Turn::num_waiting)
      .def("__enter__", &acquire)
      .def("__exit__", &exit, nb::arg().none(), nb::arg().none(), nb::arg().none())
      .def("enter", [](Turn& turn) { return new Turn::Place(turn); }, nb::keep_alive<0, 1>());
}

}  // namespace geartrain
