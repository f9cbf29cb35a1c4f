// What it takes to look at the rights of one operation: prints the nanoseconds of a pull that does nothing, without and
// with it.
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>

#include "server/granted_handler.hpp"

using namespace geartrain;

struct Nothing : Handler {
  int64_t pull(const CallContext&, const std::string&, const PullRequest&, const Asker&) override { return 0; }
  void push(const CallContext&, const std::string&, const PushRequest&, const Asker&, Completion,
            PostPushRows*) override {}
  void assign(const CallContext&, const std::string&, const AssignRequest&, const Asker&, Completion) override {}
  void before_reply(bool) override {}
};

[[gnu::noinline]] double nanoseconds(Handler* handler) {
  constexpr int kCalls = 5'000'000;
  const std::string table = "ads-1/users";
  const CallContext context{};
  const PullRequest request{};
  const Asker asker{};
  const auto began = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) handler->pull(context, table, request, asker);
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - began).count() / kCalls;
}

int main() {
  const auto nothing = std::make_shared<Nothing>();
  GrantedHandler granted(nothing,
                         std::make_shared<Grant>("ads", std::vector<Grant::Rule>{{"faces/*", 1}, {"ads-*", 3}}, 4e9));
  for (int turn = 0; turn < 7; ++turn) {
    const double plain = nanoseconds(nothing.get());
    std::printf("%g %g\n", plain, nanoseconds(&granted));
  }
}
