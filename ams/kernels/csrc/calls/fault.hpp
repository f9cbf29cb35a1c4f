// Conversion of exceptions to Faults, which works without free memory.
#pragma once

#include <string>

#include "calls/call.hpp"

namespace geartrain {

// Returns the Fault of the exception in flight, of any kind. Called in a catch block.
Fault fault_in_flight(const std::string& of_whom) noexcept;

}  // namespace geartrain
