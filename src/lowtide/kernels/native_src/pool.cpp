// A norm, relu and a pool in one sweep over maps in rows, and its backward: how the loops of pool.h are shared out over torch's
// threads. Sums are cut into blocks that do not depend on the number of threads. Python calls the extern "C" functions at the
// end, see native_pools.py.

#include <ATen/Parallel.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "task.h"

namespace {

using Loop = void (*)(const PoolWork&, int64_t begin, int64_t end);

struct Loops {
  Loop forward[2];  // [1]: max pool
  Loop max_sums, max_backward, average_backward;
};

#define LOOPS_OF(A) \
  {{pool_forward<A, false>, pool_forward<A, true>}, max_pool_sums<A>, max_pool_backward<A>, average_pool_backward<A>}
#define LOOPS_FILE "pool.h"
#include "levels.h"

// Below this many numbers a second thread costs more than it saves.
constexpr int64_t NUMBERS_PER_THREAD = 16384;

void share_out(const PoolWork& work, int64_t items, int64_t numbers_per_item, Loop loop) {
  const int64_t grain = std::max<int64_t>(1, NUMBERS_PER_THREAD / std::max<int64_t>(1, numbers_per_item));
  at::parallel_for(0, items, grain, [&](int64_t begin, int64_t end) { loop(work, begin, end); });
}

template <typename A>
void add_sums(const PoolTask& task, const double* partials, int64_t blocks) {
  const int64_t channels = task.channels;
  for (int64_t c = 0; c < channels; ++c) {
    double sum = 0, sum_x = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      sum += partials[2 * block * channels + c];
      sum_x += partials[(2 * block + 1) * channels + c];
    }
    static_cast<A*>(task.sums)[c] += static_cast<A>(sum);
    static_cast<A*>(task.sums_x)[c] += static_cast<A>(sum_x);
  }
}

void with_sums(const PoolTask& task, int64_t pooled, Loop loop) {
  const int64_t rows = task.images * pooled, rows_per_block = std::clamp<int64_t>(rows / 16, 64, 1024);
  const int64_t blocks = (rows + rows_per_block - 1) / rows_per_block;
  std::unique_ptr<double[]> partials(new double[2 * blocks * task.channels]());
  share_out(PoolWork{task, rows_per_block, partials.get()}, blocks, rows_per_block * task.channels, loop);
  task.x.dtype == F64 ? add_sums<double>(task, partials.get(), blocks) : add_sums<float>(task, partials.get(), blocks);
}

int64_t size_of(const int64_t* grid) { return grid[0] * grid[1] * grid[2]; }

}  // namespace

extern "C" {

int64_t lowtide_pool_task_bytes() { return sizeof(PoolTask); }

void lowtide_pool_forward(const PoolTask* task, int64_t is_max, int64_t level) {
  const Loop loop = loops_for(task->x.dtype == F64, level).forward[is_max];
  share_out(PoolWork{*task, 0, nullptr}, task->images * size_of(task->pooled), task->channels, loop);
}

void lowtide_max_pool_sums(const PoolTask* task, int64_t level) {
  with_sums(*task, size_of(task->pooled), loops_for(task->x.dtype == F64, level).max_sums);
}

void lowtide_max_pool_backward(const PoolTask* task, int64_t level) {
  const Loop loop = loops_for(task->x.dtype == F64, level).max_backward;
  share_out(PoolWork{*task, 0, nullptr}, task->images * size_of(task->grid), task->channels, loop);
}

void lowtide_average_pool_backward(const PoolTask* task, int64_t level) {
  with_sums(*task, size_of(task->pooled), loops_for(task->x.dtype == F64, level).average_backward);
}

}  // extern "C"
