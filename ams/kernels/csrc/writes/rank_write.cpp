#include "writes/rank_write.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/text.hpp"
#include "routing/merge_route.hpp"
#include "values/kernels.hpp"

namespace geartrain {
namespace {

size_t bytes_of(const PushRequest& push) { return static_cast<size_t>(push.count * push.dim) * item_bytes(push.dtype); }
size_t bytes_of_ids(const PushRequest& push) { return static_cast<size_t>(push.count) * sizeof(int64_t); }
size_t bytes_of_occurrences(const PushRequest& push) {
  return push.batch.occurrences == nullptr ? 0 : static_cast<size_t>(push.count) * sizeof(uint32_t);
}

void add(std::string& bytes, uint64_t word) { bytes.append(reinterpret_cast<const char*>(&word), sizeof word); }
void add(std::string& bytes, double number) { add(bytes, std::bit_cast<uint64_t>(number)); }
void add(std::string& bytes, const std::string& text) {
  add(bytes, uint64_t{text.size()});
  bytes += text;
}

double sum_of_samples(const std::vector<const RankWrite*>& writes) {
  double total = 0;
  for (const RankWrite* write : writes) total += static_cast<double>(write->push.group->sample_count);
  return total;
}

// sums[places[i]] += gradients[i] * factor in order of i. New places are numbered from `next` on; their sums start with
// the first gradient.
int64_t add_weighted(float* sums, const int64_t* places, int64_t next, const PushRequest& push, float factor) {
  const size_t width = static_cast<size_t>(push.dim), row_bytes = width * item_bytes(push.dtype);
  const auto load = kernels().load[static_cast<int>(push.dtype)];
  std::vector<float> row(width);
  for (int64_t i = 0; i < push.count; ++i) {
    float* sum = sums + static_cast<size_t>(places[i]) * width;
    const bool is_new = places[i] == next;
    float* product = is_new ? sum : row.data();
    load(product, push.gradients + static_cast<size_t>(i) * row_bytes, width);
    for (size_t column = 0; column < width; ++column) product[column] *= factor;
    if (!is_new) kernels().add(sum, product, width);
    next += is_new;
  }
  return next;
}

}  // namespace

size_t bytes_of(const RankWrite& write) {
  if (write.hosted != nullptr) return write.hosted->bytes();
  return bytes_of_ids(write.push) + bytes_of_occurrences(write.push) + bytes_of(write.push);
}

RankWrite copied(const RankWrite& write) {
  RankWrite copy = write;
  if (write.hosted != nullptr) return copy;
  const size_t id_bytes = bytes_of_ids(write.push), row_bytes = bytes_of(write.push);
  const size_t occurrences_bytes = bytes_of_occurrences(write.push);
  const std::shared_ptr<char[]> bytes(new char[id_bytes + occurrences_bytes + row_bytes]);
  if (write.push.count != 0) {
    std::memcpy(bytes.get(), write.push.ids, id_bytes);
    if (occurrences_bytes != 0) std::memcpy(bytes.get() + id_bytes, write.push.batch.occurrences, occurrences_bytes);
    std::memcpy(bytes.get() + id_bytes + occurrences_bytes, write.push.gradients, row_bytes);
  }
  copy.push.ids = reinterpret_cast<const int64_t*>(bytes.get());
  if (occurrences_bytes != 0) copy.push.batch.occurrences = reinterpret_cast<const uint32_t*>(bytes.get() + id_bytes);
  copy.push.gradients = bytes.get() + id_bytes + occurrences_bytes;
  copy.arrays = bytes;
  return copy;
}

Fingerprint fingerprint_of(const RankWrite& write) {
  const PushRequest& push = write.push;
  Scalars scalars = push.scalars;
  std::sort(scalars.begin(), scalars.end());
  std::string told;
  for (const int64_t number : {int64_t{push.step_goes_on}, int64_t{push.lr.has_value()}, push.group->sample_count,
                               static_cast<int64_t>(push.dtype), push.count, push.dim})
    add(told, static_cast<uint64_t>(number));
  add(told, push.lr.value_or(0));
  add(told, push.scale);
  for (const auto& [name, value] : scalars) {
    add(told, name);
    add(told, value);
  }
  // not the time: a restarted rank has another
  if (push.batch.step) add(told, static_cast<uint64_t>(*push.batch.step));
  Fingerprint begin = murmur3(told.data(), told.size());
  if (write.hosted != nullptr) return write.hosted->fingerprint(begin);
  if (push.batch.occurrences != nullptr)
    begin = fingerprint(push.batch.occurrences, static_cast<size_t>(push.count) * sizeof(uint32_t), begin);
  const Fingerprint ids = fingerprint(push.ids, static_cast<size_t>(push.count) * sizeof(int64_t), begin);
  return fingerprint(push.gradients, bytes_of(push), ids);
}

bool are_hosted(const std::string& table, const std::vector<const RankWrite*>& writes) {
  const auto hosted =
      std::count_if(writes.begin(), writes.end(), [](const RankWrite* write) { return write->hosted != nullptr; });
  if (hosted != 0 && hosted != static_cast<int64_t>(writes.size()))
    throw Fault("StepMismatch", "some ranks push gradients to table " + quoted(table) +
                                    ", others update it by a hosted model; give all ranks of a head the same rows=");
  return hosted != 0;
}

JointPush joint_push(const std::vector<const RankWrite*>& writes, bool counts_occurrences) {
  const int64_t width = writes.front()->push.dim;
  const double samples = sum_of_samples(writes);
  std::vector<int64_t> ids;
  for (const RankWrite* write : writes) ids.insert(ids.end(), write->push.ids, write->push.ids + write->push.count);
  const auto count = static_cast<int64_t>(ids.size());
  JointPush joint;
  joint.ids.resize(ids.size());
  std::vector<int64_t> places(ids.size());
  joint.ids.resize(static_cast<size_t>(merge_ids(ids.data(), count, joint.ids.data(), places.data())));
  joint.gradients.reset(new float[joint.ids.size() * static_cast<size_t>(width)]);

  const DefaultFloatMode float_mode;
  const int64_t* of_rank = places.data();
  int64_t next = 0;
  for (const RankWrite* write : writes) {
    const PushRequest& push = write->push;
    const double weight = samples != 0 ? static_cast<double>(push.group->sample_count) / samples : 0.0;
    next = add_weighted(joint.gradients.get(), of_rank, next, push, static_cast<float>(weight * push.scale));
    of_rank += push.count;
  }
  joint.push = writes.front()->push;
  joint.push.ids = joint.ids.data();
  joint.push.count = next;
  joint.push.dim = width;
  joint.push.dtype = DType::float32;
  joint.push.gradients = reinterpret_cast<const char*>(joint.gradients.get());
  joint.push.scale = 1.0;
  joint.push.group.reset();
  joint.push.batch.pulled_at.reset();
  if (counts_occurrences) {
    joint.occurrences.resize(joint.ids.size());
    const int64_t* place = places.data();
    for (const RankWrite* write : writes)
      for (int64_t i = 0; i < write->push.count; ++i)
        add_occurrences(joint.occurrences[static_cast<size_t>(*place++)], write->push.batch.occurrences_of(i));
  }
  joint.push.batch.occurrences = counts_occurrences ? joint.occurrences.data() : nullptr;
  for (const RankWrite* write : writes) {
    joint.push.batch.step = std::max(joint.push.batch.step, write->push.batch.step);  // no step is less than any step
    joint.push.batch.unix_seconds = std::max(joint.push.batch.unix_seconds, write->push.batch.unix_seconds);
  }
  return joint;
}

}  // namespace geartrain
