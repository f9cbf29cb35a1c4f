#include <nanobind/nanobind.h>
NB_MODULE(_core, m) { m.doc() = "Row storage kernels of Geartrain."; }
