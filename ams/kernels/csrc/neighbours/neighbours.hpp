// Selection of the active classes of a step from a table of nearest neighbours; reference.py is the specification.
#pragma once

#include <cstdint>

namespace geartrain {

// The neighbours of class i are ids[offsets[i]] .. ids[offsets[i + 1] - 1], best first.
template <class Id>
struct NeighbourLists {
  const int64_t* offsets;  // [num_classes + 1]
  const Id* ids;           // [num_ids]
  int64_t num_classes;
  int64_t num_ids;
};

enum class SelectFault : int { none = 0, label = 1, table = 2 };

struct Selected {
  int64_t count;  // number of classes written; with a fault: first offending place in labels
  SelectFault fault;
};

// Writes the chosen classes to `out`, ascending: max(min(budget, num_classes), distinct labels) of them, for which
// there is room. O(budget + labels) plus sorting; O(num_classes) only if as many are chosen.
template <class Id>
Selected select_neighbours(const NeighbourLists<Id>& table, const int64_t* labels, int64_t num_labels, int64_t budget,
                           uint64_t seed, uint64_t step, int64_t* out);

}  // namespace geartrain
