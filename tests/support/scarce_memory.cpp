// Preloaded, it refuses memory to what is compiled in C++: to one thread by its name, from its n-th request on, so many
// times.
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

char thread_name[16];
std::atomic<long> granted{0}, refused{0};  // requests that are still granted, and then refused

bool is_refused() {
  if (refused.load() <= 0) return false;
  char own[16] = "";
  pthread_getname_np(pthread_self(), own, sizeof(own));
  if (std::strcmp(own, thread_name) != 0) return false;
  if (granted.fetch_sub(1) > 0) return false;
  return refused.fetch_sub(1) > 0;
}

void* taken(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

extern "C" void refuse_memory(const char* thread, long first, long count) {
  refused = 0;
  std::strncpy(thread_name, thread, sizeof(thread_name) - 1);
  granted = first;
  refused = count;
}

// How many requests are still to be refused.
extern "C" long still_to_refuse() { return refused; }

void* operator new(size_t bytes) { return taken(is_refused() ? nullptr : std::malloc(bytes)); }
void* operator new(size_t bytes, std::align_val_t to) {
  const size_t alignment = static_cast<size_t>(to);
  return taken(is_refused() ? nullptr : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
