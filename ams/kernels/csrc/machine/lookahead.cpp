#include "machine/lookahead.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace geartrain {
namespace {

LookaheadWay choose_lookahead([[maybe_unused]] Use use) {
  const char* wish = std::getenv("GEARTRAIN_LOOKAHEAD");
  if (wish == nullptr || *wish == '\0') {
#if defined(__x86_64__)
    if (use == Use::read && __builtin_cpu_is("intel")) return LookaheadWay::window;
#endif
    return LookaheadWay::bursts;
  }
  for (LookaheadWay way : {LookaheadWay::bursts, LookaheadWay::window})
    if (std::string(wish) == lookahead_name(way)) return way;
  throw std::runtime_error(std::string("GEARTRAIN_LOOKAHEAD=") + wish + " is unknown; it must be bursts or window");
}

}  // namespace

LookaheadWay active_lookahead(Use use) {
  static const LookaheadWay of_reads = choose_lookahead(Use::read), of_updates = choose_lookahead(Use::update);
  return use == Use::read ? of_reads : of_updates;
}

const char* lookahead_name(LookaheadWay way) { return way == LookaheadWay::window ? "window" : "bursts"; }

}  // namespace geartrain
