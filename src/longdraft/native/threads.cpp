// The entry of torch's OpenMP library, which Python passes in once.
#include "threads.h"

#include "kernels.h"

Parallel parallel_entry = nullptr;

void longdraft_threads(Parallel entry) { parallel_entry = entry; }
