#include "client/rows_client.hpp"

#include <algorithm>
#include <utility>

namespace geartrain {
namespace {

// Limits of calls that were sent and not awaited yet. Connections have room for as many, and as much again for callers
// that wait.
constexpr size_t kMaxSent = 8, kMaxSentBytes = size_t{64} << 20;
// Time of the wait for the first call before the others are checked.
constexpr std::chrono::milliseconds kFirstSlice{1}, kLongestSlice{20};

}  // namespace

RowsClient::RowsClient(Placement placement) : placement_(std::move(placement)) {
  auto view = std::make_shared<View>();
  view->endpoints.resize(static_cast<size_t>(placement_.num_shards));
  view_ = std::move(view);
}

std::shared_ptr<const View> RowsClient::view() const {
  const std::lock_guard lock(mutex_);
  return view_;
}

template <class Change>
void RowsClient::change(const Change& change) {
  std::shared_ptr<const View> before;  // destroyed after the lock is released: its endpoints may end with it
  const std::lock_guard lock(mutex_);
  auto view = std::make_shared<View>(*view_);
  change(*view);
  view->has_connections =
      std::ranges::any_of(view->endpoints, [](const Endpoint& endpoint) { return endpoint.connection != nullptr; });
  before = std::exchange(view_, std::move(view));
}

void RowsClient::set_endpoint(int64_t shard, int64_t incarnation, std::shared_ptr<Engine> engine,
                              std::shared_ptr<Connection> connection) {
  change([&](View& view) {
    view.endpoints.at(static_cast<size_t>(shard)) = {incarnation, std::move(engine), std::move(connection)};
  });
}

void RowsClient::set_cluster_version(int64_t version) {
  change([&](View& view) { view.cluster_version = version; });
}

Undone RowsClient::pull(const TableFacts& table, int64_t table_incarnation, const PullRequest& request,
                        const Attempt& attempt, Shards shards) {
  const std::shared_ptr<const View> view = this->view();
  PullCall call(table, table_incarnation, request, placement_, *view, shards);
  Exchange(call.jobs(), *view, attempt).run();
  return call.undone();
}

std::vector<Pulled> RowsClient::pull(std::span<const TablePull> pulls, const Attempt& attempt) {
  const std::shared_ptr<const View> view = this->view();
  PullCalls calls(pulls, placement_, *view);
  Exchange(calls.jobs(), *view, attempt).run();
  return calls.pulled();
}

WriteOutcomes RowsClient::write(std::span<const Write> writes, const Attempt& attempt) {
  const std::shared_ptr<const View> view = this->view();
  WriteCall call(writes, placement_);
  Exchange(call.jobs(), *view, attempt).run();
  return call.outcomes();
}

std::vector<PartOutcome> RowsClient::write_and_pull(const Write& write, const Attempt& attempt,
                                                    std::optional<std::vector<int64_t>>& writes) {
  const std::shared_ptr<const View> view = this->view();
  WriteCall call({&write, 1}, placement_);
  Exchange(call.jobs(), *view, attempt).run();
  writes = call.writes_after(0);
  return std::move(call.outcomes().front());
}

// Call that was sent.
struct RowsClient::Sent {
  std::shared_ptr<const View> view;
  Attempt attempt;
  size_t bytes = 0;
  std::shared_ptr<void> tag;
  const SteadyTime sent_at = std::chrono::steady_clock::now();
  std::optional<PullCall> pull;
  std::optional<WriteCall> write;
  std::optional<Exchange> exchange;

