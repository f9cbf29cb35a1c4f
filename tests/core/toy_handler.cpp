#include "toy_handler.hpp"

#include <chrono>
#include <cstring>

namespace geartrain {

void ToyHandler::enter(const std::string& table, const Asker& asker) {
  if (table == "held" || table == "long") {
    std::unique_lock lock(mutex_);
    ++num_held_;
    changed_.notify_all();
    if (table == "held") changed_.wait(lock, [this] { return is_released_; });
    while (!changed_.wait_for(lock, std::chrono::milliseconds(1), [this] { return is_released_; })) {
      lock.unlock();
      if (asker.others != nullptr && asker.others->is_asked()) asker.others->serve_pulls(true);
      lock.lock();
    }
    --num_held_;
  } else if (table != "rows" && table != "later") {
    throw Fault("TableNotFound", "there is no table '" + table + "'");
  }
}

int64_t ToyHandler::pull(const CallContext&, const std::string& table, const PullRequest& request, const Asker& asker) {
  enter(table, asker);
  for (int64_t i = 0; i < request.count; ++i) {
    if (request.ids[i] < 0) throw Fault("InvalidIds", "id " + std::to_string(request.ids[i]) + " is negative");
    auto* row = reinterpret_cast<float*>(request.rows) + i * request.dim;
    for (int64_t column = 0; column < request.dim; ++column)
      row[column] = static_cast<float>(request.ids[i] * 1000 + column);
    if (request.present != nullptr) request.present[i] = request.ids[i] % 2 == 0;
  }
  return num_writes();
}

void ToyHandler::push(const CallContext&, const std::string& table, const PushRequest& request, const Asker& asker,
                      Completion completion, PostPushRows*) {
  write(table, request.ids, request.count, request.dim, request.gradients, asker, std::move(completion));
}

void ToyHandler::assign(const CallContext&, const std::string& table, const AssignRequest& request, const Asker& asker,
                        Completion completion) {
  write(table, request.ids, request.count, request.dim, request.rows, asker, std::move(completion));
}

void ToyHandler::write(const std::string& table, const int64_t* ids, int64_t count, int64_t dim, const char* rows,
                       const Asker& asker, Completion completion) {
  enter(table, asker);
  if (count != 0 && ids[0] < 0) throw Fault("Busy", "too much to do", 0.25);
  {
    const std::lock_guard lock(mutex_);
    ++num_writes_;
    for (int64_t i = 0; i < count * dim; ++i) {
      float number;
      std::memcpy(&number, rows + static_cast<size_t>(i) * sizeof(float), sizeof(float));
      sum_ += static_cast<double>(number);
    }
    if (table == "later") {
      later_.emplace_back(std::move(completion), count);
      changed_.notify_all();
      return;
    }
  }
  completion(Done{count});
}

void ToyHandler::before_reply(bool) {
  const std::lock_guard lock(mutex_);
  if (has_lost_lease_) throw Fault("ShardUnavailable", "the shard may be another process's");
}

bool ToyHandler::await_held(double seconds) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                           [this] { return num_held_ > 0 || !later_.empty(); });
}

void ToyHandler::release() {
  const std::lock_guard lock(mutex_);
  is_released_ = true;
  changed_.notify_all();
}

int64_t ToyHandler::answer_later() {
  std::vector<std::pair<Completion, int64_t>> due;
  {
    const std::lock_guard lock(mutex_);
    due.swap(later_);
  }
  for (auto& [completion, count] : due) completion(Done{count});
  return static_cast<int64_t>(due.size());
}

void ToyHandler::lose_lease() {
  const std::lock_guard lock(mutex_);
  has_lost_lease_ = true;
}

int64_t ToyHandler::num_writes() {
  const std::lock_guard lock(mutex_);
  return num_writes_;
}

double ToyHandler::sum_written() {
  const std::lock_guard lock(mutex_);
  return sum_;
}

}  // namespace geartrain
