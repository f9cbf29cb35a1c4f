#include <algorithm>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "machine/fan_out.hpp"
#include "bindings/module.hpp"
#include "softmax/class_pass.hpp"

namespace geartrain {
namespace {

using FloatRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatParts = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using DoubleRows = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kPieceRows = 2880;  // rows of a piece of work; a multiple of a tile's rows at usual widths

struct Free {
  void operator()(float* at) const { ::operator delete[](at, std::align_val_t{64}); }
};
using AlignedFloats = std::unique_ptr<float[], Free>;  // aligned to cache lines

AlignedFloats aligned_floats(int64_t count) {
  return AlignedFloats(
      static_cast<float*>(::operator new[](static_cast<size_t>(count) * sizeof(float), std::align_val_t{64})));
}

// Returns reused memory of this thread: fresh pages would cost more than the arithmetic.
float* scratch_of(int64_t floats) {
  thread_local AlignedFloats memory;
  thread_local int64_t size = 0;
  if (size < floats) {
    memory.reset();
    size = 0;
    memory = aligned_floats(floats);
    size = floats;
  }
  return memory.get();
}

const ClassPass& pass_in(bool bfloat16) { return bfloat16 ? bfloat16_class_pass() : class_pass(); }

// One batch, packed for the products; any number of threads may run it over chunks.
class PackedClassPass {
 public:
  // `weights` [B] multiply each sample's part of the gradients of rows; none: 1.
  PackedClassPass(const FloatRows& features, float logit_factor, bool normalised, bool bfloat16,
                  const std::optional<Floats>& weights, int64_t centers)
      : pass_(pass_in(bfloat16)),
        batch_(static_cast<int64_t>(features.shape(0))),
        dim_(static_cast<int64_t>(features.shape(1))),
        centers_(centers),
        normalised_(normalised) {
    require(centers >= 1 && centers <= kMaxCenters, "centers must lie in [1, 32]");
    require(batch_ >= 1 && dim_ >= 1, "features must be [B, D] with B and D >= 1");
    require(!weights || static_cast<int64_t>(weights->size()) == batch_, "weights must be [B]");
    features_.assign(features.data(), features.data() + batch_ * dim_);
    query_ = aligned_floats(pass_.packed_size(dim_, batch_));
    key_ = aligned_floats(pass_.packed_size(batch_, dim_));
    pass_.pack(features.data(), dim_, batch_, 1, dim_, logit_factor, query_.get());
    if (weights)
      for (int64_t i = 0; i < batch_ * dim_; ++i) features_[static_cast<size_t>(i)] *= weights->data()[i / dim_];
    pass_.pack(features_.data(), batch_, dim_, dim_, 1, 1.0f, key_.get());
  }

  // In the following, a row of an array is a class: its K centers, one after another.

