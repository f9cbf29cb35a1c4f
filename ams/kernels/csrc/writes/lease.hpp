// A shard's lease: whether it may still believe that the shard is its own.
//
// A process that was stopped (SIGSTOP, a suspended machine) past its lease may have a successor, and does not know. It answers
// nothing until the scheduler has said that it still holds its shard. A scheduler that is merely silent stops nothing: a process
// that runs all the time, and whose heartbeats find nobody, serves on.
//
// What remains: a request that was past its last check when the process was stopped is completed after it. A write so completed
// changes only rows that nobody reads any more, and is not acknowledged: the lease is checked once more before a reply is sent.
// Only the few instructions between that check and the socket cannot be fenced. Nor can a process that runs but is cut off from
// the scheduler alone: it cannot tell that from a scheduler that is down.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "base/clock.hpp"

namespace geartrain {

// What one shard knows of its lease. Thread-safe; needs no interpreter lock.
//
// It lasts `seconds` from the *sending* of the last heartbeat that was answered. The process counts as stopped if for half of that
// time nothing of it ran: no pulse, no request.
class Lease {
 public:
  Lease(int64_t shard, double seconds, Clock clock = boot_seconds);

  double seconds() const { return seconds_; }
  double now() const { return clock_(); }
  // Notes that the process runs.
  void pulse();
  // Throws the Fault ShardUnavailable (the caller may try again) if the shard may belong to another process by now.
  void check();
  // The scheduler has answered a heartbeat sent at `began` that the shard is still this process's.
  void confirm(double began);
  // The shard is another process's: answer nothing any more.
  void revoke(std::string reason);

 private:
  void look(double now);

  const int64_t shard_;
  const double seconds_;
  const Clock clock_;
  std::mutex mutex_;
  double ran_, began_;
  std::optional<std::string> refusal_;
  bool is_revoked_ = false;
};

}  // namespace geartrain
