// Optimizer of a table's rows, made from a name and numbers; registry.cpp lists all, and each has a file here. The
// Python classes of the same names (ams/values/optimizers) are their specification.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "values/kernels.hpp"

namespace geartrain {

// None has more than 3. With 4 Magnitudes are returned in memory: in registers, which 4 floats fit, they would be
// packed through it, a wait of some 5 ns a row.
inline constexpr int kMaxSlots = 4;

// Magnitudes of one row and its slots, or bounds of those of all rows.
struct Magnitudes {
  float row = 0;
  std::array<float, kMaxSlots> slots{};

  // Only the first `num_slots`: all at once would be one vector, which waits for the stores of its parts.
  void raise_to(const Magnitudes& other, int num_slots) {
    row = row < other.row ? other.row : row;
    for (size_t i = 0; i < static_cast<size_t>(num_slots); ++i)
      slots[i] = slots[i] < other.slots[i] ? other.slots[i] : slots[i];
  }
};

static_assert(sizeof(Magnitudes) > 16, "see kMaxSlots");

// Numbers of an optimizer by name; true is 1. All throw std::invalid_argument if a number is missing or out of range.
class OptimizerScalars {
 public:
  explicit OptimizerScalars(const std::map<std::string, double>& values) : values_(values) {}
  // Finite, and at least 0.
  double rate(const char* name) const;
  // In [0, 1).
  double decay(const char* name) const;
  // 0 or 1.
  bool flag(const char* name) const;
  // A normal float32 above 0.
  float epsilon(const char* name) const;

 private:
  double at(const char* name) const;

  const std::map<std::string, double>& values_;
};

// Momentum that also moves rows that a step does not touch.
struct Drift {
  float momentum, weight_decay;
};

// Stateless: threads may update different rows in parallel. Every slot of a row without updates is zero.
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  // At most kMaxSlots.
  virtual int num_slots() const = 0;
  // Number of the last slots that are one number a row. The others are as wide as the row.
  virtual int num_row_slots() const { return 0; }
  // Elements of all slots of a row of `dim`, and of one of them.
  size_t slot_dim(size_t dim) const {
    return static_cast<size_t>(num_slots() - num_row_slots()) * dim + num_row_slots();
  }
  size_t slot_dim(int slot, size_t dim) const { return slot < num_slots() - num_row_slots() ? dim : 1; }
  // Whether an update depends on how many the row had before.
  virtual bool counts_updates() const { return false; }
  // Whether slots may be stored in 16 bits.
  virtual bool takes_narrow_slots() const { return true; }
  // Drift of rows at steps that do not touch them, if any.
  virtual std::optional<Drift> drift() const { return std::nullopt; }

  // Update number `t` of a row, from 1, in float32 and in the order that the specification has: row [dim], slots
  // [slot_dim(dim)], one after the other, `push.scale` times the gradient. Returns the largest magnitudes after it,
  // before rounding to a storage type.
  virtual Magnitudes update(float* row, float* slots, const float* gradient, size_t dim, const PushFactors& push,
                            int64_t t) const = 0;

  // Bounds after any one update of rows of `dim` within `before` by gradients that, scaled, are at most `gradient`: an
  // update of one worst row. Each float32 step is monotone in the magnitudes, so what is finite here is finite
  // everywhere.
  virtual Magnitudes worst(float gradient, size_t dim, const PushFactors& push, const Magnitudes& before) const = 0;
};

// Throws std::invalid_argument for an unknown name, and for numbers that are missing or outside their range.
std::shared_ptr<Optimizer> make_optimizer(const std::string& name, const OptimizerScalars& scalars);
std::vector<std::string> optimizer_names();

}  // namespace geartrain
