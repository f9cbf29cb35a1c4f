// Lease of a shard: whether this process may still serve it.
//
// A process that was paused (SIGSTOP, a suspended machine) past its lease may have a successor without knowing. It
// answers nothing until the scheduler has confirmed that it still holds its shard. A scheduler that is merely silent
// stops nothing: a process that runs all the time, and whose heartbeats get no answer, serves on.
//
// What remains: a request past its last check when the process was paused is completed after it. Such a write changes
// only rows that are no longer read, and is not acknowledged: the lease is checked once more before a reply is sent.
// Only the few instructions between that check and the socket cannot be fenced. Nor can a process that runs but is cut
// off from the scheduler alone: it cannot tell that from a scheduler that is down.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "base/clock.hpp"

namespace geartrain {

// A shard's knowledge of its lease. Thread-safe; needs no interpreter lock.
//
// It lasts `seconds` from the *sending* of the last answered heartbeat. The process counts as paused if nothing of it
// ran for half of that time: no pulse, no request.
class Lease {
 public:
  Lease(int64_t shard, double seconds, Clock clock = boot_seconds);

  double seconds() const { return seconds_; }
  double now() const { return clock_(); }
  // Records that the process runs.
  void pulse();
  // Throws the Fault ShardUnavailable (the caller may try again) if the shard may belong to another process by now.
  void check();
  // Renews the lease: the scheduler answered a heartbeat sent at `began`.
  void confirm(double began);
  // Ends the lease: the shard is another process's.
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
