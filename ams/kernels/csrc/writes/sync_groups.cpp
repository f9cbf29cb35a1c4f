#include "writes/sync_groups.hpp"

#include <algorithm>

#include "base/text.hpp"
#include "machine/memory_budget.hpp"
#include "writes/completed_writes.hpp"

namespace geartrain {
namespace {

constexpr size_t kPartBytes = 1024;  // approximate size of a part without its arrays

using Numbers = std::vector<std::pair<std::string, std::optional<double>>>;

std::string key_of(std::string_view table, std::string_view job) {
  return std::to_string(table.size()) + ":" + std::string(table) + std::string(job);
}

const SyncGroup& member_of(const RankWrite& write) { return *write.push.group; }

std::string rank_of(const SyncGroup& member) {
  return "rank " + std::to_string(member.rank) + " of job " + quoted(member.job);
}

// Returns the optimizer's numbers that a write replaces.
Numbers numbers_of(const PushRequest& push) {
  Numbers numbers{{"lr", push.lr}};
  numbers.insert(numbers.end(), push.scalars.begin(), push.scalars.end());
  return numbers;
}

const std::optional<double>* found_in(const Numbers& numbers, const std::string& name) {
  for (const auto& [its, value] : numbers)
    if (its == name) return &value;
  return nullptr;
}

// Returns the `numbers` that `names` holds as text, such as "lr 0.1, momentum as the table's".
std::string shown_of(const Numbers& numbers, const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    const std::optional<double>* value = found_in(numbers, name);
    text += (text.empty() ? "" : ", ") + name + " " + (value != nullptr && *value ? shown(**value) : "as the table's");
  }
  return text;
}

void require_equal_numbers(const PushRequest& mine, const PushRequest& its) {
  const Numbers here = numbers_of(mine), there = numbers_of(its);
  std::vector<std::string> names;
  for (const Numbers* numbers : {&here, &there})
    for (const auto& [name, value] : *numbers) {
      const std::optional<double>*ours = found_in(here, name), *other = found_in(there, name);
      const bool differ = ours == nullptr || other == nullptr || *ours != *other;
      if (differ && std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  if (!names.empty())
    throw Fault("StepMismatch", rank_of(*mine.group) + " pushes with " + shown_of(here, names) +
                                    ", another rank with " + shown_of(there, names) +
                                    "; all ranks of a step must agree");
}

void require_equal_pieces(const std::string& table, const PushRequest& mine, const PushRequest& its) {
  if (mine.step_goes_on == its.step_goes_on) return;
  const std::string last = "the last piece", earlier = "an earlier piece";
  throw Fault("StepMismatch", rank_of(*mine.group) + " pushes " + (mine.step_goes_on ? earlier : last) +
                                  " of a step of table " + quoted(table) + ", another rank " +
                                  (mine.step_goes_on ? last : earlier) +
                                  "; all ranks must push their active rows in the same pieces");
}

void require_rank(const SyncGroup& member) {
  if (member.world_size > kMaxWorldSize || member.rank < 0 || member.rank >= member.world_size)
    throw Fault("InvalidArgument", "rank " + std::to_string(member.rank) + " of world_size " +
                                       std::to_string(member.world_size) +
                                       " is impossible: 0 <= rank < world_size <= " + std::to_string(kMaxWorldSize));
  if (member.sequence < 1 || member.sequence > kMaxChosen)
    throw Fault("InvalidArgument", "sequence " + std::to_string(member.sequence) + " of job " + quoted(member.job) +
                                       " must lie in [1, 2^62]");
}

void require_at_step(const std::string& table, const SyncGroup& member, int64_t next_sequence) {
  if (member.sequence != next_sequence)
    throw Fault("StepMismatch", rank_of(member) + " is at step " + std::to_string(member.sequence) + " of table " +
                                    quoted(table) + ", its group at " + std::to_string(next_sequence) +
                                    "; restart all ranks from the same state");
}

Fault replaced(const std::string& table, const SyncGroup& member) {
  return {"StepMismatch",
          rank_of(member) + " pushed step " + std::to_string(member.sequence) + " of table " + quoted(table) +
              " again while this push waited; the later push counts. If this push was not retried, another process "
              "runs as the same rank: stop one of them"};
}

Fault taken_over(const std::string& job, int64_t incarnation) {
  return {
      "StaleClient",
      "incarnation " + std::to_string(incarnation) + " of " + quoted(job) +
          " took over while this push waited for its sync group; nothing of it was applied here; stop this process"};
}

}  // namespace

SyncGroups::SyncGroups(double timeout_seconds, Clock clock, size_t max_groups, size_t max_waiting_bytes)
    : timeout_seconds_(timeout_seconds),
      clock_(std::move(clock)),
      max_groups_(max_groups),
      max_waiting_bytes_(max_waiting_bytes) {}

bool SyncGroups::is_applied(const std::string& table, const RankWrite& write) {
  const SyncGroup& member = member_of(write);
  const Group& its = group(table, member).value;
  if (member.sequence != its.next_sequence - 1) {
    require_at_step(table, member, its.next_sequence);
    return false;
  }
  // Another shard that refused the step would apply different gradients: the table would hold half of each.
  if (const auto before = its.applied.find(member.rank);
      before != its.applied.end() && before->second && *before->second != fingerprint_of(write))
    throw Fault("StepMismatch", "step " + std::to_string(member.sequence) + " of job " + quoted(member.job) +
                                    " was applied to table " + quoted(table) + " here with other gradients of rank " +
                                    std::to_string(member.rank) + "; restart all ranks from their last snapshot");
  return true;
}

SyncGroups::Joined SyncGroups::join(const CallContext& context, const std::string& table, const RankWrite& write) {
  const SyncGroup& member = member_of(write);
  Groups::Entry& entry = group(table, member);
  Group& its = entry.value;
  const auto mine = its.waiting.find(member.rank);
  const auto other =
      std::find_if(its.waiting.begin(), its.waiting.end(), [&](const auto& part) { return part.first != member.rank; });
  if (other != its.waiting.end()) {
    require_equal_numbers(write.push, other->second.write.push);
    require_equal_pieces(table, write.push, other->second.write.push);
  }
  Joined joined;
  if (mine != its.waiting.end()) joined.replaced = RefusedPart{mine->second.context, replaced(table, member)};
  if (static_cast<int64_t>(its.waiting.size()) + !joined.replaced == its.world_size) joined.complete = &entry;
  // The fingerprint and its place are made now: once rows have changed, nothing may fail before `complete`.
  Part part{context, write, fingerprint_of(write), kPartBytes + bytes_of(write)};
  if (joined.complete == nullptr) {
    part.room = room_of(part.bytes, its, member.rank);
    part.write = copied(write);
  }
  its.applied.try_emplace(member.rank);
  if (its.waiting.empty()) its.deadline = clock_() + timeout_seconds_;
  its.stream = context.stream;
  its.incarnation = context.incarnation;
  its.waiting.insert_or_assign(member.rank, std::move(part));
  groups_.hold(entry);
  return joined;
}

// Reserves memory for a waiting part of a rank, until its last owner is destroyed.
std::shared_ptr<const void> SyncGroups::room_of(size_t bytes, const Group& group, int64_t rank) {
  const size_t most = max_waiting_bytes_ != 0 ? max_waiting_bytes_
                                              : std::max(kMinWaitingBytes, static_cast<size_t>(memory_limit()) / 8);
  const auto mine = group.waiting.find(rank);
  const size_t all = *waiting_bytes_ + bytes - (mine == group.waiting.end() ? 0 : mine->second.bytes);
  if (all > most) {
    size_t of_group = bytes;
    for (const auto& [other, part] : group.waiting) of_group += other == rank ? 0 : part.bytes;
    const auto say = [&](size_t taken) {
      return std::to_string(taken) + " bytes of pushes that wait for other ranks; this shard keeps at most " +
             std::to_string(most);
    };
    if (of_group > most)
      throw Fault("MessageTooLarge", "this step of job " + quoted(group.job) + " in table " + quoted(group.table) +
                                         " has " + say(of_group) + ". Push fewer rows in a step, or add shards");
    // The step that has waited longest is admitted: otherwise parts of many tables, each of which lacks another rank's,
    // would wait for ever.
    if (&groups_.first_held()->value != &group)
      throw Fault("Busy", "with this push there are " + say(all) + "; nothing of it was kept. Retry it", 0.2);
  }
  *waiting_bytes_ += bytes;  // before the allocation below, which reverts it on failure
  return {nullptr, [sum = waiting_bytes_, bytes](const void*) { *sum -= bytes; }};
}

std::vector<const RankWrite*> SyncGroups::parts(const Groups::Entry& entry) {
  std::vector<const RankWrite*> found;
  for (const auto& [rank, part] : entry.value.waiting) found.push_back(&part.write);
  return found;
}

SyncGroups::Parts SyncGroups::complete(Groups::Entry& entry) noexcept {
  Group& its = entry.value;
  for (const auto& [rank, part] : its.waiting) its.applied.find(rank)->second = part.fingerprint;
  ++its.next_sequence;
  return abandon(entry);
}

SyncGroups::Parts SyncGroups::abandon(Groups::Entry& entry) noexcept {
  groups_.release(entry);
  return std::exchange(entry.value.waiting, {});
}

void SyncGroups::require_step(const std::string& table, const SyncGroup& member) {
  if (groups_.find(key_of(table, member.job)) != nullptr)
    require_at_step(table, member, group(table, member).value.next_sequence);
}

std::vector<RefusedPart> SyncGroups::fence(const std::string& job, int64_t incarnation, bool forget) {
  const auto is_past = [&](const std::string& stream, int64_t its) {
    return its < incarnation && belongs_to(stream, job);
  };
  std::vector<RefusedPart> dropped;
  groups_.for_each([&](Groups::Entry& entry) {
    Group& its = entry.value;
    for (auto next = its.waiting.begin(); next != its.waiting.end();) {
      const auto part = next++;
      const CallContext& caller = part->second.context;
      if (!is_past(caller.stream, caller.incarnation)) continue;
      dropped.push_back({caller, taken_over(job, incarnation)});
      its.waiting.erase(part);
    }
    if (!its.waiting.empty()) return;
    if (forget && is_past(its.stream, its.incarnation))
      groups_.erase(entry);
    else
      groups_.release(entry);
  });
  forgotten_.for_each([&](Groups::Entry& entry) {
    if (forget && is_past(entry.value.stream, entry.value.incarnation)) forgotten_.erase(entry);
  });
  return dropped;
}

std::vector<CallContext> SyncGroups::drop_table(const std::string& table) {
  std::vector<CallContext> waiting;
  forgotten_.for_each([&](Groups::Entry& entry) {
    if (entry.value.table == table) forgotten_.erase(entry);
  });
  groups_.for_each([&](Groups::Entry& entry) {
    if (entry.value.table != table) return;
    for (const auto& [rank, part] : entry.value.waiting) waiting.push_back(part.context);
    groups_.erase(entry);
  });
  return waiting;
}

std::vector<GroupStep> SyncGroups::steps() const {
  std::vector<GroupStep> found;
  groups_.for_each([&](const Groups::Entry& entry) {
    const Group& its = entry.value;
    found.push_back({its.table, its.job, its.world_size, its.next_sequence});
  });
  return found;
}

void SyncGroups::restore(const GroupStep& step) {
  const std::string key = key_of(step.table, step.job);
  if (step.next_sequence > kMaxChosen || groups_.find(key) != nullptr) return;
  // rows are now as of this step
  if (Groups::Entry* past = forgotten_.find(key); past != nullptr) forgotten_.erase(*past);
  begin({.table = step.table, .job = step.job, .world_size = step.world_size, .next_sequence = step.next_sequence});
}

std::optional<double> SyncGroups::next_deadline() {
  const Groups::Entry* first = groups_.first_held();
  return first == nullptr ? std::nullopt : std::optional(first->value.deadline);
}

std::vector<RefusedPart> SyncGroups::expire() {
  std::vector<RefusedPart> expired;
  if (groups_.first_held() == nullptr) return expired;
  const double now = clock_();
  for (Groups::Entry* first = groups_.first_held(); first != nullptr && first->value.deadline <= now;
       first = groups_.first_held()) {
    const Fault fault = missing(first->value);
    for (const auto& [rank, part] : first->value.waiting) expired.push_back({part.context, fault});
    abandon(*first);
  }
  return expired;
}

SyncGroups::Groups::Entry& SyncGroups::group(const std::string& table, const SyncGroup& member) {
  require_rank(member);
  const std::string key = key_of(table, member.job);
  if (forgotten_.find(key) != nullptr)
    throw Fault("StepMismatch",
                "job " + quoted(member.job) + " pushed nothing to table " + quoted(table) + " while " +
                    std::to_string(max_groups_) +
                    " other groups did, and this shard forgot its step; restart all ranks from their last snapshot, "
                    "under a new job name");
  Groups::Entry* known = groups_.find(key);
  if (known == nullptr)
    known =
        &begin({.table = table, .job = member.job, .world_size = member.world_size, .next_sequence = member.sequence});
  groups_.touch(*known);
  if (known->value.world_size != member.world_size)
    throw Fault("StepMismatch", rank_of(member) + " has world_size " + std::to_string(member.world_size) +
                                    ", its group " + std::to_string(known->value.world_size) +
                                    "; use a new job name after changing the number of workers");
  return *known;
}

// Adds a group as the last used; if there are too many, forgets the one that has not pushed for longest.
SyncGroups::Groups::Entry& SyncGroups::begin(Group group) {
  if (groups_.size() >= max_groups_) {
    if (Groups::Entry* idle = groups_.oldest(); idle != nullptr) {
      idle->value.applied.clear();
      forgotten_.add(idle->name, std::move(idle->value));
      groups_.erase(*idle);
    }
  }
  if (forgotten_.size() > 4 * max_groups_) forgotten_.erase(*forgotten_.oldest());
  const std::string key = key_of(group.table, group.job);
  return groups_.add(key, std::move(group));
}

Fault SyncGroups::missing(const Group& group) const {
  std::string ranks;
  for (int64_t rank = 0; rank < group.world_size; ++rank)
    if (!group.waiting.contains(rank)) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  return {"RankMissing",
          "ranks [" + ranks + "] of job " + quoted(group.job) + " did not push step " +
              std::to_string(group.next_sequence) + " of table " + quoted(group.table) + " within " +
              six_digits(timeout_seconds_) +
              " s; nothing of the step was applied here. Is the rank alive? (server setting sync_timeout_seconds)"};
}

}  // namespace geartrain
