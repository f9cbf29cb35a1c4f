// The way of a client to one shard, whatever carries it.
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

// There is no connection any more. A call that was sent may have been done.
struct Lost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The connection has no room for this call until others have ended. Nothing was sent.
struct Full : std::runtime_error {
  explicit Full(const char* what, bool shard_is_silent = false) : std::runtime_error(what), is_silent(shard_is_silent) {}
  bool is_silent;  // the shard was asked for room, and has not answered
};

// Calls of this size are none for this connection, though it is there: another one may carry them. Nothing was sent.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr size_t kMostCallBytes = size_t{1} << 30;  // of a request, or of its reply

// What no connection carries. Throws the Fault MessageTooLarge.
inline void require_call_fits(size_t request_bytes, size_t reply_bytes, size_t most = kMostCallBytes) {
  const size_t bytes = std::max(request_bytes, reply_bytes);
  if (bytes > most)
    throw Fault("MessageTooLarge", "the rows for one shard take " + std::to_string(bytes) + " bytes, the most of one call is " +
                                       std::to_string(most) + "; pull or push fewer rows at once");
}

// Thread-safe.
class Connection {
 public:
  virtual ~Connection() = default;

  // A call under way, of one thread. Destroyed before its reply came, it is given up: nobody sees that reply.
  class Call {
   public:
    virtual ~Call() = default;
    // Where the frame is to be written, of the size that was asked for. At a multiple of 64.
    virtual char* request() = 0;
    // Has `bytes` of the frame, from `offset` on, be what lies at `from`, which stays as it is until send() has returned. To be said in
    // the order of offsets.
    virtual void attach(size_t offset, const char* from, size_t bytes) { std::memcpy(request() + offset, from, bytes); }
    // Once. Throws Lost; and Full if the shard has not taken the frame at `deadline`, or `look` says true (see wait): what it has of
    // it is never done.
    virtual void send(SteadyTime deadline, const std::function<bool()>& look) = 0;
    // Waits until the reply is there (true), `deadline` is over, or `look` says true; `look` may throw. It is asked about every
    // 100 ms and never in the first. Whoever `may_spin` may look for it before it sleeps. Throws Lost.
    virtual bool wait(SteadyTime deadline, const std::function<bool()>& look, bool may_spin = true) = 0;
    // The reply's whole frame, at a multiple of 64. Who sent it can change it still.
    virtual std::span<const char> reply() = 0;
  };

  // For a frame of `request_bytes` whose reply has at most `most_reply_bytes`. Throws Lost, or Full: at once unless it `may_wait` for
  // the shard to make room. Throws Refused, too, and the Fault MessageTooLarge.
  virtual std::unique_ptr<Call> begin(size_t request_bytes, size_t most_reply_bytes, bool may_wait = true) = 0;
  virtual bool is_lost() const = 0;
  // Calls under way end soon, as lost. Idempotent.
  virtual void close() = 0;
};

}  // namespace geartrain
