// Conversions between the engine and Python: values, errors, futures as completions, test clocks. All need the
// interpreter lock.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "base/clock.hpp"
#include "calls/call.hpp"
#include "bindings/module.hpp"
#include "writes/rank_write.hpp"

namespace geartrain {

namespace nb = nanobind;

// Returns the Python error of a fault, without raising it.
nb::object error_of(const Fault& fault);
// Returns the fault of a Python error. One of another class becomes an InternalError.
Fault fault_of(nb::handle error);

// Converts a value of ams/values/shard_messages.py. Throws the Fault InvalidArgument for a number beyond 64 bits.
CallContext context_of(nb::handle context);
SyncGroup group_of(nb::handle group);
Scalars scalars_of(nb::handle numbers);  // a mapping
// Facts of a push of `count` ids; None: none. Occurrences stay in the memory of `batch`.
BatchFacts batch_of(nb::handle batch, size_t count);
nb::object python_of(const Done& done);

// Keeps an object alive; may be destroyed on any thread, with or without the interpreter lock.
std::shared_ptr<nb::object> kept(nb::object object);

// Inputs of an UpdateHosted of ams/values/shard_messages.py.
class HostedUpdate : public HostedWrite {
 public:
  explicit HostedUpdate(nb::object update) : update_(kept(std::move(update))) {}
  const nb::object& update() const { return *update_; }
  size_t bytes() const override;
  Fingerprint fingerprint(Fingerprint begin) const override;

 private:
  std::shared_ptr<nb::object> update_;
};
// Converts one rank's part. Throws Faults.
RankWrite rank_write_of(nb::object update);

// Settles a concurrent.futures.Future with Done or an error.
Completion completion_of(nb::object future);

// Lets Ctrl-C end a wait of the main thread: runs pending signal handlers. A Turn::Look, which gives up only by what a
// handler raises. Takes the interpreter lock.
bool look_for_signals();

// None and time.monotonic are clocks of C++; any other callable is called, with the interpreter lock.
Clock clock_of(nb::object clock, double (*native)());

}  // namespace geartrain
