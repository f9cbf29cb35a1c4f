// The least that a call can cost: requests and replies of so many bytes between processes, and nothing done with them.
//
//   ping_pong CARRIER REQUEST_BYTES REPLY_BYTES CALLS CLIENTS CALLER_SPIN SERVER_SPIN
//
// CARRIER is shared_memory or tcp. One process serves CLIENTS others, each of which makes CALLS calls. Both sides
// copy a message out of what carries it, and a message begins with the number of its call, which the caller checks.
// Prints a line for each call of each client: the client and the nanoseconds since its call before was answered.
//
// shared_memory: a slot for each client, futexes; a side that waits spins for CALLER_SPIN or SERVER_SPIN microseconds
// first. tcp: blocking sockets (TCP_NODELAY) over loopback.
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

constexpr size_t kLine = 64;  // bytes of a cache line
using Word = std::atomic<uint32_t>;

struct Options {
  std::string carrier;
  size_t request_bytes, reply_bytes;
  long calls, clients;
  long caller_spin, server_spin;  // in microseconds
};

[[noreturn]] void fail(const char* what) {
  perror(what);
  _exit(1);
}

void check(bool good, const char* what) {
  if (!good) fail(what);
}

int64_t nanoseconds() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

void* shared_pages(size_t bytes) {
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  check(pages != MAP_FAILED, "mmap");
  return pages;
}

long futex(Word& word, int operation, uint32_t value) {
  return syscall(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
}

// A bell: whoever waits for `ready` spins, then says that it sleeps; whoever made it ready rings if it does.
struct alignas(kLine) Bell {
  Word asleep{0};

  // Spinning yields: the other side may need the very core that this one spins on.
  template <typename Ready>
  void wait(long spin_microseconds, Ready ready) {
    const int64_t end = nanoseconds() + spin_microseconds * 1000;
    while (!ready() && nanoseconds() < end) sched_yield();
    while (!ready()) {
      asleep.store(1);
      if (!ready()) futex(asleep, FUTEX_WAIT, 1);
      asleep.store(0);
    }
  }

  void ring() {
    // Sequentially consistent, as the stores around it: one of the two sides sees the other's.
    if (asleep.load() && asleep.exchange(0)) futex(asleep, FUTEX_WAKE, 1);
  }
};

// What one client and the server share: the number of the last call that was made and answered, then the messages.
struct Slot {
  alignas(kLine) Word asked{0};
  Bell caller;
  alignas(kLine) Word answered{0};

  static size_t whole_lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
  static size_t bytes(const Options& o) {
    return sizeof(Slot) + whole_lines(o.request_bytes) + whole_lines(o.reply_bytes);
  }
  char* request() { return reinterpret_cast<char*>(this + 1); }
  char* reply(const Options& o) { return request() + whole_lines(o.request_bytes); }
};

struct SharedMemory {
  const Options& o;
  Bell* server;
  char* slots;

  explicit SharedMemory(const Options& options) : o(options) {
    server = new (shared_pages(sizeof(Bell))) Bell;
    slots = static_cast<char*>(shared_pages(Slot::bytes(o) * o.clients));
    for (long i = 0; i < o.clients; ++i) new (&slot(i)) Slot;
  }
  Slot& slot(long i) { return *reinterpret_cast<Slot*>(slots + i * Slot::bytes(o)); }

  void serve() {
    std::vector<char> request(o.request_bytes), reply(o.reply_bytes);
    for (;;) {
      bool idle = true;
      for (long i = 0; i < o.clients; ++i) {
        Slot& s = slot(i);
        const uint32_t number = s.asked.load();
        if (number == s.answered.load(std::memory_order_relaxed)) continue;
        idle = false;
        memcpy(request.data(), s.request(), o.request_bytes);
        memcpy(reply.data(), request.data(), sizeof(uint64_t));
        memcpy(s.reply(o), reply.data(), o.reply_bytes);
        s.answered.store(number);
        s.caller.ring();
      }
      if (idle) server->wait(o.server_spin, [&] { return any_asked(); });
    }
  }
  bool any_asked() {
    for (long i = 0; i < o.clients; ++i)
      if (slot(i).asked.load() != slot(i).answered.load(std::memory_order_relaxed)) return true;
    return false;
  }

  void call(long client, char* request, char* reply, int64_t* took) {
    Slot& s = slot(client);
    int64_t before = nanoseconds();
    for (uint64_t number = 1; number <= static_cast<uint64_t>(o.calls); ++number) {
      memcpy(request, &number, sizeof number);
      memcpy(s.request(), request, o.request_bytes);
      s.asked.store(static_cast<uint32_t>(number));
      server->ring();
      s.caller.wait(o.caller_spin, [&] { return s.answered.load() == static_cast<uint32_t>(number); });
      memcpy(reply, s.reply(o), o.reply_bytes);
      check(memcmp(reply, &number, sizeof number) == 0, "a reply to another call");
      const int64_t now = nanoseconds();
      took[number - 1] = now - before;
      before = now;
    }
  }
};

struct Sockets {
  const Options& o;
  std::vector<std::pair<int, int>> ends;  // the server's and the client's, of each client

  explicit Sockets(const Options& options) : o(options) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* name = reinterpret_cast<sockaddr*>(&address);
    socklen_t length = sizeof address;
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    check(bind(listener, name, length) == 0 && listen(listener, 128) == 0, "listen");
    check(getsockname(listener, name, &length) == 0, "getsockname");
    for (long i = 0; i < o.clients; ++i) {
      const int client = socket(AF_INET, SOCK_STREAM, 0);
      check(connect(client, name, length) == 0, "connect");
      ends.emplace_back(accept(listener, nullptr, nullptr), client);
      const int yes = 1;
      for (const int end : {ends.back().first, client})
        check(setsockopt(end, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes) == 0, "TCP_NODELAY");
    }
    close(listener);
  }

  static void put(int end, const char* message, size_t bytes) {
    while (bytes > 0) {
      const ssize_t sent = send(end, message, bytes, MSG_NOSIGNAL);
      check(sent > 0, "send");
      message += sent, bytes -= sent;
    }
  }
  // False: the other side has closed before the first byte.
  static bool get(int end, char* message, size_t bytes) {
    const ssize_t got = recv(end, message, bytes, MSG_WAITALL);
    check(got == 0 || got == static_cast<ssize_t>(bytes), "recv");
    return got > 0;
  }

  void serve() {
    std::vector<char> request(o.request_bytes), reply(o.reply_bytes);
    std::vector<pollfd> waiting;
    for (const auto& [server, client] : ends) {
      close(client);
      waiting.push_back({server, POLLIN, 0});
    }
    for (size_t left = waiting.size(); left > 0;) {
      if (waiting.size() > 1) check(poll(waiting.data(), waiting.size(), -1) > 0, "poll");
      for (pollfd& end : waiting) {
        if (end.fd < 0 || (waiting.size() > 1 && end.revents == 0)) continue;
        if (get(end.fd, request.data(), request.size())) {
          memcpy(reply.data(), request.data(), sizeof(uint64_t));
          put(end.fd, reply.data(), reply.size());
        } else {
          end.fd = -1;
          --left;
        }
      }
    }
    pause();  // the parent ends the server, for one that ends by itself has failed
  }

  void call(long client, char* request, char* reply, int64_t* took) {
    const int end = ends[client].second;
    int64_t before = nanoseconds();
    for (uint64_t number = 1; number <= static_cast<uint64_t>(o.calls); ++number) {
      memcpy(request, &number, sizeof number);
      put(end, request, o.request_bytes);
      check(get(end, reply, o.reply_bytes), "the server has closed");
      check(memcmp(reply, &number, sizeof number) == 0, "a reply to another call");
      const int64_t now = nanoseconds();
      took[number - 1] = now - before;
      before = now;
    }
  }
  void keep_only(long client) {
    for (long i = 0; i < o.clients; ++i) {
      close(ends[i].first);
      if (i != client) close(ends[i].second);
    }
  }
};

