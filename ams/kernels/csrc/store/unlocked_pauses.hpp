// Pauses in which others may use a store.
#pragma once

#include "machine/pauses.hpp"

namespace geartrain {

// Lets go of a store's lock for each pause: whoever has a turn in one reads rows, too.
template <class Lock>
class UnlockedPauses final : public Pauses {
 public:
  UnlockedPauses(Pauses* pauses, Lock& lock) : pauses_(pauses), lock_(lock) {}
  // Null: there are none.
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
