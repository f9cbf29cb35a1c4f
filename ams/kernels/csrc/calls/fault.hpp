// What went wrong, as a Fault, also where there is no memory left to word it.
#pragma once

#include <string>

#include "calls/call.hpp"

namespace geartrain {

// The fault that the exception in flight is, of whatever kind. Called in a catch block.
Fault fault_in_flight(const std::string& of_whom) noexcept;

}  // namespace geartrain
