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
  return !std::exchange(is_taken_, true);  // if it is free, all places in the queue are away
}

void Turn::release() {
  const std::lock_guard lock(mutex_);
  pass_on();
}

// Passes the turn to the first place in the queue that is not away. Called with the mutex.
void Turn::pass_on() {
  const auto next = std::find_if(line_.begin(), line_.end(), [](const Place* place) { return !place->is_away_; });
  is_taken_ = next != line_.end();
  if (!is_taken_) return;
  Place& place = **next;
  take_from_line(next);
  place.has_turn_ = true;
  place.changed_.notify_one();
}

std::list<Turn::Place*>::iterator Turn::take_from_line(std::list<Place*>::iterator at) {
  if ((*at)->use_ == Use::brief_reading) --num_readers_;
  return line_.erase(at);
}

void Turn::let_readers_in() {
  if (!has_readers()) return;
  std::unique_lock lock(mutex_);
  for (auto at = line_.begin(); at != line_.end();) {
    Place& place = **at;
    if (place.use_ != Use::brief_reading || place.is_away_) {
      ++at;
      continue;
    }
    at = take_from_line(at);
    place.has_turn_ = place.is_guest_ = true;
    ++num_guests_;
    place.changed_.notify_one();
  }
  guests_have_left_.wait(lock, [this] { return num_guests_ == 0; });
}

Turn::Place::Place(Turn& turn, Use use) : turn_(turn), use_(use) {
  const std::lock_guard lock(turn_.mutex_);
  has_turn_ = !std::exchange(turn_.is_taken_, true);
  if (has_turn_) return;
  at_ = turn_.line_.insert(turn_.line_.end(), this);
  if (use_ == Use::brief_reading) ++turn_.num_readers_;
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
    if (!turn_.is_taken_) turn_.pass_on();  // released while this place was away; the first in the queue takes it
  }
  return true;
}

void Turn::Place::leave() {
  const std::lock_guard lock(turn_.mutex_);
  if (!is_in_line_) return;
  is_in_line_ = false;
  if (!has_turn_) {
    turn_.take_from_line(at_);
  } else if (!is_guest_) {
    turn_.pass_on();
  } else if (--turn_.num_guests_ == 0) {
    turn_.guests_have_left_.notify_one();
  }
}

}  // namespace geartrain
