// Pauses that release a store's lock.
#pragma once

#include "machine/pauses.hpp"

namespace geartrain {

// Releases the lock for each pause, so that a thread that gets the turn then can read rows.
template <class Lock>
class UnlockedPauses final : public Pauses {
 public:
  UnlockedPauses(Pauses* pauses, Lock& lock) : pauses_(pauses), lock_(lock) {}
  // Returns null without pauses.
  Pauses* get() { return pauses_ != nullptr ? this : nullptr; }
  bool are_wanted() override { return pauses_->are_wanted(); }
  void pause() noexcept override {
    lock_.unlock();
    pauses_->pause();
    lock_.lock();
  }

 private:
  Pauses* const pauses_;
  Lock& lock_;
};

}  // namespace geartrain
