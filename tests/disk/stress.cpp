// The store under a sanitizer: threads that read and write at once, faults, stores that are dropped with requests under
// way, and waits that are given up. Arguments: a folder, rounds. Says what was wrong, and how many requests there were.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "io/store.h"
#include "io/system.h"

using namespace npuzero::io;

namespace {

constexpr size_t page = 4096;
std::atomic<int> requests{0}, wrong{0};

void expect(bool fine, const char* what) {
  if (!fine) {
    std::fprintf(stderr, "wrong: %s\n", what);
    ++wrong;
  }
}

struct Memory {
  explicit Memory(size_t bytes) : data(static_cast<std::byte*>(std::aligned_alloc(page, bytes))) {}
  ~Memory() { std::free(data); }
  std::byte* const data;
};

bool fine(const std::shared_ptr<Request>& request) {
  ++requests;
  request->wait([] { return false; });
  return !request->trouble();
}

// Writes and reads back an extent of its own, again and again.
void use(Store& store, int64_t offset, size_t bytes, int rounds, bool well) {
  const Memory out(bytes), in(bytes);
  for (int round = 0; round < rounds; ++round) {
    std::memset(out.data, round + 1, bytes);
    const bool written = fine(store.submit(Verb::write, offset, out.data, bytes));
    const bool read = fine(store.submit(Verb::read, offset, in.data, bytes));
    expect(!well || (written && read), "a request without faults");
    expect(!well || std::memcmp(out.data, in.data, bytes) == 0, "the bytes");
  }
}

void side_by_side(const std::vector<std::string>& folders, int rounds, bool well) {
  constexpr size_t bytes = (5 << 20) + 3 * page;
  constexpr int users = 4;
  Store store(folders, users * bytes, 3, true);
  std::vector<std::thread> threads;
  for (int user = 0; user < users; ++user) {
    threads.emplace_back(use, std::ref(store), user * static_cast<int64_t>(bytes), bytes, rounds, well);
  }
  for (std::thread& thread : threads) thread.join();
}

void dropped(const std::vector<std::string>& folders) {
  constexpr size_t bytes = 8 << 20;
  const Memory memory(bytes);
  std::memset(memory.data, 1, bytes);
  std::shared_ptr<Request> request;
  {
    Store store(folders, bytes, 2, true);
    request = store.submit(Verb::write, 0, memory.data, bytes);
    ++requests;
    request->wait([] { return true; });  // given up
  }
  expect(request->done() && !request->trouble(), "a request of a store that is dropped");
}

void closed(const std::vector<std::string>& folders) {
  const Memory memory(page);
  std::memset(memory.data, 1, page);
  Store store(folders, page, 2, true);
  std::thread closer([&store] { store.close(); });
  while (const auto request = store.submit(Verb::write, 0, memory.data, page)) fine(request);
  closer.join();
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  const std::vector<std::string> one{arguments[1]}, two{arguments[1], arguments[1]};
  const int rounds = std::atoi(arguments[2]);
  side_by_side(one, rounds, true);
  side_by_side(two, rounds, true);
  for (int round = 0; round < rounds; ++round) dropped(two);
  for (int round = 0; round < rounds; ++round) closed(one);
  inject({Call::read, 0, -1, 0, page, false});
  side_by_side(two, 1, true);
  heal();
  inject({Call::write, 5, 3, 5, 0, false});
  side_by_side(two, rounds, false);
  heal();
  std::printf("%d requests\n", requests.load());
  return wrong == 0 ? 0 : 1;
}
