// Connection of a client to one shard, over any carrier.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "calls/call.hpp"

namespace geartrain {

using SteadyTime = std::chrono::steady_clock::time_point;

// The connection is lost. A call that was sent may have been done.
struct Lost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The connection has no room for this call until others have ended. Nothing was sent.
struct Full : std::runtime_error {
  explicit Full(const char* what, bool shard_is_silent = false)
      : std::runtime_error(what), is_silent(shard_is_silent) {}
  bool is_silent;  // whether the shard was asked for room, and has not answered yet
};

// The connection does not carry calls of this size; another one may. Nothing was sent.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr size_t kMaxCallBytes = size_t{1} << 30;  // most bytes of a request, or of its reply

// Throws the Fault MessageTooLarge for a call too large for any connection.
inline void require_call_fits(size_t request_bytes, size_t reply_bytes, size_t most = kMaxCallBytes) {
  const size_t bytes = std::max(request_bytes, reply_bytes);
  if (bytes > most)
    throw Fault("MessageTooLarge", "the rows for one shard take " + std::to_string(bytes) +
                                       " bytes; one call carries at most " + std::to_string(most) +
                                       "; pull or push fewer rows at once");
}

// Thread-safe.
class Connection {
 public:
  virtual ~Connection() = default;

  // Call under way, of one thread. Destroyed before its reply came, it is abandoned: the reply is dropped.
  class Call {
   public:
    virtual ~Call() = default;
    // Returns the memory for the frame, of the requested size, aligned to 64.
    virtual char* request() = 0;
    // Takes `bytes` of the frame, from `offset` on, from `from`, which must not change until send() has returned. To be
    // called in the order of offsets.
    virtual void attach(size_t offset, const char* from, size_t bytes) { std::memcpy(request() + offset, from, bytes); }
    // Sends the frame, once. Throws Lost; and Full if the shard has not received the whole frame at `deadline`, or
    // `look` returns true (see wait): the received part is never executed.
    virtual void send(SteadyTime deadline, const std::function<bool()>& look) = 0;
    // Waits until the reply is there (true), `deadline` is over, or `look` returns true; `look` may throw. It is called
    // about every 100 ms and never in the first. With `may_spin` the thread may poll before it sleeps. Throws Lost.
    virtual bool wait(SteadyTime deadline, const std::function<bool()>& look, bool may_spin = true) = 0;
    // Returns the reply's whole frame, aligned to 64. The sender can still change it.
    virtual std::span<const char> reply() = 0;
  };

  // Starts a call with a frame of `request_bytes` whose reply has at most `max_reply_bytes`. Throws Lost, or Full: at
  // once unless it `may_wait` for the shard to make room. Throws Refused, too, and the Fault MessageTooLarge.
  virtual std::unique_ptr<Call> begin(size_t request_bytes, size_t max_reply_bytes, bool may_wait = true) = 0;
  virtual bool is_lost() const = 0;
  // Closes it; calls under way soon end as lost. Idempotent.
  virtual void close() = 0;
};

}  // namespace geartrain
