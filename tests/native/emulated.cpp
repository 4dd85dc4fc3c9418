// Calls the kernels of another processor under an emulator, on the memory of the process that asks for it.
//
// What a kernel touches and is not there is the asking process's: its page is fetched when it is first touched, kept at the
// same address while the kernel runs, and sent back behind it. So this file knows nothing of what the kernels take.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

using std::int64_t;

namespace {

// As in emulated.py.
constexpr std::intptr_t PAGE = 4096;
constexpr int INTS = 24, FLOATS = 4;

struct Call {
  char name[32];
  int64_t ints[INTS];  // and pointers
  float floats[FLOATS];
};

constexpr int MOST = 1 << 15;  // pages that one call may touch
char *pages[MOST];
int64_t count = 0;

void hear(void *to, std::intptr_t size) {
  for (char *p = static_cast<char *>(to); size > 0;) {
    const std::intptr_t got = read(STDIN_FILENO, p, size);
    if (got <= 0) _exit(got < 0);
    p += got, size -= got;
  }
}

void say(const void *from, std::intptr_t size) {
  for (const char *p = static_cast<const char *>(from); size > 0;) {
    const std::intptr_t put = write(STDOUT_FILENO, p, size);
    if (put <= 0) _exit(1);
    p += put, size -= put;
  }
}

void fetch(int, siginfo_t *fault, void *) {
  char *page = reinterpret_cast<char *>(reinterpret_cast<std::intptr_t>(fault->si_addr) / PAGE * PAGE);
  void *place = mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (place != page || count == MOST) _exit(2);
  say(&page, sizeof page);
  hear(page, PAGE);
  pages[count++] = page;
}

// Whole numbers and floats go in registers of their own, and what is left of the former on the stack, a word each: so one
// call serves all signatures.
template <std::size_t... I, std::size_t... F>
int64_t call(void *function, const Call &c, std::index_sequence<I...>, std::index_sequence<F...>) {
  typedef int64_t Any(decltype(I, int64_t{})..., decltype(F, float{})...);
  return reinterpret_cast<Any *>(function)(c.ints[I]..., c.floats[F]...);
}

}  // namespace

int main(int, char **arguments) {
  void *library = dlopen(arguments[1], RTLD_NOW);
  if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  struct sigaction action = {};
  action.sa_sigaction = fetch;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  for (Call c;;) {
    hear(&c, sizeof c);
    void *function = dlsym(library, c.name);
    const auto result = call(function, c, std::make_index_sequence<INTS>{}, std::make_index_sequence<FLOATS>{});
    const int64_t done[] = {0, result, count};  // 0: no page
    say(done, sizeof done);
    while (count > 0) {
      char *page = pages[--count];
      say(&page, sizeof page);
      say(page, PAGE);
      munmap(page, PAGE);
    }
  }
}
