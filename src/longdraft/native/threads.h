// Shares work among the threads of torch's own OpenMP library, since a second pool would compete for the cores.
//
// The library is not linked. Python passes its entry to longdraft_threads, so one compiled file works with any build of torch and
// any compiler.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

#include <sched.h>

// void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags) of libgomp; LLVM's and Intel's
// libraries have it too.
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

// If null, everything runs on the calling thread.
inline Parallel parallel_entry = nullptr;

// A loop that threads share: each takes a part of the remaining items, fewer and fewer, until none are left. So no thread waits
// for a slow one, and threads rarely contend for the counter or for cache lines of neighbouring results. An exception would end
// the process where it left a thread or OpenMP's frames: it is noted, ends the loop, and is thrown anew where that began.
template <typename What>
struct Work {
  const What &what;
  const std::int64_t items, parts;
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};

  static void take(void *work) try {
    Work &own = *static_cast<Work *>(work);
    std::int64_t from = own.next.load(std::memory_order_relaxed);
    while (from < own.items) {
      const std::int64_t to = from + std::max<std::int64_t>(1, (own.items - from) / own.parts);
      if (!own.next.compare_exchange_weak(from, to, std::memory_order_relaxed)) continue;
      for (std::int64_t i = from; i < to; i++) own.what(i);
      from = own.next.load(std::memory_order_relaxed);
    }
  } catch (const std::bad_alloc &) {
    Work &own = *static_cast<Work *>(work);
    own.failed.store(true);
    own.next.store(own.items);
  }
};

// Threads that stay active for many short loops, because starting them for each takes longer than the loop. The leader never
// waits for a thread that has not joined a loop, so a thread that the system does not run delays nothing.
class Team {
 public:
  // The team that this thread leads.
  static inline thread_local Team *led = nullptr;

  // Runs what() on this thread, with the other threads ready for every share_out() inside.
  template <typename What>
  static void with(int threads, const What &what) {
    if (threads <= 1 || !parallel_entry || led) return what();
    struct Start {
      const What &what;
      Team team;
      bool failed = false;
    } start{what, {}};
    led = &start.team;
    parallel_entry(
        [](void *data) {
          Start &own = *static_cast<Start *>(data);
          if (led != &own.team) return own.team.follow();
          try {
            own.what();
          } catch (const std::bad_alloc &) {
            own.failed = true;
          }
          own.team.over_.store(true, std::memory_order_release);
        },
        &start, static_cast<unsigned>(threads), 0);
    led = nullptr;
    if (start.failed) throw std::bad_alloc();
  }

  // Runs take(work) on this thread and on those that join.
  void run(void (*take)(void *), void *work) {
    take_ = take;
    work_ = work;
    const std::uint64_t number = state_.load(std::memory_order_relaxed) / NUMBER + 1;
    state_.store(number * NUMBER + OPEN, std::memory_order_release);
    take(work);
    state_.fetch_sub(OPEN, std::memory_order_acq_rel);
    for (Pause pause; state_.load(std::memory_order_acquire) % OPEN;) pause();
  }

 private:
  // The state holds how many threads have joined the loop, whether more may join, and the loop's number.
  static constexpr std::uint64_t OPEN = 1 << 16, NUMBER = 2 * OPEN;

  class Pause {
   public:
    void operator()() {
      if (++count_ > 2000) {
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

  void follow() {
    std::uint64_t last = 0;
    for (Pause pause; !over_.load(std::memory_order_acquire); pause()) {
      std::uint64_t state = state_.load(std::memory_order_acquire);
      if (!(state & OPEN) || state / NUMBER == last) continue;
      if (!state_.compare_exchange_strong(state, state + 1, std::memory_order_acq_rel)) continue;
      last = state / NUMBER;
      take_(work_);
      state_.fetch_sub(1, std::memory_order_release);
      pause = {};
    }
  }

  std::atomic<std::uint64_t> state_{0};
  std::atomic<bool> over_{false};
  void (*take_)(void *) = nullptr;
  void *work_ = nullptr;
};

// Runs what(i) for i in [0, items) on several threads.
template <typename What>
inline void share_out(int threads, std::int64_t items, const What &what) {
  threads = static_cast<int>(std::min<std::int64_t>(threads, items));
  if (threads <= 1 || !parallel_entry) {
    for (std::int64_t i = 0; i < items; i++) what(i);
    return;
  }
  Work<What> work{what, items, 2 * threads};
  if (Team::led) {
    Team::led->run(Work<What>::take, &work);
  } else {
    parallel_entry(Work<What>::take, &work, static_cast<unsigned>(threads), 0);
  }
  if (work.failed) throw std::bad_alloc();
}
