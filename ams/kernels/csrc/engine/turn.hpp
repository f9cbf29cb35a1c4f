// The turn of a shard: whoever has it is the shard's single writer. A lock that is given in the order in which it was asked for;
// who has it for long may let in those that only read.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <list>
#include <mutex>

namespace geartrain {

// Thread-safe. Nobody who has the turn waits for the interpreter lock on the way of a pull, push or assign, and nobody who has
// the interpreter lock waits for the turn.
class Turn {
 public:
  // Asked about every 100 ms by who waits: whether to give up. It may throw, which gives up, too, and may ask for the turn itself.
  using Look = std::function<bool()>;

  // What the turn is wanted for.
  enum class Use { anything, brief_reading };

  // A place in the line, from when it is made; it ends with this object, and with it the turn if it has come. For brief reading, it
  // counts as having come while who has the turn lets readers in.
  class Place {
   public:
    explicit Place(Turn& turn, Use use = Use::anything);
    ~Place() { leave(); }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    // Waits for the turn. False: `look`, if there is one, gave up, and the place with it.
    bool wait(const Look& look = nullptr);
    // Idempotent.
    void leave();
    // Keeps the turn, which has come, beyond the end of this object: until release().
    void keep() { is_in_line_ = false; }

   private:
    friend class Turn;
    Turn& turn_;
    const Use use_;
    std::condition_variable changed_;
    bool is_in_line_ = true;
    bool has_turn_ = false;
    bool is_guest_ = false;  // the turn is another's, who waits for this place to end
    bool is_away_ = false;  // looking: others may go first
    std::list<Place*>::iterator at_;
  };

  Turn() = default;
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  // Takes the turn if nobody has it, so that nobody waits for it either.
  bool try_acquire();
  // Gives back what try_acquire took, or a place kept.
  void release();
  // By who has the turn: lets in those that wait for brief reading, and waits until they have read.
  void let_readers_in();
  bool has_readers() const { return num_readers_.load(std::memory_order_relaxed) != 0; }
  // How many wait for it.
  size_t num_waiting() const {
    const std::lock_guard lock(mutex_);
    return line_.size();
  }

 private:
  void pass_on();
  std::list<Place*>::iterator take_from_line(std::list<Place*>::iterator at);

  mutable std::mutex mutex_;
  std::list<Place*> line_;  // those that wait, and none that has the turn
  bool is_taken_ = false;
  std::atomic<size_t> num_readers_{0};  // of the line, for brief reading; changed with the mutex
  size_t num_guests_ = 0;
  std::condition_variable guests_have_left_;
};

}  // namespace geartrain
