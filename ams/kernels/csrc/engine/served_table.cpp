#include "engine/served_table.hpp"

#include <bit>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "base/clock.hpp"
#include "base/text.hpp"

namespace geartrain {
namespace {

constexpr const char* kDTypeNames[] = {"float32", "float16", "bfloat16"};

// A push's time must not be later than this: it would make all rows old at once, and for good.
constexpr double kSecondsAhead = 3600;

const char* name_of(DType dtype) { return kDTypeNames[static_cast<int>(dtype)]; }

}  // namespace

Fault fault_of(const Refusal& refusal, int64_t value, const std::string& name, const RowStoreSpec& spec,
               const std::string& label) {
  const std::string index = std::to_string(refusal.index), number = std::to_string(value);
  const std::string id = "ids[" + index + "] of table " + quoted(name) + " is " + number;
  switch (refusal.reason) {
    case Reason::bad_position:
      return {"InvalidRows", "positions[" + index + "] is " + number + "; it must be the index of a row of out"};
    case Reason::negative_id:
      return {"InvalidIds", id + "; ids must be >= 0"};
    case Reason::id_too_large:
      return {"InvalidIds", id + "; ids must lie in [0, " + std::to_string(spec.num_rows) + ")"};
    case Reason::foreign_bucket:
      return {"InvalidIds", id + ", whose bucket this shard does not own; route it by the cluster's map"};
    case Reason::non_finite:
      return {"NonFinite", label + " of id " + number + " (index " + index + ") in table " + quoted(name) +
                               " hold NaN or infinity; nothing was changed"};
    case Reason::beyond_wire:
      return {"NonFinite",
              "the row of id " + number + " (index " + index + ") in table " + quoted(name) +
                  " is beyond the range of " + label +
                  "; pull it with wire_dtype=\"bfloat16\", which has the range of float32, or without wire_dtype"};
    case Reason::overflow:
      break;
  }
  return {"NonFinite", "the push would carry id " + number + " (index " + index + ") of table " + quoted(name) +
                           " beyond the range of " + name_of(spec.dtype) + " rows or " + name_of(spec.slot_dtype) +
                           " slots; lower lr or scale. This shard changed nothing"};
}

PushOptimizers::PushOptimizers(std::string name, std::map<std::string, double> scalars,
                               std::map<std::string, std::string> fixed, std::shared_ptr<const Optimizer> own)
    : name_(std::move(name)), scalars_(std::move(scalars)), fixed_(std::move(fixed)), own_(std::move(own)) {}

const Optimizer& PushOptimizers::of_push(const Scalars& scalars) {
  if (scalars.empty()) return *own_;
  if (scalars == last_scalars_) return *last_;
  std::map<std::string, double> numbers = scalars_;
  for (const auto& [name, value] : scalars) {
    const auto own = scalars_.find(name);
    if (own == scalars_.end() || name == "lr") {
      std::string known;
      for (const auto& [known_name, _] : scalars_)
        if (known_name != "lr") known += (known.empty() ? "" : ", ") + known_name;
      throw Fault("InvalidArgument",
                  "a push for " + name_ + " cannot carry " + quoted(name) + "; it can carry " + known);
    }
    const auto reason = fixed_.find(name);
    if (reason != fixed_.end() && value != own->second)
      throw Fault("InvalidArgument", name + " is " + shown(value) + ", the table's is " + shown(own->second) +
                                         ", and it cannot change: " + reason->second);
    numbers[name] = value;
  }
  try {
    last_ = make_optimizer(name_, OptimizerScalars(numbers));
  } catch (const std::invalid_argument& error) {
    throw Fault("InvalidArgument", error.what());
  }
  last_scalars_ = scalars;
  return *last_;
}

ServedTable::ServedTable(std::string name, int64_t incarnation, std::shared_ptr<RowStore> rows, double lr,
                         PushOptimizers optimizers, bool open)
    : is_open(open),
      name_(std::move(name)),
      incarnation_(incarnation),
      rows_(std::move(rows)),
      lr_(lr),
      optimizers_(std::move(optimizers)) {}

void ServedTable::require_meant(int64_t incarnation) const {
  if (incarnation == 0 || incarnation == incarnation_) return;
  const std::string name = quoted(name_);
  throw Fault("TableNotFound",
              "table " + name +
                  " was dropped, and another was made or restored under its name; open that one: cluster.table(" +
                  name + "), or make its head, dense module or slow gear anew");
}

void ServedTable::require_open(int64_t meant_incarnation) const {
  if (!is_open)  // same text as `being_restored` in ams/values/errors.py
    throw Fault(
        "TableBeingRestored",
        "table " + quoted(name_) +
            " is being restored from a snapshot, and cannot be read, written or opened until all of its rows are "
            "there; retry then. If the process that restored it is gone, restore the snapshot again, or drop the "
            "table");
  require_meant(meant_incarnation);
}

void ServedTable::require_whole() const {
  if (!torn.empty()) throw Fault("InternalError", torn);
}

void ServedTable::require_width(const char* label, int64_t dim) const {
  if (dim != rows_->spec().dim)
    throw Fault("InvalidRows", std::string(label) + " of table " + quoted(name_) + " has rows of width " +
                                   std::to_string(dim) + "; they must be of width " +
                                   std::to_string(rows_->spec().dim));
}

void ServedTable::require_dtype(const char* label, DType dtype) const {
  if (dtype != rows_->spec().dtype)
    throw Fault("InvalidRows", std::string(label) + " of table " + quoted(name_) + " is " + name_of(dtype) +
                                   "; it must be " + name_of(rows_->spec().dtype));
}

// Rows of float32 may be pulled as 16 bits; all others only in their own type.
void ServedTable::require_wire(const PullRequest& request) const {
  const DType wire = request.wire_dtype();
  if (rows_->spec().dtype == DType::float32 && (request.dtype == DType::float32 || request.dtype == wire)) return;
  require_dtype("out", request.dtype);
  require_dtype("wire_dtype of a pull", wire);
}

void ServedTable::pull(const PullRequest& request, Pauses* pauses) const {
  const DType stored = rows_->spec().dtype;
  const bool is_plain = request.dtype == stored && request.wire_dtype() == stored && request.present == nullptr;
  const bool asks_for_states = is_plain && request.dim == rows_->state_width();
  if (!asks_for_states) require_width("out", request.dim);
  require_wire(request);
  const DType wire = request.wire_dtype();
  try {
    if (asks_for_states) return rows_->pull_states(request.ids, request.count, request.places());
    rows_->pull(request.ids, request.count, {request.places(), request.present, request.size, request.dtype, wire},
                pauses);
  } catch (const Refusal& refusal) {
    const int64_t* values = refusal.reason == Reason::bad_position ? request.positions : request.ids;
    const char* label = refusal.reason == Reason::beyond_wire ? name_of(wire) : "out";
    throw fault_of(refusal, values[refusal.index], name_, rows_->spec(), label);
  }
}

void ServedTable::require_factors(const PushRequest& request) const {
  const double lr = request.lr.value_or(lr_);
  if (!(lr >= 0 && std::isfinite(static_cast<float>(lr))))
    throw Fault("InvalidArgument", "lr is " + shown(lr) + "; it must be finite (as float32) and >= 0");
  if (!std::isfinite(static_cast<float>(request.scale)))
    throw Fault("InvalidArgument", "scale is " + shown(request.scale) +
                                       "; it must be finite (as float32). Push nothing for a skipped step");
  if (const auto& step = request.batch.step; step && (*step < 0 || *step > kMaxChosen))
    throw Fault("InvalidArgument", "step is " + std::to_string(*step) + "; it must lie in [0, 2^62]");
  if (const auto& seconds = request.batch.unix_seconds; seconds && !(*seconds >= 0 && std::isfinite(*seconds)))
    throw Fault("InvalidArgument", "unix_seconds is " + shown(*seconds) + "; it must be finite and >= 0");
  // same text as `checked_time` in Python
  else if (seconds && *seconds > clock_seconds(CLOCK_REALTIME) + kSecondsAhead)
    throw Fault("InvalidArgument",
                "unix_seconds is " + shown(*seconds) + ", which is " +
                    fixed_point((*seconds - clock_seconds(CLOCK_REALTIME)) / 3600, 1) +
                    " hours ahead of the clock of this shard; at most 1 is allowed. Give seconds as time.time() does, "
                    "or set the clock of the worker's machine or the shard's");
}

void ServedTable::note_staleness(const BatchFacts& batch) {
  const std::optional<int64_t>& pulled_at = batch.pulled_at;
  // a restore has reverted the rows since the pull
  if (!pulled_at || *pulled_at < 0 || *pulled_at > all_writes()) return;
  ++staleness_[static_cast<size_t>(std::bit_width(static_cast<uint64_t>(all_writes() - *pulled_at)))];
}

int64_t ServedTable::push(const PushRequest& request, Pauses* pauses, const RowPlaces<char>* after) {
  require_factors(request);
  const PushFactors factors{static_cast<float>(request.lr.value_or(lr_)), static_cast<float>(request.scale)};
  const PushStep step{optimizers_.of_push(request.scalars), factors, request.batch};
  require_width("gradients", request.dim);
  try {
    const int64_t created = rows_->push(request.ids, request.count, request.places(), request.dtype, step,
                                        !request.step_goes_on, pauses, after);
    note_staleness(request.batch);
    return created;
  } catch (const Refusal& refusal) {
    throw fault_of(refusal, request.ids[refusal.index], name_, rows_->spec(),
                   "gradients (times scale " + shown(request.scale) + ")");
  }
}

int64_t ServedTable::assign(const AssignRequest& request, Pauses* pauses) {
  require_width("rows", request.dim);
  require_dtype("rows", request.dtype);
  try {
    return rows_->assign(request.ids, request.count, request.rows, pauses);
  } catch (const Refusal& refusal) {
    throw fault_of(refusal, request.ids[refusal.index], name_, rows_->spec(), "rows");
  }
}

}  // namespace geartrain
