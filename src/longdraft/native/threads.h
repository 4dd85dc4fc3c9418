// Work shared out among the threads of torch's own OpenMP library: a second pool would fight with the first for the cores.
//
// The library is not linked. Python hands over its entry (longdraft_threads), so one compiled file serves whatever torch
// was built with, and any compiler will do.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

// void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags): libgomp's, which LLVM's and
// Intel's libraries have too.
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

// Null: everything runs on the calling thread.
extern Parallel parallel_entry;

// what(i) for i in [0, items). A thread that has done what it took takes a part of what is left, fewer and fewer items: so
// none waits for a slow one, and threads seldom meet, in the count or in the cache lines that neighbours write to.
template <typename What>
inline void share_out(int threads, std::int64_t items, const What &what) {
  threads = static_cast<int>(std::min<std::int64_t>(threads, items));
  if (threads <= 1 || !parallel_entry) {
    for (std::int64_t i = 0; i < items; i++) what(i);
    return;
  }
  struct Work {
    const What &what;
    const std::int64_t items, parts;
    std::atomic<std::int64_t> next;
  } work{what, items, 2 * threads, {0}};
  const auto run = [](void *data) {
    Work &own = *static_cast<Work *>(data);
    std::int64_t from = own.next.load(std::memory_order_relaxed);
    while (from < own.items) {
      const std::int64_t to = from + std::max<std::int64_t>(1, (own.items - from) / own.parts);
      if (!own.next.compare_exchange_weak(from, to, std::memory_order_relaxed)) continue;
      for (std::int64_t i = from; i < to; i++) own.what(i);
      from = own.next.load(std::memory_order_relaxed);
    }
  };
  parallel_entry(run, &work, static_cast<unsigned>(threads), 0);
}
