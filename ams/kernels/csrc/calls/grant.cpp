#include "calls/grant.hpp"

#include <time.h>

namespace geartrain {
namespace {

constexpr size_t kMaxKept = 16;
constexpr size_t kUnnamedSize = 32;  // length of the random name of a stream without a job: knowing it proves ownership

bool matches(std::string_view pattern, std::string_view text) {
  size_t p = 0, t = 0, star = std::string_view::npos, begun = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      begun = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p, ++t;
    } else if (star != std::string_view::npos) {  // let the last * match one more character
      p = star + 1;
      t = ++begun;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

}  // namespace

uint32_t Grant::rights(std::string_view table) const {
  uint32_t found = 0;
  for (const auto& [pattern, rights] : rules_)
    if (matches(pattern, table)) found |= rights;
  return found;
}

bool Grant::owns(std::string_view name) const {
  const bool is_unnamed =
      name.size() == kUnnamedSize && name.find_first_not_of("0123456789abcdef") == std::string_view::npos;
  return is_unnamed || matches(job_, name) || matches(of_job_, name);
}

bool Grant::is_over() const {
  if (has_ended_.load(std::memory_order_relaxed)) return true;
  timespec now{};
  clock_gettime(CLOCK_REALTIME_COARSE, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec) >= until_;
}

void Grant::refused(const std::string& table, uint32_t rights) {
  const std::lock_guard lock(mutex_);
  ++num_refused_;
  if (refused_.size() < kMaxKept) refused_.push_back({table, rights});
}

std::pair<std::vector<Grant::Refusal>, size_t> Grant::pop_refused() {
  const std::lock_guard lock(mutex_);
  return {std::exchange(refused_, {}), std::exchange(num_refused_, 0)};
}

}  // namespace geartrain
