// Turn of a shard: the thread that has it is the shard's single writer. A lock granted in the order of requests; its
// holder may let brief readers in during long work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <list>
#include <mutex>

namespace geartrain {

// Thread-safe. A thread that has the turn does not wait for the interpreter lock during a pull, push or assign, and a
// thread that has the interpreter lock does not wait for the turn.
class Turn {
 public:
  // Called about every 100 ms by a waiting thread; true gives up. It may throw, which gives up, too, and may take the
  // turn itself.
  using Look = std::function<bool()>;

  // Purpose of the turn.
  enum class Use { anything, brief_reading };

  // Place in the queue, from its construction; it ends with this object, and with it the turn if it has come. For brief
  // reading it also counts as having come while the holder of the turn lets readers in.
  class Place {
   public:
    explicit Place(Turn& turn, Use use = Use::anything);
    ~Place() { leave(); }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    // Waits for the turn. False: `look`, if given, gave up, and with it the place.
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
    bool is_guest_ = false;  // the turn is another thread's, which waits for this place to end
    bool is_away_ = false;  // in `look`: others may go first
    std::list<Place*>::iterator at_;
  };

  Turn() = default;
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  // Takes the turn if it is free, so that there is no queue either.
  bool try_acquire();
  // Releases the turn of try_acquire, or of a kept place.
  void release();
  // Lets in the places that wait for brief reading, and waits until they have read. Called with the turn.
  void let_readers_in();
  bool has_readers() const { return num_readers_.load(std::memory_order_relaxed) != 0; }
  // Number of places that wait.
  size_t num_waiting() const {
    const std::lock_guard lock(mutex_);
    return line_.size();
  }

 private:
  void pass_on();
  std::list<Place*>::iterator take_from_line(std::list<Place*>::iterator at);

  mutable std::mutex mutex_;
  std::list<Place*> line_;  // waiting places, without the one that has the turn
  bool is_taken_ = false;
  std::atomic<size_t> num_readers_{0};  // places of line_ for brief reading; changed with the mutex
  size_t num_guests_ = 0;
  std::condition_variable guests_have_left_;
};

}  // namespace geartrain
