// Formatting of values in error messages, as Python would write them.
#pragma once

#include <string>
#include <string_view>

namespace geartrain {

// As repr() of a str: in quotes, with escapes for control characters. Beyond ASCII, UTF-8 stays as it is.
std::string quoted(std::string_view text);
// As repr() of a float: the shortest decimal that reads back as the same value.
std::string shown(double value);
// As f"{value:.{digits}f}".
std::string fixed_point(double value, int digits);
// As f"{value:g}".
std::string six_digits(double value);

}  // namespace geartrain
