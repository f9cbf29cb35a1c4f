// A Fault in Python is the error of values/errors.py whose class it names.
#include <nanobind/stl/string.h>

#include <string_view>

#include "base/module.hpp"
#include "engine/call.hpp"

namespace geartrain {
namespace {

nb::object error_of(const Fault& fault) {
  const nb::object kind = nb::module_::import_("geartrain.ams.values.errors").attr("error_named")(fault.name);
  // Words may be another process's, or cut.
  const nb::object text = nb::steal(PyUnicode_DecodeUTF8(fault.message.data(), static_cast<Py_ssize_t>(fault.message.size()), "replace"));
  return fault.name == std::string_view("Busy") ? kind(text, fault.retry_after_seconds) : kind(text);
}

}  // namespace

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
