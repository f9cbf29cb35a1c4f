// A Fault in Python is the error of values/errors.py whose class it names.
#include "python/conversions.hpp"
#include "python/module.hpp"

namespace geartrain {

void bind_fault(nb::module_&) {
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const Fault& fault) {
      const nb::object raised = error_of(fault);
      PyErr_SetObject(raised.type().ptr(), raised.ptr());
    }
  });
}

}  // namespace geartrain
