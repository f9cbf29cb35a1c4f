#include "base/text.hpp"

#include <charconv>
#include <cmath>

namespace geartrain {
namespace {

// Not printf, which formats numbers by the locale of the process.
template <class... Format>
std::string written(double value, Format... format) {
  char buffer[512];  // the longest double in fixed notation has 309 digits before the point
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, value, format...).ptr};
}

}  // namespace

std::string quoted(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  const bool has_apostrophe = text.find('\'') != text.npos;
  const char quote = has_apostrophe && text.find('"') == text.npos ? '"' : '\'';
  std::string out(1, quote);
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == quote || c == '\\') {
      out += {'\\', c};
    } else if (c == '\n' || c == '\r' || c == '\t') {
      out += {'\\', c == '\n' ? 'n' : c == '\r' ? 'r' : 't'};
    } else if (code < 0x20 || code == 0x7f) {
      out += {'\\', 'x', kHex[code >> 4], kHex[code & 15]};
    } else {
      out += c;
    }
  }
  return out += quote;
}

std::string shown(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  const std::string scientific = written(value, std::chars_format::scientific);
  const int exponent = std::stoi(scientific.substr(scientific.find('e') + 1));
  if (exponent < -4 || exponent >= 16) return scientific;
  const std::string plain = written(value, std::chars_format::fixed);
  return plain.find('.') == plain.npos ? plain + ".0" : plain;
}

std::string fixed_point(double value, int digits) { return written(value, std::chars_format::fixed, digits); }

std::string six_digits(double value) { return written(value, std::chars_format::general, 6); }

}  // namespace geartrain
