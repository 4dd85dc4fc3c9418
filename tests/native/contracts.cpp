// What the kernels' headers promise about exceptions, memory and arguments, run under sanitizers by test_contracts.py.
#include "kernels.h"
#include "threads.h"
#include "vectors.h"

#include <csignal>
#include <cstdio>
#include <stdexcept>

#include <sys/resource.h>
#include <sys/wait.h>

extern "C" void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned);

namespace {

int failures = 0;

void expect(bool holds, const char *what) {
  if (!holds) std::printf("not so: %s\n", what), failures++;
}

// An item of a loop on several threads throws: the caller gets that exception, whatever its type.
void exceptions_reach_the_caller() {
  for (bool in_team : {false, true}) {
    int caught = 0;
    const auto loop = [&] { parallel_for(2, 100, [](std::int64_t i) { if (i == 70) throw std::length_error("70"); }); };
    try {
      in_team ? Team::with(2, loop) : loop();
    } catch (const std::length_error &) {
      caught++;
    }
    expect(caught == 1, in_team ? "an exception passes a team" : "an exception passes a loop");
    std::atomic<std::int64_t> sum{0};
    parallel_for(2, 100, [&](std::int64_t i) { sum += i; });
    expect(sum == 4950, "loops work after an exception");
  }
}

Status throws(int kind) try {
  if (kind == 0) throw std::bad_alloc();
  if (kind == 1) throw std::out_of_range("");
  if (kind == 2) check(INVALID_ARGUMENT);
  return OK;
} CATCH_EXCEPTIONS

void exceptions_become_statuses() {
  expect(throws(0) == OUT_OF_MEMORY && throws(1) == INTERNAL_ERROR && throws(2) == INVALID_ARGUMENT && throws(3) == OK, "statuses");
}

// A long prompt's buffer is given back after many small requests, and only then.
void scratch_shrinks() {
  Scratch scratch;
  const float *large = scratch.get(4 << 20);
  for (int i = 0; i < 100; i++) expect(scratch.get(1000) == large, "a few small requests keep the buffer");
  expect(scratch.get(2 << 20) == large, "half of the buffer is no small request");
  for (int i = 0; i < 5000; i++) scratch.get(1000)[999] = 1;
#if defined(__SANITIZE_ADDRESS__)
  expect(scratch.get(1000) != large, "many small requests give the buffer back");
#endif
  scratch.get(4 << 20)[(4 << 20) - 1] = 1;
}

// A number that a dispatch does not know ends the process, because going on would leave outputs unwritten.
template <typename F>
bool traps(const F &f) {
  const pid_t child = fork();
  if (child == 0) {
    const rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    for (int signal : {SIGILL, SIGTRAP}) std::signal(signal, SIG_DFL);
    f();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) && (WTERMSIG(status) == SIGILL || WTERMSIG(status) == SIGTRAP);
}

void unknown_numbers_trap() {
  expect(traps([] { dispatch<4>(5, [](auto) {}); }) && traps([] { dispatch<4, 2>(1, [](auto) {}); }), "a dispatch traps");
  expect(!traps([] { dispatch<4, 2>(2, [](auto) {}); }), "a number in range does not trap");
}

}  // namespace

int main() {
  parallel_entry = GOMP_parallel;
  unknown_numbers_trap();  // forks, so before threads are started
  exceptions_reach_the_caller();
  exceptions_become_statuses();
  scratch_shrinks();
  return failures;
}
