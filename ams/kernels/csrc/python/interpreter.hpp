// Python's interpreter lock, given up and taken for the time of a block; use these, not nanobind's.
//
// When the main thread of a process has ended, Python ends every other thread that asks for its lock, by unwinding its stack. C++ cannot
// be unwound like that: the process would be aborted. Such a thread sleeps here instead until the process is gone.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace geartrain {

[[noreturn]] inline void sleep_for_ever() {
  for (;;) pause();
}

// Whether the interpreter is ending or has ended, and this thread is not the one that ends it: its lock cannot be had any more.
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

}  // namespace geartrain
