#include "writes/completed_writes.hpp"

#include <algorithm>
#include <new>
#include <unordered_set>

#include "base/text.hpp"
#include "base/failpoint.hpp"

namespace geartrain {
namespace {

// Incarnations that the scheduler may have assigned since its last known one, which are above those that callers may
// choose.
constexpr int64_t kGivenSince = int64_t{1} << 32;
constexpr const char* kBeginAnew = "start the job anew: cluster.fence(job, incarnation)";

// Calls visit(job) for each job that a stream belongs to, from the widest.
template <class Visit>
void for_each_job(std::string_view stream, const Visit& visit) {
  for (size_t end = stream.find('/'); end != stream.npos; end = stream.find('/', end + 1)) visit(stream.substr(0, end));
  visit(stream);
}

template <class Numbers>
int64_t number_of(const Numbers& numbers, std::string_view name) {
  const auto found = numbers.find(name);
  return found == numbers.end() ? 0 : found->second;
}

Fault superseded(std::string_view name, int64_t incarnation, std::string_view job, int64_t current) {
  const std::string by =
      job == name ? std::to_string(current) : "incarnation " + std::to_string(current) + " of " + quoted(job);
  return {"StaleClient", "incarnation " + std::to_string(incarnation) + " of stream " + quoted(name) +
                             " was superseded by " + by + ": another process writes in its place; stop this one"};
}

std::string named(const CallContext& context) {
  return "sequence " + std::to_string(context.sequence) + " of stream " + quoted(context.stream);
}

}  // namespace

bool belongs_to(std::string_view stream, std::string_view job) {
  return stream.starts_with(job) && (stream.size() == job.size() || stream[job.size()] == '/');
}

CompletedWrites::CompletedWrites(size_t max_streams, size_t max_forgotten)
    : max_streams_(max_streams), max_forgotten_(max_forgotten) {}

bool CompletedWrites::admit(const CallContext& context, Completion completion) {
  const int64_t sequence = context.sequence;
  if (context.stream.empty() || sequence < 1)
    throw Fault("InvalidArgument", "a write needs a stream and a sequence >= 1 (stream " + quoted(context.stream) +
                                       ", sequence " + std::to_string(sequence) +
                                       "): a shard recognises a retry by them");
  for (const auto& [name, number] :
       {std::pair("sequence", sequence), {"oldest_unacknowledged", context.oldest_unacknowledged}})
    if (number > kMaxChosen)
      throw Fault("InvalidArgument", std::string(name) + " of stream " + quoted(context.stream) + " is " +
                                         std::to_string(number) + "; it must be at most 2^62: number writes from 1");
  require_possible("stream " + quoted(context.stream), context.incarnation);
  Streams::Entry& entry = current(context);
  Stream& stream = entry.value;
  forget_acknowledged(stream, context.oldest_unacknowledged, context.incarnation);
  if (sequence < stream.oldest_unacknowledged)
    throw Fault("StaleClient", named(context) + " was acknowledged already (oldest unacknowledged: " +
                                   std::to_string(stream.oldest_unacknowledged) + "); number writes in rising order");
  if (const auto found = stream.done.find(sequence); found != stream.done.end()) {
    if (found->second.table->is_dropped)
      throw Fault("StaleClient",
                  named(context) +
                      " was applied to a table that was dropped since; number writes in rising order, or " +
                      kBeginAnew);
    completion(Done{.created = found->second.created, .duplicate = true});
    return false;
  }
  if (const auto found = stream.waiting.find(sequence); found != stream.waiting.end()) {
    found->second.completions.push_back(std::move(completion));
    return false;
  }
  if (sequence - kWriteWindow >= std::max<int64_t>(stream.oldest_unacknowledged, 1))
    throw Fault("InvalidArgument", named(context) + " is more than " + std::to_string(kWriteWindow) +
                                       " ahead of the oldest unacknowledged write (" +
                                       std::to_string(stream.oldest_unacknowledged) +
                                       "); acknowledge writes as replies arrive");
  std::map<int64_t, Applied> mark;
  mark.try_emplace(sequence);
  Waiting first{.completions = {}, .mark = mark.extract(mark.begin())};
  stream.tables.reserve(stream.tables.size() + stream.waiting.size() + 1);  // `applied` uses one of these
  first.completions.push_back(std::move(completion));
  stream.waiting.emplace(sequence, std::move(first));
  streams_.hold(entry);
  return true;
}

void CompletedWrites::applied(const CallContext& context, const Done& done, std::string_view table) {
  failpoint("shard.mark.before");
  Streams::Entry& entry = waiting_stream(context);
  Waiting waiting = taken(entry, context.sequence);
  if (waiting.mark.empty()) throw Fault("InternalError", named(context) + " is complete, but was never admitted");
  waiting.mark.mapped() = Applied{context.incarnation, done.created, table_of(table)};
  note_table(entry.value, waiting.mark.mapped().table);
  entry.value.done.insert(std::move(waiting.mark));
  failpoint("shard.mark.after");
  const Outcome outcome = done;
  for (const Completion& completion : waiting.completions) completion(outcome);
}

void CompletedWrites::failed(const CallContext& context, const Fault& fault) {
  Outcome outcome;
  try {
    outcome = fault;
  } catch (const std::bad_alloc&) {  // no memory for a copy
    outcome = Fault("OutOfMemory", "out of memory");
  }
  for (const Completion& completion : taken(waiting_stream(context), context.sequence).completions) completion(outcome);
}

void CompletedWrites::dropped(std::string_view table) {
  const auto found = tables_.find(table);
  if (found == tables_.end()) return;
  found->second->is_dropped = true;
  tables_.erase(found);
}

void CompletedWrites::fence(const std::string& job, int64_t incarnation, bool forget) {
  if (job.empty() || incarnation < 1)
    throw Fault("InvalidArgument", "a fence needs a job and an incarnation >= 1 (job " + quoted(job) + ", " +
                                       std::to_string(incarnation) + ")");
  require_possible("job " + quoted(job), incarnation);
  require_current(job, incarnation);
  fences_[job] = incarnation;
  note(incarnation);
  if (!forget || number_of(forgotten_, job) >= incarnation) return;
  forgotten_[job] = incarnation;
  forgotten_streams_.for_each([&](auto& entry) {
    if (entry.value < incarnation && belongs_to(entry.name, job)) forgotten_streams_.erase(entry);
  });
  streams_.for_each([&](Streams::Entry& entry) {
    if (belongs_to(entry.name, job)) forget_before(entry, incarnation);
  });
}

bool CompletedWrites::is_possible(int64_t incarnation) const {
  return incarnation <= std::max<int64_t>(kMaxChosen, given_) + kGivenSince;
}

void CompletedWrites::require_possible(const std::string& of_whom, int64_t incarnation) const {
  if (!is_possible(incarnation))
    throw Fault("InvalidArgument", "incarnation of " + of_whom + " is " + std::to_string(incarnation) +
                                       "; it must be at most 2^62, or one that the scheduler issued");
}

void CompletedWrites::require_current(const CallContext& context) const {
  if (!context.stream.empty()) require_current(context.stream, context.incarnation);
}

std::vector<HeldStream> CompletedWrites::streams(const std::vector<std::string>& tables) const {
  std::unordered_set<const Table*> wanted;
  for (const std::string& name : tables)
    if (const auto found = tables_.find(name); found != tables_.end()) wanted.insert(found->second.get());
  std::vector<HeldStream> known;
  streams_.for_each([&](const Streams::Entry& entry) {
    const Stream& stream = entry.value;
    if (std::ranges::none_of(stream.tables, [&](const auto& table) { return wanted.contains(table.get()); })) return;
    HeldStream& held = known.emplace_back(HeldStream{entry.name, stream.incarnation, stream.oldest_unacknowledged, {}});
    for (const auto& [sequence, write] : stream.done)
      if (wanted.contains(write.table.get())) held.done.push_back({sequence, write.created, write.table});
  });
  return known;
}

void CompletedWrites::restore(const std::string& name, StreamWrites marked, const std::vector<std::string>& tables) {
  if (!is_possible(marked.incarnation) || marked.oldest_unacknowledged > kMaxChosen) return;
  int64_t begun = 0;
  for_each_job(name, [&](std::string_view job) { begun = std::max(begun, number_of(forgotten_, job)); });
  if (begun != 0) marked.incarnation = std::min(marked.incarnation, begun);
  if (forgotten_streams_.find(name) != nullptr) return;  // it may have written since then
  Streams::Entry* const entry = streams_.find(name);
  Stream& stream = (entry != nullptr ? *entry : begin(name)).value;
  stream.incarnation = std::max(stream.incarnation, marked.incarnation);
  note(marked.incarnation);
  for (const std::string& table : tables) note_table(stream, table_of(table));
  if (begun == 0) forget_acknowledged(stream, marked.oldest_unacknowledged, marked.incarnation);
  for (const CompletedWrite& write : marked.done) {
    if (write.sequence < stream.oldest_unacknowledged) continue;
    const auto known = stream.done.find(write.sequence);
    if (known == stream.done.end() || known->second.table->is_dropped)
      stream.done.insert_or_assign(write.sequence, Applied{marked.incarnation, write.created, table_of(write.table)});
  }
}

CompletedWrites::Streams::Entry& CompletedWrites::current(const CallContext& context) {
  require_current(context.stream, context.incarnation);
  if (forgotten_streams_.size() != 0 && forgotten_streams_.find(context.stream) != nullptr)
    throw Fault("StaleClient",
                "stream " + quoted(context.stream) + " wrote nothing here while " + std::to_string(max_streams_) +
                    " others did, and this shard forgot which of its writes were applied; reconnect, or " + kBeginAnew);
  Streams::Entry* known = streams_.find(context.stream);
  Streams::Entry& entry = known != nullptr ? *known : begin(context.stream);
  streams_.touch(entry);
  if (context.incarnation < entry.value.incarnation)
    throw superseded(context.stream, context.incarnation, context.stream, entry.value.incarnation);
  entry.value.incarnation = context.incarnation;
  note(context.incarnation);
  return entry;
}

// Adds a stream; if there are too many, forgets the one that has not written for longest.
CompletedWrites::Streams::Entry& CompletedWrites::begin(const std::string& name) {
  if (streams_.size() >= max_streams_) {
    if (Streams::Entry* idle = streams_.oldest(); idle != nullptr) {
      forgotten_streams_.add(idle->name, idle->value.incarnation);
      streams_.erase(*idle);
    }
  }
  if (forgotten_streams_.size() > max_forgotten_) forgotten_streams_.erase(*forgotten_streams_.oldest());
  return streams_.add(name, Stream{});
}

CompletedWrites::Streams::Entry& CompletedWrites::waiting_stream(const CallContext& context) {
  Streams::Entry* entry = streams_.find(context.stream);
  if (entry == nullptr) throw Fault("InternalError", named(context) + " is complete, but was never admitted");
  return *entry;
}

// Removes and returns the callers that wait for a write; they are notified only after this state is updated.
CompletedWrites::Waiting CompletedWrites::taken(Streams::Entry& entry, int64_t sequence) {
  auto node = entry.value.waiting.extract(sequence);
  if (entry.value.waiting.empty()) streams_.release(entry);
  return node.empty() ? Waiting{} : std::move(node.mapped());
}

std::shared_ptr<const CompletedWrites::Table> CompletedWrites::table_of(std::string_view name) {
  if (const auto found = tables_.find(name); found != tables_.end()) return found->second;
  return tables_.emplace(name, std::make_shared<Table>(Table{std::string(name)})).first->second;
}

void CompletedWrites::require_current(const std::string& name, int64_t incarnation) const {
  if (fences_.empty()) return;
  for_each_job(name, [&](std::string_view job) {
    if (const int64_t lowest = number_of(fences_, job); incarnation < lowest)
      throw superseded(name, incarnation, job, lowest);
  });
}

void CompletedWrites::forget_before(Streams::Entry& entry, int64_t incarnation) {
  Stream& stream = entry.value;
  std::erase_if(stream.done, [&](const auto& write) { return write.second.incarnation < incarnation; });
  if (stream.acknowledged_by < incarnation) stream.oldest_unacknowledged = 0;
  if (stream.incarnation < incarnation && stream.waiting.empty()) streams_.erase(entry);
}

void CompletedWrites::note_table(Stream& stream, const std::shared_ptr<const Table>& table) {
  const auto place = std::ranges::lower_bound(stream.tables, table);
  if (place != stream.tables.end() && *place == table) return;
  stream.tables.insert(place, table);
  std::erase_if(stream.tables, [](const auto& written) { return written->is_dropped; });
}

void CompletedWrites::forget_acknowledged(Stream& stream, int64_t oldest_unacknowledged, int64_t incarnation) {
  if (oldest_unacknowledged <= stream.oldest_unacknowledged) return;
  stream.oldest_unacknowledged = oldest_unacknowledged;
  stream.acknowledged_by = incarnation;
  stream.done.erase(stream.done.begin(), stream.done.lower_bound(oldest_unacknowledged));
}

void CompletedWrites::note(int64_t incarnation) {
  if (incarnation > highest_incarnation_) highest_incarnation_ = incarnation;
}

}  // namespace geartrain
