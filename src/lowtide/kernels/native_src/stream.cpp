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
  int64_t ring_rows, widest, levels, tile, ramp, is_double;
  int64_t* position;          // the time of the first sample; T is added to it at the end
  const void* u;              // (T, B, H)
  void* y;                    // (T, B, C, H)
  void* ring;                 // (ring_rows, B, H)
  void* lines;                // (1 or 2 times widest - 1, B, C, H)
  const int64_t* offsets;     // (cells,)
  const int64_t* level_ends;  // (levels,)
  const void* coefficients;   // (cells, 1 or 2, C, H)
};

namespace {

struct Loops {
  int64_t width;  // columns in a block
  void (*run[2])(const Stream&, int64_t begin, int64_t end);  // [1]: with ramps
};

#define LOOPS_OF(A) {block_width<A>, {stream_blocks<A, false>, stream_blocks<A, true>}}

#define LOOPS_FILE "cascade.h"
#include "levels.h"

// Multiply-adds below which a second thread costs more than it saves.
constexpr int64_t WORK_PER_THREAD = 65536;

}  // namespace

extern "C" {

int64_t lowtide_stream_bytes() { return sizeof(Stream); }

void lowtide_stream_cascade(const Stream* task, int64_t level) {
  const Loops& loops = loops_for(task->is_double, level);
  const int64_t per_row = (task->features + loops.width - 1) / loops.width;
  const int64_t cells = task->level_ends[task->levels - 1] * (task->ramp ? 2 : 1);
  const int64_t work = task->samples * task->outputs * cells * std::min(loops.width, task->features);
  const int64_t grain = std::max<int64_t>(1, WORK_PER_THREAD / work);
  at::parallel_for(0, task->batch * per_row, grain,
                   [&](int64_t begin, int64_t end) { loops.run[task->ramp](*task, begin, end); });
  *task->position += task->samples;
}

}  // extern "C"
