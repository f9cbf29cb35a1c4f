#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <variant>

#include "bindings/conversions.hpp"
#include "bindings/module.hpp"
#include "rows/array_update.hpp"
#include "store/row_store.hpp"
#include "values/rounding.hpp"

namespace geartrain {
namespace {

// Arrays and numbers are checked where tables receive them: tables/row_checks.py, and the specs of tables.
using Lives = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ByteArray = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Probability, or min_count, counter_bits, num_hashes, num_ranges and range_blocks of a filter.
using AdmissionGiven = std::variant<double, std::tuple<uint32_t, int, int, int64_t, int64_t>>;

AdmissionSpec admission_of(const std::optional<AdmissionGiven>& given) {
  AdmissionSpec spec;
  if (!given) return spec;
  if (const auto* probability = std::get_if<double>(&*given)) {
    spec.kind = AdmissionSpec::Kind::probability;
    spec.probability = *probability;
    return spec;
  }
  spec.kind = AdmissionSpec::Kind::min_count;
  std::tie(spec.min_count, spec.counter_bits, spec.num_hashes, spec.num_ranges, spec.range_blocks) =
      std::get<1>(*given);
  return spec;
}

RowStoreSpec spec_of(int64_t dim, int dtype, int slot_dtype, const std::shared_ptr<Optimizer>& optimizer,
                     int distribution, double first, double second, uint64_t seed, uint32_t table_hash,
                     const IdArray& owned_buckets, int64_t num_rows, int64_t threads, int64_t window,
                     const std::optional<AdmissionGiven>& admission, bool keeps_lives, int64_t max_bytes,
                     const std::string& name) {
  require(threads >= 1 && threads <= 64, "threads must lie in [1, 64]");
  require(window >= 4, "window must be >= 4");
  const std::vector<int64_t> owned(owned_buckets.data(), owned_buckets.data() + owned_buckets.size());
  const InitialValues initial{static_cast<Distribution>(distribution), first, second, seed, table_hash};
  return {dim,
          static_cast<DType>(dtype),
          static_cast<DType>(slot_dtype),
          optimizer,
          initial,
          owned,
          num_rows,
          threads,
          window,
          admission.has_value() || keeps_lives,
          admission_of(admission),
          keeps_lives,
          max_bytes,
          name};
}

void pull(const RowStore& store, const IdArray& ids, const MatrixOutput& out, const std::optional<Flags>& present) {
  const RowStore::PullInto into{{static_cast<char*>(out.data())},
                                present ? present->data() : nullptr,
                                static_cast<int64_t>(out.shape(0)),
                                store.spec().dtype,
                                store.spec().dtype};
  WithoutInterpreter release;
  store.pull(ids.data(), static_cast<int64_t>(ids.size()), into);
}

int64_t push(RowStore& store, const IdArray& ids, const Matrix& gradients, int dtype_code, const Optimizer& optimizer,
             float lr, float scale, bool ends_step, nb::handle batch) {
  const PushStep step{optimizer, {lr, scale}, batch_of(batch, ids.size())};
  WithoutInterpreter release;
  return store.push(ids.data(), static_cast<int64_t>(ids.size()), {static_cast<const char*>(gradients.data())},
                    static_cast<DType>(dtype_code), step, ends_step);
}

void check_push(const RowStore& store, const IdArray& ids, const Matrix& gradients, int dtype_code,
                const Optimizer& optimizer, float lr, float scale) {
  WithoutInterpreter release;
  store.check_push(ids.data(), static_cast<int64_t>(ids.size()), {static_cast<const char*>(gradients.data())},
                   static_cast<DType>(dtype_code), {optimizer, {lr, scale}});
}

void make_room(RowStore& store, const IdArray& ids) {
  WithoutInterpreter release;
  store.make_room(ids.data(), static_cast<int64_t>(ids.size()));
}

int64_t assign(RowStore& store, const IdArray& ids, const Matrix& rows) {
  WithoutInterpreter release;
  return store.assign(ids.data(), static_cast<int64_t>(ids.size()), static_cast<const char*>(rows.data()));
}

int64_t remove_rows(RowStore& store, const IdArray& ids) {
  WithoutInterpreter release;
  return store.remove(ids.data(), static_cast<int64_t>(ids.size()));
}

int64_t read_frozen_removed(const RowStore& store, int64_t from, const IdOutput& ids) {
  require(from >= 0, "from must be >= 0");
  WithoutInterpreter release;
  return store.read_frozen_removed(from, static_cast<int64_t>(ids.size()), ids.data());
}

int64_t freeze(RowStore& store, std::optional<int64_t> since) {
  require(!store.is_frozen(), "the table is frozen already");
  require(!since || store.knows_moment(*since), "the table does not know what was written since that moment");
  WithoutInterpreter release;
  return store.freeze(since);
}

RowLife* lives_in(const std::optional<Lives>& lives) {
  return lives ? reinterpret_cast<RowLife*>(lives->data()) : nullptr;
}

nb::tuple read_lives(const RowStore& store, int64_t position, const IdOutput& ids, const std::optional<Lives>& lives) {
  require(position >= 0, "position must be >= 0");
  RowLife* const into = lives_in(lives);
  int64_t count = 0;
  {
    WithoutInterpreter release;
    count = store.read_lives(position, static_cast<int64_t>(ids.size()), ids.data(), into);
  }
  return nb::make_tuple(count, position);
}

nb::tuple as_tuple(const LifeClock& clock) {
  return nb::make_tuple(clock.step, clock.seconds);
}

int64_t read_frozen(RowStore& store, const IdOutput& ids, const MatrixOutput& rows,
                    const std::optional<MatrixOutput>& slots, const std::optional<IdOutput>& steps,
                    const std::optional<ByteArray>& buckets, const std::optional<Lives>& lives) {
  require(!buckets || buckets->size() == kNumBuckets, "buckets must have 4096 elements");
  WithoutInterpreter release;
  return store.read_frozen(static_cast<int64_t>(ids.size()), buckets ? buckets->data() : nullptr, ids.data(),
                           static_cast<char*>(rows.data()), slots ? static_cast<char*>(slots->data()) : nullptr,
                           steps ? steps->data() : nullptr, lives_in(lives));
}

int64_t restore(RowStore& store, const IdArray& ids, const Matrix& rows, const std::optional<Matrix>& slots,
                const std::optional<IdArray>& steps, const std::optional<Lives>& lives) {
  WithoutInterpreter release;
  return store.restore(ids.data(), static_cast<int64_t>(ids.size()), static_cast<const char*>(rows.data()),
                       slots ? static_cast<const char*>(slots->data()) : nullptr, steps ? steps->data() : nullptr,
                       lives_in(lives));
}

nb::tuple step_state(const RowStore& store) {
  require(store.spec().counts_steps(), "the table counts no steps");
  const StepState state = store.step_state();
  return nb::make_tuple(state.now, state.lrs, state.origin_ww, state.origin_vw);
}

void adopt_steps(RowStore& store, int64_t now, const std::vector<float>& lrs, double origin_ww, double origin_vw) {
  require(store.spec().counts_steps(), "the table counts no steps");
  const StepState state{now, lrs, origin_ww, origin_vw};
  require_steps(state);
  store.adopt_steps(state);
}

nb::tuple full_dense_table(const IdArray& owned_buckets, int64_t num_rows, int64_t item_bytes) {
  require(num_rows >= 1 && num_rows < int64_t{1} << 62, "num_rows must lie in [1, 2**62)");
  require(item_bytes >= 1, "item_bytes must be >= 1");
  const std::vector<int64_t> owned(owned_buckets.data(), owned_buckets.data() + owned_buckets.size());
  for (int64_t bucket : owned) require(bucket >= 0 && bucket < kNumBuckets, "owned_buckets must lie in [0, 4096)");
  const DenseItems::Full full = DenseItems(owned, num_rows, item_bytes).when_full(owned);
  return nb::make_tuple(full.rows, full.items, full.index_bytes);
}

bool is_zero(const char* bytes, size_t count) {
  return bytes[0] == 0 && std::memcmp(bytes, bytes + 1, count - 1) == 0;
}

// Returns (pushes, numbers of ranges, their counters as bytes [R, B], waiting ids of each, range to continue at or -1):
// about `most_bytes`, from range `start` on. None: the table admits every id, or nothing is frozen. Must not run during
// a thaw.
std::optional<nb::tuple> frozen_admission(const RowStore& store, int64_t start, int64_t most_bytes) {
  const auto& state = store.frozen_admission();
  if (!state) return std::nullopt;
  require(start >= 0, "start must be >= 0");
  int64_t from = start;
  std::vector<int64_t> numbers, waiting;
  const Admission& admission = *store.admission();
  const size_t width = admission.range_bytes();
  const int64_t slab_ranges = admission.slab_ranges(),
                num_ranges = static_cast<int64_t>(state->slabs.size()) * slab_ranges;
  const int64_t most = std::max<int64_t>(1, most_bytes / static_cast<int64_t>(width));
  std::unique_ptr<uint8_t[]> bytes;
  {
    WithoutInterpreter release;
    for (int64_t looked_at = 0; from < num_ranges && looked_at < most; ++from) {
      const auto& slab = state->slabs[static_cast<size_t>(from / slab_ranges)];
      if (slab == nullptr) continue;
      ++looked_at;
      const auto i = static_cast<size_t>(from % slab_ranges);
      if (slab->num_waiting[i] == 0 && is_zero(slab->bytes() + i * width, width)) continue;
      numbers.push_back(from);
      waiting.push_back(slab->num_waiting[i]);
    }
    bytes.reset(new uint8_t[std::max<size_t>(1, numbers.size() * width)]);
    for (size_t n = 0; n < numbers.size(); ++n) {
      const auto& slab = state->slabs[static_cast<size_t>(numbers[n] / slab_ranges)];
      std::memcpy(bytes.get() + n * width, slab->bytes() + static_cast<size_t>(numbers[n] % slab_ranges) * width,
                  width);
    }
  }
  uint8_t* const data = bytes.get();
  const nb::capsule owner(bytes.release(), [](void* held) noexcept { delete[] static_cast<uint8_t*>(held); });
  return nb::make_tuple(state->num_pushes, numbers,
                        nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>(data, {numbers.size(), width}, owner), waiting,
                        from < num_ranges ? from : -1);
}

void restore_admission(RowStore& store, int64_t num_pushes, const std::vector<int64_t>& ranges,
                       const nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& counters,
                       const std::vector<int64_t>& waiting) {
  require(store.admission() != nullptr, "the table admits every id");
  const AdmissionSpec& spec = store.admission()->spec();
  require(num_pushes >= 0 && ranges.size() == waiting.size() && counters.shape(0) == ranges.size(),
          "counters must be as many as ranges");
  require(ranges.empty() ||
              (spec.kind == AdmissionSpec::Kind::min_count && counters.shape(1) == store.admission()->range_bytes()),
          "counters must be those of a filter of the same size");
  for (size_t i = 0; i < ranges.size(); ++i)
    require(ranges[i] >= 0 && ranges[i] < spec.num_ranges && waiting[i] >= 0, "ranges must be those of the filter");
  const auto* bytes = reinterpret_cast<const char*>(counters.data());
  WithoutInterpreter release;
  store.restore_admission(num_pushes, -1, nullptr, 0);
  for (size_t i = 0; i < ranges.size(); ++i)
    store.restore_admission(num_pushes, ranges[i], bytes + i * counters.shape(1), waiting[i]);
}

// Returns (waiting ids, refused gradients, their occurrences); None: the table admits every id.
std::optional<nb::tuple> refused(const RowStore& store) {
  const Admission* admission = store.admission();
  if (admission == nullptr) return std::nullopt;
  return nb::make_tuple(admission->num_waiting(), admission->refused_gradients(), admission->refused_occurrences(),
                        admission->memory_bytes());
}


using FactorRows = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require_within(const IdArray& numbers, size_t num_rows) {
  const auto [low, high] = std::minmax_element(numbers.data(), numbers.data() + numbers.size());
  require(numbers.size() == 0 || (*low >= 0 && *high < static_cast<int64_t>(num_rows)),
          "a number lies outside the rows");
}

void gather_checked(const FloatRows& rows, const IdArray& numbers, const FloatRows& out) {
  require(out.shape(0) == numbers.size() && out.shape(1) == rows.shape(1), "out must be [N, D]");
  WithoutInterpreter release;
  require_within(numbers, rows.shape(0));
  gather_rows(rows.data(), static_cast<int64_t>(rows.shape(1)), numbers.data(), static_cast<int64_t>(numbers.size()),
              out.data());
}

int64_t update_checked(const MatrixOutput& rows, int dtype_code, const std::optional<MatrixOutput>& slots,
                       int slot_dtype_code, const std::optional<IdOutput>& steps, const std::optional<IdArray>& numbers,
                       const FloatRows& gradients, int64_t first_id, uint64_t seed, uint32_t table_hash,
                       const Optimizer& optimizer, float lr, float scale, const CatchUp* catch_up,
                       const std::optional<IdArray>& ids) {
  require((optimizer.num_slots() > 0) == slots.has_value(),
          "slots must be given for an optimizer that has them, and only for those");
  const DType dtype = checked_dtype(rows, dtype_code);
  const DType slot_dtype = slots ? checked_dtype(*slots, slot_dtype_code) : DType::float32;
  require(!slots || (slots->shape(0) == rows.shape(0) && slots->shape(1) == optimizer.slot_dim(rows.shape(1))),
          "slots must be [rows, columns of all slots of the optimizer]");
  require(slot_dtype == DType::float32 || optimizer.takes_narrow_slots(), "slots of this optimizer must be float32");
  require((catch_up != nullptr) == optimizer.drift().has_value(),
          "catch_up must be given if, and only if, the optimizer moves untouched rows");
  const bool counts =
      optimizer.counts_updates() || dtype != DType::float32 || slot_dtype != DType::float32 || catch_up != nullptr;
  require(counts == steps.has_value(),
          "steps must be given if, and only if, the optimizer counts updates or steps, or rows or slots have 16 bits");
  require(!steps || steps->size() == rows.shape(0), "steps must be as many as rows");
  const size_t count = numbers ? numbers->size() : rows.shape(0);
  require(gradients.shape(0) == count && gradients.shape(1) == rows.shape(1), "gradients must be [N, D]");
  require(!ids || ids->size() == count, "ids must be [N]");
  WithoutInterpreter release;
  if (numbers) require_within(*numbers, rows.shape(0));
  const ArrayUpdate given{static_cast<char*>(rows.data()), slots ? static_cast<char*>(slots->data()) : nullptr,
                        steps ? steps->data() : nullptr, static_cast<int64_t>(rows.shape(1)), dtype, slot_dtype,
                        first_id, rounding_key(seed, table_hash), ids ? ids->data() : nullptr};
  return update_rows(given, numbers ? numbers->data() : nullptr, static_cast<int64_t>(count), gradients.data(),
                     {optimizer, {lr, scale}, catch_up});
}

void read_checked(const MatrixOutput& rows, int dtype_code, const MatrixOutput& slots, int slot_dtype_code,
                  const IdOutput& steps, const std::optional<IdArray>& numbers, const CatchUp& catch_up,
                  const FloatRows& out) {
  const DType dtype = checked_dtype(rows, dtype_code), slot_dtype = checked_dtype(slots, slot_dtype_code);
  require(slots.shape(0) == rows.shape(0) && slots.shape(1) == rows.shape(1), "slots must have the shape of the rows");
  require(steps.size() == rows.shape(0), "steps must be as many as rows");
  const size_t count = numbers ? numbers->size() : rows.shape(0);
  require(out.shape(0) == count && out.shape(1) == rows.shape(1), "out must be [N, D]");
  WithoutInterpreter release;
  if (numbers) require_within(*numbers, rows.shape(0));
  const ArrayUpdate given{static_cast<char*>(rows.data()), static_cast<char*>(slots.data()), steps.data(),
                        static_cast<int64_t>(rows.shape(1)), dtype, slot_dtype, 0, 0, nullptr};
  read_rows(given, numbers ? numbers->data() : nullptr, static_cast<int64_t>(count), catch_up, out.data());
}

void create_history(StepHistory* self, const Optimizer& optimizer) {
  require(optimizer.drift().has_value(), "rows of this optimizer do not move at steps that do not touch them");
  new (self) StepHistory(*optimizer.drift());
}

void adopt(StepHistory& history, int64_t now, const std::vector<float>& lrs, double origin_ww, double origin_vw) {
  const StepState state{now, lrs, origin_ww, origin_vw};
  require_steps(state);
  history.adopt(state);
}

// Copies [K + 1, 4]: effects by age, then that on rows that were never written.
void copy_factors(const CatchUp& catch_up, const FactorRows& out) {
  const std::vector<Elapsed>& by_age = catch_up.by_age();
  require(out.shape(0) == by_age.size() + 1 && out.shape(1) == 4, "out must be [num_ages + 1, 4]");
  static_assert(sizeof(Elapsed) == 4 * sizeof(double));
  std::memcpy(out.data(), by_age.data(), by_age.size() * sizeof(Elapsed));
  std::memcpy(out.data() + 4 * by_age.size(), &catch_up.origin(), sizeof(Elapsed));
}

void bind_steps(nb::module_& m) {
  nb::class_<StepHistory>(m, "StepHistory")
      .def("__init__", &create_history, nb::arg("optimizer"))
      .def("end_step", &StepHistory::end_step, nb::arg("lr"))
      .def("forget_before", &StepHistory::forget_before, nb::arg("step"))
      .def("state", [](const StepHistory& history) {
        const StepState state = history.state();
        return nb::make_tuple(state.now, state.lrs, state.origin_ww, state.origin_vw);
      })
      .def("adopt", &adopt, nb::arg("now"), nb::arg("lrs"), nb::arg("origin_ww"), nb::arg("origin_vw"))
      .def_prop_ro("moves_rows_at_rest", &StepHistory::moves_rows_at_rest)
      .def_prop_ro("now", &StepHistory::now);
  nb::class_<CatchUp>(m, "CatchUp")
      .def("__init__", [](CatchUp* self, const StepHistory& history) { (new (self) CatchUp(history))->reach_back(1); },
           nb::arg("history"), nb::keep_alive<1, 2>())
      .def("copy_factors", &copy_factors, nb::arg("out").noconvert())
      .def_prop_ro("num_ages", [](const CatchUp& catch_up) { return catch_up.by_age().size(); })
      .def_prop_ro("now", &CatchUp::now);
}

}  // namespace

void bind_row_store(nb::module_& m) {
  m.def("full_dense_table", &full_dense_table, nb::arg("owned_buckets").noconvert(), nb::arg("num_rows"),
        nb::arg("item_bytes"));
  m.def("optimizer_names", &optimizer_names);
  nb::class_<Optimizer>(m, "Optimizer")
      .def(nb::new_([](const std::string& name, const std::map<std::string, double>& scalars) {
             return make_optimizer(name, OptimizerScalars(scalars));
           }),
           nb::arg("name"), nb::arg("scalars"));
  nb::class_<RowStoreSpec>(m, "RowStoreSpec")
      .def(nb::new_(&spec_of), nb::kw_only(), nb::arg("dim"), nb::arg("dtype"), nb::arg("slot_dtype"),
           nb::arg("optimizer"), nb::arg("distribution"), nb::arg("first"), nb::arg("second"), nb::arg("seed"),
           nb::arg("table_hash"), nb::arg("owned_buckets").noconvert(), nb::arg("num_rows"), nb::arg("threads"),
           nb::arg("window"), nb::arg("admission") = nb::none(), nb::arg("keeps_lives") = false,
           nb::arg("max_bytes") = -1, nb::arg("name") = "");
  nb::class_<RowStore>(m, "RowStore")
      .def(nb::init<const RowStoreSpec&>(), nb::arg("spec"))
      .def("alter", &RowStore::alter, nb::arg("to"), nb::call_guard<WithoutInterpreter>())
      .def("pull", &pull, nb::arg("ids").noconvert(), nb::arg("out").noconvert(), nb::arg("present").noconvert().none())
      .def("push", &push, nb::arg("ids").noconvert(), nb::arg("gradients").noconvert(), nb::arg("dtype_code"),
           nb::arg("optimizer"), nb::arg("lr"), nb::arg("scale"), nb::arg("ends_step"),
           nb::arg("batch").none() = nb::none())
      .def("frozen_admission", &frozen_admission, nb::arg("start"), nb::arg("most_bytes"))
      .def("restore_admission", &restore_admission, nb::arg("num_pushes"), nb::arg("ranges"),
           nb::arg("counters").noconvert(), nb::arg("waiting"))
      .def("refused", &refused)
      .def("check_push", &check_push, nb::arg("ids").noconvert(), nb::arg("gradients").noconvert(),
           nb::arg("dtype_code"), nb::arg("optimizer"), nb::arg("lr"), nb::arg("scale"))
      .def(
          "cannot_overflow",
          [](const RowStore& store, float largest, const Optimizer& optimizer, float lr, float scale) {
            return store.cannot_overflow(largest, {optimizer, {lr, scale}});
          },
          nb::arg("largest"), nb::arg("optimizer"), nb::arg("lr"), nb::arg("scale"))
      .def("make_room", &make_room, nb::arg("ids").noconvert())
      .def("make_room_to_keep", &RowStore::make_room_to_keep, nb::arg("count"), nb::call_guard<WithoutInterpreter>())
      .def("assign", &assign, nb::arg("ids").noconvert(), nb::arg("rows").noconvert())
      .def("remove", &remove_rows, nb::arg("ids").noconvert())
      .def("read_frozen_removed", &read_frozen_removed, nb::arg("from_number"), nb::arg("ids").noconvert())
      .def("freeze", &freeze, nb::arg("since").none())
      .def("record_moment", &RowStore::record_moment)
      .def("forget_moment", &RowStore::forget_moment, nb::arg("moment"))
      .def("knows_moment", &RowStore::knows_moment, nb::arg("moment"))
      .def_prop_ro("latest_moment", &RowStore::latest_moment)
      .def("read_frozen", &read_frozen, nb::arg("ids").noconvert(), nb::arg("rows").noconvert(),
           nb::arg("slots").none(), nb::arg("steps").noconvert().none(), nb::arg("buckets").noconvert().none(),
           nb::arg("lives").noconvert().none() = nb::none())
      .def("thaw", &RowStore::thaw, nb::arg("kept"))
      .def("restore", &restore, nb::arg("ids").noconvert(), nb::arg("rows").noconvert(), nb::arg("slots").none(),
           nb::arg("steps").noconvert().none(), nb::arg("lives").noconvert().none() = nb::none())
      .def("read_lives", &read_lives, nb::arg("position"), nb::arg("ids").noconvert(),
           nb::arg("lives").noconvert().none())
      .def(
          "advance_clock", [](RowStore& store, int64_t step, int64_t seconds) { store.advance_clock({step, seconds}); },
          nb::arg("step"), nb::arg("seconds"))
      .def_prop_ro("clock", [](const RowStore& store) { return as_tuple(store.clock()); })
      .def("pop_leap", [](RowStore& store) { return as_tuple(store.pop_leap()); })
      .def_prop_ro("max_rows", &RowStore::max_rows)
      .def_prop_ro("num_evicted", &RowStore::num_evicted)
      .def_prop_ro("has_undated", &RowStore::has_undated)
      .def("adopt_undated", &RowStore::adopt_undated)
      .def("step_state", &step_state)
      .def("adopt_steps", &adopt_steps, nb::arg("now"), nb::arg("lrs"), nb::arg("origin_ww"), nb::arg("origin_vw"))
      .def_prop_ro("num_present", &RowStore::num_present)
      .def_prop_ro("memory_bytes", &RowStore::memory_bytes)
      .def("memory_parts", [](const RowStore& store) {
        const RowStore::MemoryParts parts = store.memory_parts();
        return nb::make_tuple(parts.rows, parts.slots, parts.index, parts.snapshots);
      });
  bind_steps(m);
  m.def("gather_rows", &gather_checked, nb::arg("rows").noconvert(), nb::arg("numbers").noconvert(),
        nb::arg("out").noconvert());
  m.def("update_rows", &update_checked, nb::kw_only(), nb::arg("rows").noconvert(), nb::arg("dtype"),
        nb::arg("slots").noconvert().none(), nb::arg("slot_dtype"), nb::arg("steps").noconvert().none(),
        nb::arg("numbers").noconvert().none(), nb::arg("gradients").noconvert(), nb::arg("first_id"), nb::arg("seed"),
        nb::arg("table_hash"), nb::arg("optimizer"), nb::arg("lr"), nb::arg("scale"), nb::arg("catch_up").none(),
        nb::arg("ids").noconvert().none());
  m.def("read_rows", &read_checked, nb::kw_only(), nb::arg("rows").noconvert(), nb::arg("dtype"),
        nb::arg("slots").noconvert(), nb::arg("slot_dtype"), nb::arg("steps").noconvert(),
        nb::arg("numbers").noconvert().none(), nb::arg("catch_up"), nb::arg("out").noconvert());
}

}  // namespace geartrain
