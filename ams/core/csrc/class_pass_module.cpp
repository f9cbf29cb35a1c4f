#include <memory>
#include <new>
#include <optional>
#include <vector>

#include <nanobind/stl/optional.h>

#include "class_pass.hpp"
#include "module.hpp"

namespace geartrain {
namespace {

using FloatRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Memory of one thread that is used again, cache-line aligned: fresh pages would cost more than the arithmetic.
float* scratch_of(int64_t floats) {
  struct Free {
    void operator()(float* at) const { ::operator delete[](at, std::align_val_t{64}); }
  };
  thread_local std::unique_ptr<float[], Free> memory;
  thread_local int64_t size = 0;
  if (size < floats) {
    memory.reset();
    size = 0;
    memory.reset(static_cast<float*>(::operator new[](static_cast<size_t>(floats) * sizeof(float), std::align_val_t{64})));
    size = floats;
  }
  return memory.get();
}

// One batch, packed for the products; any number of threads may run it over chunks.
class PackedClassPass {
 public:
  PackedClassPass(const FloatRows& features, float logit_factor, bool normalised)
      : batch_(static_cast<int64_t>(features.shape(0))), dim_(static_cast<int64_t>(features.shape(1))), normalised_(normalised) {
    require(batch_ >= 1 && dim_ >= 1, "features must be [B, D], neither 0");
    query_.resize(static_cast<size_t>(class_pass().packed_size(dim_, batch_)));
    key_.resize(static_cast<size_t>(class_pass().packed_size(batch_, dim_)));
    class_pass().pack(features.data(), dim_, batch_, 1, dim_, logit_factor, query_.data());
    class_pass().pack(features.data(), batch_, dim_, dim_, 1, 1.0f, key_.data());
  }

  void forward(const FloatRows& rows, const IdArray& target_rows, const IdArray& target_samples, const FloatRows& target_out,
               const std::optional<Floats>& shift, const Doubles& sum, const std::optional<FloatRows>& weighted,
               const std::optional<FloatRows>& kept) const {
    require(static_cast<int64_t>(sum.size()) == batch_, "sum must be [B]");
    const ForwardChunk chunk{.rows = rows.data(),
                             .num_rows = checked_rows(rows),
                             .normalised = normalised_,
                             .targets = checked_targets(target_rows, target_samples, rows),
                             .target_rows = checked_batch(target_out),
                             .shift = shift ? checked_samples(*shift) : nullptr,
                             .sum = sum.data(),
                             .weighted = weighted ? checked_batch(*weighted) : nullptr,
                             .kept = kept ? checked_logits(*kept, rows) : nullptr};
    nb::gil_scoped_release release;
    FlushDenormals float_mode;
    class_pass().forward(view(), chunk, scratch_of(class_pass().scratch_size(dim_)));
  }

  float overwrite(const FloatRows& rows, const IdArray& target_rows, const IdArray& target_samples, const Floats& log_sum,
                 const Floats& target_weight, const std::optional<FloatRows>& kept, float factor,
                 bool kept_exponentials) const {
    const GradientChunk chunk{.rows = rows.data(),
                              .num_rows = checked_rows(rows),
                              .normalised = normalised_,
                              .targets = checked_targets(target_rows, target_samples, rows),
                              .log_sum = checked_samples(log_sum),
                              .target_weight = checked_samples(target_weight),
                              .kept = kept ? checked_logits(*kept, rows) : nullptr,
                              .kept_exponentials = kept_exponentials,
                              .factor = factor};
    nb::gil_scoped_release release;
    FlushDenormals float_mode;
    return class_pass().gradient(view(), chunk, scratch_of(class_pass().scratch_size(dim_)));
  }

 private:
  PackedBatch view() const { return {.batch = batch_, .dim = dim_, .query = query_.data(), .key = key_.data()}; }

  int64_t checked_rows(const FloatRows& rows) const {
    require(static_cast<int64_t>(rows.shape(1)) == dim_, "rows must be as wide as the features");
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
  float* checked_batch(const FloatRows& values) const {
    require(static_cast<int64_t>(values.shape(0)) == batch_ && static_cast<int64_t>(values.shape(1)) == dim_,
            "array must have the shape of the features");
    return values.data();
  }
  float* checked_samples(const Floats& values) const {
    require(static_cast<int64_t>(values.size()) == batch_, "array must be [B]");
    return values.data();
  }
  float* checked_logits(const FloatRows& kept, const FloatRows& rows) const {
    require(kept.shape(0) == rows.shape(0) && static_cast<int64_t>(kept.shape(1)) == batch_, "kept must be [N, B]");
    return kept.data();
  }

  int64_t batch_;
  int64_t dim_;
  bool normalised_;
  std::vector<float> query_;
  std::vector<float> key_;
};

}  // namespace

void bind_class_pass(nb::module_& m) {
  nb::class_<PackedClassPass>(m, "ClassPass")
      .def(nb::init<const FloatRows&, float, bool>(), nb::arg("features").noconvert(), nb::arg("logit_factor"),
           nb::arg("normalised"))
      .def("forward", &PackedClassPass::forward, nb::arg("rows").noconvert(), nb::arg("target_rows").noconvert(),
           nb::arg("target_samples").noconvert(), nb::arg("target_out").noconvert(), nb::arg("shift").noconvert().none(),
           nb::arg("sum").noconvert(), nb::arg("weighted").noconvert().none(), nb::arg("kept").noconvert().none())
      .def("overwrite", &PackedClassPass::overwrite, nb::arg("rows").noconvert(), nb::arg("target_rows").noconvert(),
           nb::arg("target_samples").noconvert(), nb::arg("log_sum").noconvert(), nb::arg("target_weight").noconvert(),
           nb::arg("kept").noconvert().none(), nb::arg("factor"),
           nb::arg("kept_exponentials") = false);
}

}  // namespace geartrain
