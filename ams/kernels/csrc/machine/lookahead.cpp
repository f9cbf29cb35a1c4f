#include "machine/lookahead.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace geartrain {
namespace {

LookaheadWay choose_lookahead() {
  const char* wish = std::getenv("GEARTRAIN_LOOKAHEAD");
  if (wish == nullptr || *wish == '\0') {
#if defined(__x86_64__)
    if (__builtin_cpu_is("intel")) return LookaheadWay::window;
#endif
    return LookaheadWay::bursts;
  }
  for (LookaheadWay way : {LookaheadWay::bursts, LookaheadWay::window})
    if (std::string(wish) == lookahead_name(way)) return way;
  throw std::runtime_error(std::string("GEARTRAIN_LOOKAHEAD=") + wish + " is unknown; it must be bursts or window");
}

}  // namespace

LookaheadWay active_lookahead() {
  static const LookaheadWay way = choose_lookahead();
  return way;
}

const char* lookahead_name(LookaheadWay way) { return way == LookaheadWay::window ? "window" : "bursts"; }

}  // namespace geartrain
