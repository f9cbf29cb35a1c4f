#include "python/failpoint.hpp"

#include "python/conversions.hpp"

namespace geartrain {

std::atomic<bool> failpoints_armed{false};

void reach_failpoint(const char* name) {
  const WithInterpreter interpreter;
  try {
    nb::module_::import_("geartrain.ams.observe.failpoints").attr("reach")(name);
  } catch (nb::python_error& error) {
    throw fault_of(error.value());
  }
}

}  // namespace geartrain
