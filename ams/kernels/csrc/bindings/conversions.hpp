// Where the engine meets Python: its values and errors, futures as completions, a clock of a test. All need the interpreter lock.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "base/clock.hpp"
#include "calls/call.hpp"
#include "bindings/module.hpp"
#include "writes/rank_write.hpp"

namespace geartrain {

namespace nb = nanobind;

// The typed error that a fault is, not raised.
nb::object error_of(const Fault& fault);
// What an error of Python says. One that is none of ours is an InternalError.
Fault fault_of(nb::handle error);

// The value of one of ams/values/shard_messages.py. Throws the Fault InvalidArgument for a number beyond 64 bits.
CallContext context_of(nb::handle context);
SyncGroup group_of(nb::handle group);
Scalars scalars_of(nb::handle numbers);  // a mapping
// Of a push of `count` ids, or None: nothing is said. Its occurrences stay those of `batch`.
BatchFacts batch_of(nb::handle batch, size_t count);
nb::object python_of(const Done& done);

// Keeps an object alive, and may be destroyed on any thread, with or without the interpreter lock.
std::shared_ptr<nb::object> kept(nb::object object);

// The inputs of an UpdateHosted of ams/values/shard_messages.py.
class HostedUpdate : public HostedWrite {
 public:
  explicit HostedUpdate(nb::object update) : update_(kept(std::move(update))) {}
  const nb::object& update() const { return *update_; }
  size_t bytes() const override;
  Fingerprint fingerprint(Fingerprint begin) const override;

 private:
  std::shared_ptr<nb::object> update_;
};
// One rank's part of it. Throws Faults.
RankWrite rank_write_of(nb::object update);

// Settles a concurrent.futures.Future with Done or an error.
Completion completion_of(nb::object future);

// Lets Ctrl-C end a wait of the main thread: runs the handlers of signals that came. A Turn::Look, which never gives up but by
// what a handler raises. Takes the interpreter lock.
bool look_for_signals();

// None and time.monotonic are clocks of C++; any other callable is asked, with the interpreter lock.
Clock clock_of(nb::object clock, double (*native)());

}  // namespace geartrain