  // The rows are cut into as many parts as there are sums, which `threads` threads share; `kept` may have fewer rows.
  void forward(const FloatRows& rows, const IdArray& target_rows, const IdArray& target_samples,
               const FloatRows& target_out, const std::optional<FloatRows>& shift, const DoubleRows& sum,
               const std::optional<FloatParts>& weighted, const std::optional<FloatRows>& kept, int64_t threads,
               const std::optional<Floats>& offsets, const std::optional<DoubleRows>& row_sum,
               const std::optional<FloatRows>& highest) const {
    const int64_t num_rows = checked_rows(rows), parts = static_cast<int64_t>(sum.shape(0));
    const Targets targets = checked_targets(target_rows, target_samples, rows);
    float* const targets_out = checked_batch(target_out);
    require(threads >= 1, "threads must be at least 1");
    require(parts >= 1 && static_cast<int64_t>(sum.shape(1)) == batch_, "sum must be [P, B] with P >= 1");
    require(
        !shift || (static_cast<int64_t>(shift->shape(0)) == parts && static_cast<int64_t>(shift->shape(1)) == batch_),
        "shift must be [P, B]");
    require(!weighted || (static_cast<int64_t>(weighted->shape(0)) == parts &&
                          static_cast<int64_t>(weighted->shape(1)) == batch_ &&
                          static_cast<int64_t>(weighted->shape(2)) == dim_),
            "weighted must be [P, B, D]");
    require(!highest ||
                (static_cast<int64_t>(highest->shape(0)) == parts && static_cast<int64_t>(highest->shape(1)) == batch_),
            "highest must be [P, B]");
    require(!row_sum ||
                (static_cast<int64_t>(row_sum->shape(0)) == parts && static_cast<int64_t>(row_sum->shape(1)) == dim_),
            "row_sum must be [P, D]");
    require(!row_sum || centers_ == 1, "row_sum must not be given for several centers");
    float* const kept_data = kept ? checked_logits(*kept, rows) : nullptr;
    const float* const offset_data = checked_offsets(offsets, num_rows);
    const int64_t num_kept = kept ? static_cast<int64_t>(kept->shape(0)) : 0;
    const int64_t room = scratch_room();
    threads = std::min(threads, parts);
    WithoutInterpreter release;
    float* const scratch = scratch_of(threads * room);
    deal_out(parts, threads, [&](int64_t part, int64_t thread) {
      FlushDenormals float_mode;
      const auto add = [&](int64_t first, int64_t last, float* logits) {
        if (first >= last) return;
        pass_.forward(view(),
                             {.rows = rows.data() + first * row_width(),
                              .num_rows = (last - first) * centers_,
                              .normalised = normalised_,
                              .targets = from_row(targets, first),
                              .offsets = offset_data == nullptr ? nullptr : offset_data + first,
                              .target_rows = targets_out,
                              .shift = shift ? shift->data() + part * batch_ : nullptr,
                              .sum = sum.data() + part * batch_,
                              .weighted = weighted ? weighted->data() + part * batch_ * dim_ : nullptr,
                              .kept = logits,
                              .highest = highest ? highest->data() + part * batch_ : nullptr,
                              .row_sum = row_sum ? row_sum->data() + part * dim_ : nullptr},
                             scratch + thread * room);
      };
      const int64_t first = num_rows * part / parts, last = num_rows * (part + 1) / parts;
      const int64_t middle = std::clamp(num_kept, first, last);
      add(first, middle, kept_data == nullptr ? nullptr : kept_data + first * kept_width());
      add(middle, last, nullptr);
    });
  }

  // `kept` may have fewer rows. Returns (a number that is 0, or NaN if a gradient is not finite; Σ g²).
  std::pair<float, double> overwrite(const FloatRows& rows, const IdArray& target_rows, const IdArray& target_samples,
                                     const Floats& log_sum, const Floats& target_weight,
                                     const std::optional<FloatRows>& kept, float factor, bool kept_exponentials,
                                     int64_t threads, const std::optional<Floats>& offsets,
                                     const std::optional<Floats>& common) const {
    const int64_t num_rows = checked_rows(rows);
    require(!common || static_cast<int64_t>(common->size()) == dim_, "common must be [D]");
    require(!common || centers_ == 1, "common must not be given for several centers");
    const float* const offset_data = checked_offsets(offsets, num_rows);
    const Targets targets = checked_targets(target_rows, target_samples, rows);
    const float* const log_sums = checked_samples(log_sum);
    const float* const target_weights = checked_samples(target_weight);
    const float* const kept_data = kept ? checked_logits(*kept, rows) : nullptr;
    const int64_t num_kept = kept ? static_cast<int64_t>(kept->shape(0)) : 0;
    require(threads >= 1, "threads must be at least 1");
    const int64_t at_once = kPieceRows / centers_;
    const int64_t kept_pieces = (num_kept + at_once - 1) / at_once;
    const int64_t pieces = kept_pieces + (num_rows - num_kept + at_once - 1) / at_once;
    const int64_t room = scratch_room();
    threads = std::min(threads, std::max<int64_t>(pieces, 1));
    WithoutInterpreter release;
    float* const scratch = scratch_of(threads * room);
    std::vector<GradientSums> sums(static_cast<size_t>(pieces));
    deal_out(pieces, threads, [&](int64_t piece, int64_t thread) {
      FlushDenormals float_mode;
      const bool is_kept = piece < kept_pieces;
      const int64_t first = is_kept ? piece * at_once : num_kept + (piece - kept_pieces) * at_once;
      const int64_t last = std::min(first + at_once, is_kept ? num_kept : num_rows);
      sums[static_cast<size_t>(piece)] =
          pass_.gradient(view(),
                                {.rows = rows.data() + first * row_width(),
                                 .num_rows = (last - first) * centers_,
                                 .normalised = normalised_,
                                 .targets = from_row(targets, first),
                                 .offsets = offset_data == nullptr ? nullptr : offset_data + first,
                                 .log_sum = log_sums,
                                 .target_weight = target_weights,
                                 .kept = is_kept ? kept_data + first * kept_width() : nullptr,
                                 .kept_exponentials = kept_exponentials,
                                 .factor = factor,
                                 .common = common ? common->data() : nullptr},
                                scratch + thread * room);
    });
    GradientSums all;
    for (const GradientSums& of_piece : sums) {  // in order: no sum depends on the threads
      all.check += of_piece.check;
      all.squares += of_piece.squares;
    }
    return {all.check, all.squares};
  }

