// Shared by the bindings: accepted arrays, and conversion of a refusal to a Python exception.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <Python.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

#include "base/common.hpp"

namespace geartrain {

namespace nb = nanobind;

using IdArray = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IdOutput = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MatrixOutput = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ShardMap = nb::ndarray<const uint16_t, nb::shape<kNumBuckets>, nb::c_contig, nb::device::cpu>;  // of each bucket

// Return type typing.Any.
inline nb::any any_of(nb::object object) { return nb::steal<nb::any>(object.release()); }

// Makes an exception class of the module.
inline PyObject* new_exception(nb::module_& m, const char* name, PyObject* base) {
  PyObject* const made =
      PyErr_NewException((nb::cast<std::string>(m.attr("__name__")) + "." + name).c_str(), base, nullptr);
  m.attr(name) = nb::borrow(made);
  return made;
}

// Registers a C++ exception class with Python.
template <class Error, auto tell>
void translate() {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      tell(error);
    }
  });
}

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// float16 and bfloat16 arrays come as uint16 views: numpy has no bfloat16 of its own.
template <class Array>
DType checked_dtype(const Array& array, int code) {
  require(code >= 0 && code < kNumDTypes, "dtype code must be 0 (float32), 1 (float16) or 2 (bfloat16)");
  const DType dtype = static_cast<DType>(code);
  const auto expected = dtype == DType::float32 ? nb::dtype<float>() : nb::dtype<uint16_t>();
  require(array.dtype() == expected, "array must be float32, or uint16 for the half types");
  return dtype;
}

// Releases and takes Python's interpreter lock for a block; use these, not nanobind's.
//
// Once the main thread of a process has ended, Python ends every other thread that asks for its lock, by unwinding its
// stack. C++ cannot be unwound like that: the process would abort. Such a thread sleeps here until the process is gone.

[[noreturn]] inline void sleep_for_ever() {
  for (;;) pause();
}

// Whether the interpreter is ending or has ended, and this is not the thread that ends it: the lock is not available.
inline bool is_interpreter_gone() {
#if PY_VERSION_HEX >= 0x030D0000
  const bool is_ending = Py_IsFinalizing() != 0;
#else
  const bool is_ending = _Py_IsFinalizing() != 0;
#endif
  return (is_ending || !Py_IsInitialized()) && gettid() != getpid();
}

class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  ~WithoutInterpreter() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // the stack is being unwound
      sleep_for_ever();
    }
  }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  PyThreadState* const state_;
};

class WithInterpreter {
 public:
  WithInterpreter() : state_(taken()) {}
  ~WithInterpreter() { PyGILState_Release(state_); }
  WithInterpreter(const WithInterpreter&) = delete;
  WithInterpreter& operator=(const WithInterpreter&) = delete;

 private:
  static PyGILState_STATE taken() {
    if (is_interpreter_gone()) sleep_for_ever();
    try {
      return PyGILState_Ensure();
    } catch (...) {
      sleep_for_ever();
    }
  }

  const PyGILState_STATE state_;
};

void bind_carriers(nb::module_& m);
void bind_gradients(nb::module_& m);
void bind_row_store(nb::module_& m);
void bind_class_pass(nb::module_& m);
void bind_neighbours(nb::module_& m);
void bind_position_lru(nb::module_& m);
void bind_lookup(nb::module_& m);
void bind_rows_client(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_writes(nb::module_& m);
// Of tests/core, unless the core is built for users.
void bind_test_helpers(nb::module_& m);

}  // namespace geartrain