template <typename Body>
pid_t child(Body body) {
  const pid_t process = fork();
  check(process >= 0, "fork");
  if (process > 0) return process;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  body();
  _exit(0);
}

// Clients begin when all of them are there. Any process that ends otherwise than well ends the run.
template <typename Carrier>
void run(const Options& o, Carrier carrier) {
  auto* took = static_cast<int64_t*>(shared_pages(sizeof(int64_t) * o.calls * o.clients));
  auto* ready = new (shared_pages(sizeof(Word))) Word{0};
  const pid_t server = child([&] { carrier.serve(); });
  std::vector<pid_t> processes{server};
  for (long i = 0; i < o.clients; ++i) {
    processes.push_back(child([&] {
      if constexpr (std::is_same_v<Carrier, Sockets>) carrier.keep_only(i);
      std::vector<char> request(o.request_bytes), reply(o.reply_bytes);
      ready->fetch_add(1);
      while (ready->load() < o.clients) sched_yield();
      carrier.call(i, request.data(), reply.data(), took + i * o.calls);
    }));
  }
  bool good = true;
  for (long left = o.clients; left > 0 && good; --left) {
    int status = 0;
    const pid_t ended = wait(&status);
    good = ended > 0 && ended != server && status == 0;
  }
  for (const pid_t process : processes) kill(process, SIGKILL);
  while (wait(nullptr) > 0) continue;
  if (!good) exit(1);
  for (long i = 0; i < o.clients; ++i)
    for (long j = 0; j < o.calls; ++j) printf("%ld %ld\n", i, static_cast<long>(took[i * o.calls + j]));
}

}  // namespace

int main(int count, char** words) {
  if (count != 8) return fprintf(stderr, "arguments: see the head of ping_pong.cpp\n"), 2;
  const Options o{words[1], strtoul(words[2], nullptr, 10), strtoul(words[3], nullptr, 10), atol(words[4]),
                  atol(words[5]), atol(words[6]), atol(words[7])};
  o.carrier == "shared_memory" ? run(o, SharedMemory(o)) : run(o, Sockets(o));
}