 private:
  PackedBatch view() const {
    return {.batch = batch_,
            .dim = dim_,
            .centers = centers_,
            .features = features_.data(),
            .query = query_.get(),
            .key = key_.get()};
  }
  int64_t row_width() const { return dim_ * centers_; }
  int64_t kept_width() const { return batch_ * centers_; }

  int64_t checked_rows(const FloatRows& rows) const {
    require(static_cast<int64_t>(rows.shape(1)) == row_width(),
            "rows must have as many columns as features times centers");
    return static_cast<int64_t>(rows.shape(0));
  }
  Targets checked_targets(const IdArray& rows, const IdArray& samples, const FloatRows& chunk) const {
    require(rows.size() == samples.size(), "target rows and samples must pair up");
    for (size_t i = 0; i < rows.size(); ++i)
      require(rows.data()[i] >= 0 && rows.data()[i] < static_cast<int64_t>(chunk.shape(0)) && samples.data()[i] >= 0 &&
                  samples.data()[i] < batch_,
              "a target lies outside the chunk or the batch");
    return {.rows = rows.data(), .samples = samples.data(), .count = static_cast<int64_t>(rows.size())};
  }
  int64_t scratch_room() const { return (pass_.scratch_size(dim_) + 15) / 16 * 16; }  // in whole cache lines
  static Targets from_row(Targets targets, int64_t first) {
    targets.first_row = first;
    return targets;
  }
  float* checked_batch(const FloatRows& values) const {
    require(static_cast<int64_t>(values.shape(0)) == batch_ && static_cast<int64_t>(values.shape(1)) == dim_,
            "array must have the shape of the features");
    return values.data();
  }
  float* checked_samples(const Floats& values) const {
    require(static_cast<int64_t>(values.size()) == batch_, "array must be [B]");
    return values.data();
  }
  static const float* checked_offsets(const std::optional<Floats>& offsets, int64_t num_rows) {
    require(!offsets || static_cast<int64_t>(offsets->size()) == num_rows, "offsets must be [N], one for each row");
    return offsets ? offsets->data() : nullptr;
  }
  float* checked_logits(const FloatRows& kept, const FloatRows& rows) const {
    require(kept.shape(0) <= rows.shape(0) && static_cast<int64_t>(kept.shape(1)) == kept_width(),
            "kept must be [n, K * B] with n at most the number of rows");
    return kept.data();
  }

  const ClassPass& pass_;
  int64_t batch_;
  int64_t dim_;
  int64_t centers_;
  bool normalised_;
  std::vector<float> features_;
  AlignedFloats query_;
  AlignedFloats key_;
};

}  // namespace

void bind_class_pass(nb::module_& m) {
  m.def("has_bfloat16_class_pass", &has_bfloat16_unit);
  nb::class_<PackedClassPass>(m, "ClassPass")
      .def(nb::init<const FloatRows&, float, bool, bool, const std::optional<Floats>&, int64_t>(),
           nb::arg("features").noconvert(), nb::arg("logit_factor"), nb::arg("normalised"), nb::arg("bfloat16") = false,
           nb::arg("weights").noconvert() = nb::none(), nb::arg("centers") = 1)
      .def("forward", &PackedClassPass::forward, nb::arg("rows").noconvert(), nb::arg("target_rows").noconvert(),
           nb::arg("target_samples").noconvert(), nb::arg("target_out").noconvert(),
           nb::arg("shift").noconvert().none(), nb::arg("sum").noconvert(), nb::arg("weighted").noconvert().none(),
           nb::arg("kept").noconvert().none(), nb::arg("threads") = 1, nb::arg("offsets").noconvert() = nb::none(),
           nb::arg("row_sum").noconvert() = nb::none(), nb::arg("highest").noconvert() = nb::none())
      .def("overwrite", &PackedClassPass::overwrite, nb::arg("rows").noconvert(), nb::arg("target_rows").noconvert(),
           nb::arg("target_samples").noconvert(), nb::arg("log_sum").noconvert(), nb::arg("target_weight").noconvert(),
           nb::arg("kept").noconvert().none(), nb::arg("factor"), nb::arg("kept_exponentials") = false,
           nb::arg("threads") = 1, nb::arg("offsets").noconvert() = nb::none(),
           nb::arg("common").noconvert() = nb::none());
}

}  // namespace geartrain
