#include "engine/turn.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace geartrain {
namespace {

constexpr std::chrono::milliseconds kLookInterval{100};

}  // namespace

bool Turn::try_acquire() {
  const std::lock_guard lock(mutex_);
  return !std::exchange(is_taken_, true);  // if nobody has it, those in the line are away
}

void Turn::release() {
  const std::lock_guard lock(mutex_);
  pass_on();
}

// Gives the turn to the first who is there to take it. Called with the mutex.
void Turn::pass_on() {
  const auto next = std::find_if(line_.begin(), line_.end(), [](const Place* place) { return !place->is_away_; });
  is_taken_ = next != line_.end();
  if (!is_taken_) return;
  Place& place = **next;
  line_.erase(next);
  place.has_turn_ = true;
  place.changed_.notify_one();
}

Turn::Place::Place(Turn& turn) : turn_(turn) {
  const std::lock_guard lock(turn_.mutex_);
  has_turn_ = !std::exchange(turn_.is_taken_, true);
  if (!has_turn_) at_ = turn_.line_.insert(turn_.line_.end(), this);
}

bool Turn::Place::wait(const Look& look) {
  std::unique_lock lock(turn_.mutex_);
  if (!look) {
    changed_.wait(lock, [this] { return has_turn_; });
    return true;
  }
  while (!changed_.wait_for(lock, kLookInterval, [this] { return has_turn_; })) {
    is_away_ = true;
    lock.unlock();
    bool gives_up = true;
    try {
      gives_up = look();
    } catch (...) {
      leave();
      throw;
    }
    if (gives_up) {
      leave();
      return false;
    }
    lock.lock();
    is_away_ = false;
    if (!turn_.is_taken_) turn_.pass_on();  // it came while this place was away; who is first takes it
  }
  return true;
}

void Turn::Place::leave() {
  const std::lock_guard lock(turn_.mutex_);
  if (!is_in_line_) return;
  is_in_line_ = false;
  if (has_turn_)
    turn_.pass_on();
  else
    turn_.line_.erase(at_);
}

}  // namespace geartrain
