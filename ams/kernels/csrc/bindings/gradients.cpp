#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>
#include <vector>

#include "gradients/top_k.hpp"
#include "bindings/module.hpp"

namespace geartrain {
namespace {

using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Indices = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AnyVector = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Keeps the arrays of a call alive: their list may be changed meanwhile.
struct HeldTensors {
  std::vector<Floats> floats;
  std::vector<AnyVector> gradients;
  std::vector<SweptTensor> swept;
  int64_t num_selected = 0;
};

Floats held_floats(const nb::handle& given, int64_t numel, HeldTensors& held) {
  held.floats.push_back(nb::cast<Floats>(given, false));
  require(numel < 0 || static_cast<int64_t>(held.floats.back().size()) == numel,
          "a velocity is not as long as its residual");
  return held.floats.back();
}

HeldTensors held_tensors(const nb::list& residuals, const nb::list& velocities, const nb::list& gradients,
                         const std::vector<int>& dtype_codes, const std::vector<int64_t>& ks) {
  const size_t count = residuals.size();
  require(ks.size() == count && velocities.size() == gradients.size() && dtype_codes.size() == gradients.size() &&
              (gradients.size() == count || gradients.size() == 0),
          "lists differ in length");
  HeldTensors held;
  for (size_t number = 0; number < count; ++number) {
    const Floats residual = held_floats(residuals[number], -1, held);
    SweptTensor tensor{.values = residual.data(), .numel = static_cast<int64_t>(residual.size()), .k = ks[number]};
    require(tensor.numel <= std::numeric_limits<int32_t>::max() && tensor.k >= 0 && tensor.k <= tensor.numel,
            "it must hold that 0 <= k <= numel < 2**31");
    if (gradients.size() != 0) {
      held.gradients.push_back(nb::cast<AnyVector>(gradients[number], false));
      const AnyVector& gradient = held.gradients.back();
      require(static_cast<int64_t>(gradient.size()) == tensor.numel, "a gradient is not as long as its residual");
      tensor.gradient_dtype = checked_dtype(gradient, dtype_codes[number]);
      tensor.gradient = gradient.data();
      tensor.velocity = held_floats(velocities[number], tensor.numel, held).data();
    }
    held.swept.push_back(tensor);
    held.num_selected += tensor.k;
  }
  return held;
}

// NaN and infinity are larger than any number: a tensor with one has it among its largest.
int64_t owner_of_not_finite(const std::vector<SweptTensor>& tensors, const float* largest) {
  for (size_t number = 0; number < tensors.size(); ++number)
    for (int64_t i = 0; i < tensors[number].k; ++i)
      if (!std::isfinite(*largest++)) return static_cast<int64_t>(number);
  return -1;
}

// Returns the number of the first tensor that is not finite, or -1.
int64_t take_largest_checked(const nb::list& residuals, const nb::list& velocities, const nb::list& gradients,
                             const std::vector<int>& dtype_codes, const std::vector<int64_t>& ks, float momentum,
                             float scale, bool nesterov, const Floats& estimates, const Indices& indices,
                             const Floats& values, int64_t threads) {
  const HeldTensors held = held_tensors(residuals, velocities, gradients, dtype_codes, ks);
  require(estimates.size() == ks.size(), "estimates must be as many as tensors");
  require(static_cast<int64_t>(indices.size()) == held.num_selected && indices.size() == values.size(),
          "indices and values must be as long as all k together");
  require(threads >= 1, "threads must be >= 1");
  const Accumulation step{.momentum = momentum, .scale = scale, .nesterov = nesterov};
  WithoutInterpreter release;
  take_largest(held.swept, step, estimates.data(), indices.data(), values.data(), threads);
  return owner_of_not_finite(held.swept, values.data());
}

}  // namespace

void bind_gradients(nb::module_& m) {
  m.def("take_largest", &take_largest_checked, nb::arg("residuals"), nb::arg("velocities"), nb::arg("gradients"),
        nb::arg("dtype_codes"), nb::arg("ks"), nb::arg("momentum"), nb::arg("scale"), nb::arg("nesterov"),
        nb::arg("estimates").noconvert(), nb::arg("indices").noconvert(), nb::arg("values").noconvert(),
        nb::arg("threads"));
}

}  // namespace geartrain