  Sent(std::shared_ptr<const View> now, Attempt given, size_t size, std::shared_ptr<void> label)
      : view(std::move(now)), attempt(std::move(given)), bytes(size), tag(std::move(label)) {}
  bool send(std::vector<Job>& jobs, bool may_wait) {
    exchange.emplace(jobs, *view, attempt);
    if (!exchange->send(may_wait)) return false;
    attempt.look = nullptr;  // the caller no longer waits
    return true;
  }
  Reply reply() {
    exchange.reset();
    if (pull) return {std::move(tag), pull->undone()};
    return {std::move(tag), std::move(write->outcomes().front())};
  }
};

RowsClient::~RowsClient() = default;

bool RowsClient::begin_pull(const TableFacts& table, int64_t table_incarnation, const PullRequest& request,
                            Attempt attempt, std::shared_ptr<void> tag) {
  const size_t bytes = static_cast<size_t>(request.count * request.dim) * item_bytes(request.dtype);
  return begin(bytes, std::move(attempt), std::move(tag), [&](Sent& sent) -> std::vector<Job>& {
    return sent.pull.emplace(table, table_incarnation, request, placement_, *sent.view).jobs();
  });
}

bool RowsClient::begin_write(const Write& write, Attempt attempt, std::shared_ptr<void> tag) {
  size_t bytes = 0;
  for (const ShardPart& part : write.prepared->parts())
    bytes += static_cast<size_t>(part.count) * write.prepared->row_bytes();
  return begin(bytes, std::move(attempt), std::move(tag), [&](Sent& sent) -> std::vector<Job>& {
    return sent.write.emplace(std::span(&write, 1), placement_).jobs();
  });
}

template <class Prepare>
bool RowsClient::begin(size_t bytes, Attempt attempt, std::shared_ptr<void> tag, const Prepare& prepare) {
  bool is_alone;
  {
    const std::lock_guard lock(sent_mutex_);
    is_alone = num_sent_ == 0;
    if (num_sent_ == kMaxSent || (!is_alone && sent_bytes_ + bytes > kMaxSentBytes)) return false;
    ++num_sent_;
    sent_bytes_ += bytes;
  }
  std::unique_ptr<Sent> sent;
  try {
    sent = std::make_unique<Sent>(view(), std::move(attempt), bytes, std::move(tag));
    if (!sent->send(prepare(*sent), is_alone)) {
      sent.reset();
      forget(bytes);
      return false;
    }
  } catch (...) {
    sent.reset();
    forget(bytes);
    throw;
  }
  const std::lock_guard lock(sent_mutex_);
  sent_.push_back(std::move(sent));
  if (sent_.size() == 1) news_.notify_one();
  return true;
}

void RowsClient::forget(size_t bytes) {
  const std::lock_guard lock(sent_mutex_);
  --num_sent_;
  sent_bytes_ -= bytes;
}

std::optional<RowsClient::Reply> RowsClient::next_reply(SteadyTime until) {
  auto slice = kFirstSlice;
  for (;;) {
    std::vector<Sent*> sent;  // only this thread removes any
    {
      std::unique_lock lock(sent_mutex_);
      news_.wait_until(lock, until, [this] { return !sent_.empty() || has_news_; });
      if (std::exchange(has_news_, false) || sent_.empty()) return std::nullopt;
      for (const auto& one : sent_) sent.push_back(one.get());
    }
    // Waits for the first call: it is mostly answered first.
    for (Sent* one : sent) {
      const auto now = std::chrono::steady_clock::now();
      if (!one->exchange->receive_until(one == sent.front() ? std::min(until, now + slice) : now)) continue;
      std::unique_ptr<Sent> done;
      {
        const std::lock_guard lock(sent_mutex_);
        const auto found = std::ranges::find(sent_, one, [](const auto& each) { return each.get(); });
        done = std::move(*found);
        sent_.erase(found);
      }
      Reply reply = done->reply();
      const size_t bytes = done->bytes;
      done.reset();  // frees its room in the connections for the next call
      forget(bytes);
      return reply;
    }
    if (std::chrono::steady_clock::now() >= until) return std::nullopt;
    slice = std::min(2 * slice, kLongestSlice);
  }
}

std::vector<int64_t> RowsClient::waiting(SteadyTime since) const {
  const std::lock_guard lock(sent_mutex_);
  std::vector<int64_t> shards;
  for (const auto& one : sent_) {
    if (one->sent_at > since) continue;
    const auto own = one->exchange->waiting();
    shards.insert(shards.end(), own.begin(), own.end());
  }
  return shards;
}

void RowsClient::nudge() {
  const std::lock_guard lock(sent_mutex_);
  has_news_ = true;
  news_.notify_one();
}

}  // namespace geartrain
