// What the binding files share: the arrays they accept and how a refusal becomes a Python exception.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

#include "base/common.hpp"
#include "python/interpreter.hpp"

namespace geartrain {

namespace nb = nanobind;

using IdArray = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IdOutput = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MatrixOutput = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ShardMap = nb::ndarray<const uint16_t, nb::shape<kNumBuckets>, nb::c_contig, nb::device::cpu>;  // of each bucket

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// float16 and bfloat16 arrays come as uint16 views: numpy has no bfloat16 of its own.
template <class Array>
DType checked_dtype(const Array& array, int code) {
  require(code >= 0 && code < kNumDTypes, "dtype code must be 0 (float32), 1 (float16) or 2 (bfloat16)");
  const DType dtype = static_cast<DType>(code);
  const auto expected = dtype == DType::float32 ? nb::dtype<float>() : nb::dtype<uint16_t>();
  require(array.dtype() == expected, "array must be float32, or uint16 for the half types");
  return dtype;
}

void bind_carriers(nb::module_& m);
void bind_fault(nb::module_& m);
void bind_gradients(nb::module_& m);
void bind_frames(nb::module_& m);
void bind_row_store(nb::module_& m);
void bind_given_rows(nb::module_& m);
void bind_class_pass(nb::module_& m);
void bind_neighbours(nb::module_& m);
void bind_neighbour_recall(nb::module_& m);
void bind_position_lru(nb::module_& m);
void bind_lookup(nb::module_& m);
void bind_rows_client(nb::module_& m);
void bind_turn(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_exercise(nb::module_& m);
void bind_engine_state(nb::module_& m);
void bind_sync_groups(nb::module_& m);

}  // namespace geartrain
