// A shard without rows: what tests and bare timings of the carriers talk to.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "calls/handler.hpp"

namespace geartrain {

// A pull of table "rows" answers id * 1000 + column as float32, and says that rows of even ids exist. A write there
// creates as many rows as it has ids. In table "held" every call waits until release(), in "long", too, and others are
// served meanwhile; in "later" a write is answered at answer_later(). Any other table is TableNotFound. Thread-safe.
class ToyHandler : public Handler {
 public:
  int64_t pull(const CallContext& context, const std::string& table, const PullRequest& request,
               const Asker& asker) override;
  void push(const CallContext& context, const std::string& table, const PushRequest& request, const Asker& asker,
            Completion completion, PostPushRows* after) override;
  void assign(const CallContext& context, const std::string& table, const AssignRequest& request, const Asker& asker,
              Completion completion) override;
  void before_reply(bool has_writes) override;

  // Waits until a call is held; false: none was within so many seconds.
  bool await_held(double seconds);
  void release();
  // Answers the writes to "later" that came so far; how many these were.
  int64_t answer_later();
  // From now on nothing that was done is acknowledged.
  void lose_lease();
  int64_t num_writes();
  double sum_written();  // of all numbers

 private:
  void write(const std::string& table, const int64_t* ids, int64_t count, int64_t dim, const char* rows,
             const Asker& asker, Completion completion);
  void enter(const std::string& table, const Asker& asker);

  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t num_held_ = 0, num_writes_ = 0;
  bool is_released_ = false, has_lost_lease_ = false;
  double sum_ = 0;
  std::vector<std::pair<Completion, int64_t>> later_;
};

}  // namespace geartrain
