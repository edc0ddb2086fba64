// The cascade that streams a kernel of cells, see lean/stream_cascade.py: loops in cascade.h, one compilation per instruction set.

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

// What the Python side hands over, field by field as in kernels/stream.py. All tensors are contiguous and of one type.
struct Stream {
  int64_t samples, batch, outputs, features;  // T, B, C, H
  int64_t position;                           // of the first sample
  int64_t ring_rows, widest, levels, tile, ramp, is_double;
  const void* u;              // (T, B, H)
  void* y;                    // (T, B, C, H)
  void* ring;                 // (ring_rows, B, H)
  void* lines;                // (1 or 2 times widest - 1, B, C, H)
  const int64_t* offsets;     // (cells,)
  const int64_t* level_ends;  // (levels,)
  const void* coefficients;   // (cells, 1 or 2, C, H)
};

namespace {

struct Blocks {
  int64_t width;  // columns in a block
  void (*run[2])(const Stream&, int64_t begin, int64_t end);  // [1]: with ramps
};

#define BLOCKS_OF(A) {block_width<A>, {stream_blocks<A, false>, stream_blocks<A, true>}}

namespace baseline {
#define LANE_BYTES 16
#include "vector.h"
#include "cascade.h"
#undef LANE_BYTES
const Blocks blocks[] = {BLOCKS_OF(float), BLOCKS_OF(double)};
}  // namespace baseline

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#define LANE_BYTES 32
#include "vector.h"
#include "cascade.h"
#undef LANE_BYTES
const Blocks blocks[] = {BLOCKS_OF(float), BLOCKS_OF(double)};
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace avx512 {
#define LANE_BYTES 64
#include "vector.h"
#include "cascade.h"
#undef LANE_BYTES
const Blocks blocks[] = {BLOCKS_OF(float), BLOCKS_OF(double)};
}  // namespace avx512
#pragma GCC pop_options
#endif

const Blocks& blocks_for(const Stream& task, int64_t level) {
#if defined(__x86_64__)
  if (level == 2) return avx512::blocks[task.is_double];
  if (level == 1) return avx2::blocks[task.is_double];
#endif
  return baseline::blocks[task.is_double];
}

// Multiply-adds below which a second thread costs more than it saves.
constexpr int64_t WORK_PER_THREAD = 65536;

}  // namespace

extern "C" {

int64_t lowtide_stream_bytes() { return sizeof(Stream); }

void lowtide_stream_cascade(const Stream* task, int64_t level) {
  const Blocks& blocks = blocks_for(*task, level);
  const int64_t per_row = (task->features + blocks.width - 1) / blocks.width;
  const int64_t cells = task->level_ends[task->levels - 1] * (task->ramp ? 2 : 1);
  const int64_t work = task->samples * task->outputs * cells * std::min(blocks.width, task->features);
  const int64_t grain = std::max<int64_t>(1, WORK_PER_THREAD / work);
  at::parallel_for(0, task->batch * per_row, grain,
                   [&](int64_t begin, int64_t end) { blocks.run[task->ramp](*task, begin, end); });
}

}  // extern "C"
