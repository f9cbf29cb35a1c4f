#include "writes/lease.hpp"

#include <algorithm>
#include <utility>

#include "base/text.hpp"
#include "calls/call.hpp"

namespace geartrain {

// The clock is read before the mutex is locked, never under it: a test's clock waits for the interpreter lock, whose
// holder may wait for the mutex. So another thread may have seen a later time meanwhile.

Lease::Lease(int64_t shard, double seconds, Clock clock)
    : shard_(shard), seconds_(seconds), clock_(std::move(clock)), ran_(clock_()), began_(ran_) {}

void Lease::pulse() {
  const double now = clock_();
  const std::lock_guard lock(mutex_);
  look(now);
}

void Lease::check() {
  const double now = clock_();
  const std::lock_guard lock(mutex_);
  look(now);
  if (refusal_) throw Fault("ShardUnavailable", *refusal_);
}

void Lease::confirm(double began) {
  const double now = clock_();
  const std::lock_guard lock(mutex_);
  look(now);
  began_ = std::max(began_, began);
  // An answer from before a stop may have waited in the socket: its age counts from when its request was sent.
  if (!is_revoked_ && ran_ <= began_ + seconds_) refusal_.reset();
}

void Lease::revoke(std::string reason) {
  const std::lock_guard lock(mutex_);
  is_revoked_ = true;
  refusal_ = std::move(reason);
}

void Lease::look(double now) {
  const double gap = now - ran_;
  ran_ = std::max(ran_, now);
  if (!refusal_ && gap > seconds_ / 2 && now > began_ + seconds_)
    refusal_ = "shard " + std::to_string(shard_) + " was stopped for " + fixed_point(gap, 1) + " s, and its lease of " +
               six_digits(seconds_) +
               " s ran out; it serves no call until the scheduler says that no other process holds the shard";
}

}  // namespace geartrain
