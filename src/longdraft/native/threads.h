// parallel_for on the threads of torch's OpenMP library, because a second thread pool would compete for the cores.
//
// The library is not linked: Python passes its entry point to longdraft_set_parallel_entry(), so a shared object works with any torch.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#include <sched.h>

// void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags) of libgomp; LLVM's and Intel's
// libraries have it too.
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

// Null: everything runs on the calling thread.
inline Parallel parallel_entry = nullptr;

// A parallel loop with guided scheduling: threads take shrinking parts of the remaining items. So no thread waits long for a slow one,
// and threads rarely contend for the counter or for cache lines of neighbouring results. An exception must not leave a thread, or
// pass OpenMP's frames: it ends the loop, and parallel_for throws the first one again.
template <typename F>
struct ParallelLoop {
  const F &f;
  const std::int64_t n_items, n_parts;
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;  // of the thread that has set `failed`

  static void run_items(void *work) try {
    ParallelLoop &loop = *static_cast<ParallelLoop *>(work);
    std::int64_t from = loop.next.load(std::memory_order_relaxed);
    while (from < loop.n_items) {
      const std::int64_t to = from + std::max<std::int64_t>(1, (loop.n_items - from) / loop.n_parts);
      if (!loop.next.compare_exchange_weak(from, to, std::memory_order_relaxed)) continue;
      for (std::int64_t i = from; i < to; i++) loop.f(i);
      from = loop.next.load(std::memory_order_relaxed);
    }
  } catch (...) {
    ParallelLoop &loop = *static_cast<ParallelLoop *>(work);
    if (!loop.failed.exchange(true)) loop.error = std::current_exception();
    loop.next.store(loop.n_items);
  }
};

// Threads that spin between many short loops, because starting threads takes longer than such a loop. The leader waits only for
// threads that have joined the loop, so a thread that the system does not schedule delays nothing.
class Team {
 public:
  // The team that this thread leads, or null.
  static inline thread_local Team *leading = nullptr;

  // Runs f() on this thread; the other threads join the parallel_for() loops inside f.
  template <typename F>
  static void with(int threads, const F &f) {
    if (threads <= 1 || !parallel_entry || leading) return f();
    struct Region {
      const F &f;
      Team team;
      std::exception_ptr error;
    } region{f, {}, {}};
    leading = &region.team;
    parallel_entry(
        [](void *data) {
          Region &region = *static_cast<Region *>(data);
          if (leading != &region.team) return region.team.run_loops();
          try {
            region.f();
          } catch (...) {
            region.error = std::current_exception();
          }
          region.team.finished_.store(true, std::memory_order_release);
        },
        &region, static_cast<unsigned>(threads), 0);
    leading = nullptr;
    if (region.error) std::rethrow_exception(region.error);
  }

  // Runs run_items(work) on this thread and on those that join.
  void run(void (*run_items)(void *), void *work) {
    run_items_ = run_items;
    work_ = work;
    const std::uint64_t generation = state_.load(std::memory_order_relaxed) / GENERATION + 1;
    state_.store(generation * GENERATION + OPEN, std::memory_order_release);
    run_items(work);
    state_.fetch_sub(OPEN, std::memory_order_acq_rel);
    for (Pause pause; state_.load(std::memory_order_acquire) % OPEN;) pause();
  }

 private:
  // state_: how many threads are in the loop (16 bits), whether more may join (OPEN), and the loop's number (GENERATION).
  static constexpr std::uint64_t OPEN = 1 << 16, GENERATION = 2 * OPEN;

  class Pause {
   public:
    void operator()() {
      if (++count_ > 2000) {  // waits long: gives the core to other threads
        sched_yield();
        return;
      }
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }

   private:
    int count_ = 0;
  };

  void run_loops() {
    std::uint64_t last = 0;
    for (Pause pause; !finished_.load(std::memory_order_acquire); pause()) {
      std::uint64_t state = state_.load(std::memory_order_acquire);
      if (!(state & OPEN) || state / GENERATION == last) continue;
      if (!state_.compare_exchange_strong(state, state + 1, std::memory_order_acq_rel)) continue;
      last = state / GENERATION;
      run_items_(work_);
      state_.fetch_sub(1, std::memory_order_release);
      pause = {};
    }
  }

  std::atomic<std::uint64_t> state_{0};
  std::atomic<bool> finished_{false};
  void (*run_items_)(void *) = nullptr;
  void *work_ = nullptr;
};

// Runs f(i) for i in [0, n_items) on several threads.
template <typename F>
inline void parallel_for(int threads, std::int64_t n_items, const F &f) {
  threads = static_cast<int>(std::min<std::int64_t>(threads, n_items));
  if (threads <= 1 || !parallel_entry) {
    for (std::int64_t i = 0; i < n_items; i++) f(i);
    return;
  }
  ParallelLoop<F> work{f, n_items, 2 * threads};
  if (Team::leading) {
    Team::leading->run(ParallelLoop<F>::run_items, &work);
  } else {
    parallel_entry(ParallelLoop<F>::run_items, &work, static_cast<unsigned>(threads), 0);
  }
  if (work.error) std::rethrow_exception(work.error);
}
