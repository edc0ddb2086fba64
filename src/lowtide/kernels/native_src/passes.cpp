// The native CPU provider: each pass of interface.py as one read and one write of memory.
//
// The loops (vector.h, planes.h, rows.h) are compiled here once per instruction set; this file shares them out over torch's own
// threads and adds up their sums. Python calls the extern "C" functions at the end, see native.py.

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

using Loop = void (*)(const Work&, int64_t begin, int64_t end);

// The loops of one instruction set and one type of arithmetic. The last index: 1 is the form with relu, or with a scale.
struct Loops {
  Loop scale_shift_act[3][2];  // by Form
  Loop act_backward_sums[2][2];
  Loop act_backward_accumulate[2][2];
  Loop affine_add[2][2];
  Loop moments[2];
};

#define BOTH(loop, A, ...) {loop<A, false, ##__VA_ARGS__>, loop<A, true, ##__VA_ARGS__>}
#define LOOPS_OF(A)                                                                                    \
  {                                                                                                    \
    {BOTH(planes_scale_shift_act, A), BOTH(rows_scale_shift_act, A),                                   \
     BOTH(planes_to_rows_scale_shift_act, A)},                                                         \
        {BOTH(planes_act_backward, A, false), BOTH(rows_act_backward, A, false)},                      \
        {BOTH(planes_act_backward, A, true), BOTH(rows_act_backward, A, true)},                        \
        {BOTH(planes_affine_add, A), BOTH(rows_affine_add, A)}, {planes_moments<A>, rows_moments<A>},  \
  }

#define LOOPS_FILE "elementwise.h"
#include "levels.h"

// Below this many numbers a second thread costs more than it saves.
constexpr int64_t NUMBERS_PER_THREAD = 16384;

void share_out(const Work& work, int64_t items, int64_t numbers_per_item, Loop loop) {
  const int64_t grain = std::max<int64_t>(1, NUMBERS_PER_THREAD / std::max<int64_t>(1, numbers_per_item));
  at::parallel_for(0, items, grain, [&](int64_t begin, int64_t end) { loop(work, begin, end); });
}

void without_sums(const Task& task, Loop loop) {
  const Work work{task, 0, nullptr, nullptr};
  if (task.form == PLANES) share_out(work, task.images * task.channels, task.positions, loop);
  if (task.form == ROWS) share_out(work, task.images * task.positions, task.channels, loop);
  if (task.form == PLANES_TO_ROWS) share_out(work, task.images * ((task.positions + 31) / 32), 32 * task.channels, loop);
}

// Runs a loop with sums; returns both sums of every channel, (2, C).
std::unique_ptr<double[]> with_sums(const Task& task, const double* pivots, Loop loop) {
  const int64_t both = 2 * task.channels, rows = task.images * task.positions;
  // ROWS: at least 16 blocks to share out where there are rows enough, and not so many that adding them up costs time
  const int64_t rows_per_block = std::clamp<int64_t>(rows / 16, 64, 1024);
  const int64_t blocks = task.form == PLANES ? 1 : (rows + rows_per_block - 1) / rows_per_block;
  std::unique_ptr<double[]> partials(new double[std::max<int64_t>(1, blocks) * both]());
  const Work work{task, rows_per_block, pivots, partials.get()};
  if (task.form == PLANES) {
    share_out(work, task.channels, rows, loop);
  } else {
    share_out(work, blocks, rows_per_block * task.channels, loop);
  }
  for (int64_t block = 1; block < blocks; ++block)
    for (int64_t i = 0; i < both; ++i) partials[i] += partials[block * both + i];
  return partials;
}

void put(const Task& task, void* vector, int64_t c, double value, bool add) {
  if (task.x.dtype == F64) {
    double& at = static_cast<double*>(vector)[c];
    at = add ? at + value : value;
  } else {
    float& at = static_cast<float*>(vector)[c];
    at = static_cast<float>(add ? at + value : value);
  }
}

void add_sums(const Task& task, Loop loop) {
  const auto sums = with_sums(task, nullptr, loop);
  for (int64_t c = 0; c < task.channels; ++c) {
    put(task, task.sums, c, sums[c], true);
    put(task, task.sums_x, c, sums[task.channels + c], true);
  }
}

double first_number(const Map& map, int64_t c) {
  const int64_t offset = c * map.stride_c;
  if (map.dtype == F64) return static_cast<const double*>(map.data)[offset];
  if (map.dtype == F32) return static_cast<const float*>(map.data)[offset];
  const uint16_t half = static_cast<const uint16_t*>(map.data)[offset];
  return map.dtype == BF16 ? c10::bit_cast<float>(static_cast<uint32_t>(half) << 16)
                           : c10::detail::fp16_ieee_to_fp32_value(half);
}

}  // namespace

extern "C" {

// The highest level that this processor can run: 0 baseline, 1 AVX2, 2 AVX-512.
int64_t lowtide_highest_level() {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return 2;
  return avx2 ? 1 : 0;
#else
  return 0;
#endif
}

int64_t lowtide_task_bytes() { return sizeof(Task); }

// Mean into task.sums, biased variance into task.sums_x.
void lowtide_batch_stats(const Task* task, int64_t level) {
  const int64_t channels = task->channels, count = task->images * task->positions;
  // Around a number near the mean nothing cancels. A channel's first number is near enough for floats summed in double;
  // doubles take a second round, around the mean of the first.
  std::unique_ptr<double[]> pivots(new double[channels]());
  for (int64_t c = 0; c < channels && count > 0; ++c) pivots[c] = first_number(task->x, c);
  for (int round = task->x.dtype == F64 ? 0 : 1; round < 2; ++round) {
    const auto sums = with_sums(*task, pivots.get(), loops_for(task->x.dtype == F64, level).moments[task->form]);
    for (int64_t c = 0; c < channels; ++c) {
      const double shift = sums[c] / count;  // of no numbers: 0 / 0 = NaN, as in torch
      const double variance = sums[channels + c] / count - shift * shift;
      pivots[c] += shift;
      put(*task, task->sums, c, pivots[c], false);
      put(*task, task->sums_x, c, variance < 0 ? 0 : variance, false);
    }
  }
}

void lowtide_scale_shift_act(const Task* task, int64_t level) {
  without_sums(*task, loops_for(task->x.dtype == F64, level).scale_shift_act[task->form][task->relu]);
}

void lowtide_act_backward_sums(const Task* task, int64_t level) {
  add_sums(*task, loops_for(task->x.dtype == F64, level).act_backward_sums[task->form][task->relu]);
}

void lowtide_act_backward_accumulate(const Task* task, int64_t level) {
  add_sums(*task, loops_for(task->x.dtype == F64, level).act_backward_accumulate[task->form][task->relu]);
}

void lowtide_affine_add(const Task* task, int64_t level) {
  without_sums(*task, loops_for(task->x.dtype == F64, level).affine_add[task->form][task->scale != nullptr]);
}

}  // extern "C"
