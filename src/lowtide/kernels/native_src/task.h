// What the Python side hands over: one struct for every pass. Mirrored field by field in native_tasks.py and native_pools.py.
#pragma once
#include <cstdint>

// Storage of a map. The arithmetic is in float for all but F64, which is in double.
enum DType : int64_t { F32 = 0, F64 = 1, BF16 = 2, F16 = 3 };

// A map (N, C, S). Strides count elements.
struct Map {
  void* data;
  int64_t dtype;
  int64_t stride_n;
  int64_t stride_c;
  int64_t stride_s;
};

// PLANES: the positions of a channel are neighbours (stride_s == 1). ROWS: the channels of a position are (stride_c == 1).
// PLANES_TO_ROWS: x is in planes, out in rows.
enum Form : int64_t { PLANES = 0, ROWS = 1, PLANES_TO_ROWS = 2 };

struct Task {
  int64_t images, channels, positions;  // N, C, S
  int64_t form;
  int64_t relu;       // 0: identity
  Map x;              // the map that is read
  Map grad;           // the gradient that is read, or changed in place
  Map out;            // the tile that is written, or the buffer that is added to
  const void* scale;  // vectors (C,): float, or double beside F64 maps; null where the pass allows it
  const void* shift;
  const void* mean;
  void* sums;  // results (C,)
  void* sums_x;
};

// What the loops of one pass share.
struct Work {
  const Task& task;
  int64_t rows_per_block;   // ROWS: the unit that the passes with sums are shared out in
  const double* pivots;     // (C,), batch_stats: what is subtracted before summing
  double* partials;         // (blocks, 2, C): both sums of every block; PLANES: one block, each thread fills its channels
};

// A norm, relu and a convolution of stride 1 that keeps the size, over maps in rows: y = W * relu(scale * x + shift).
// C numbers in, K out, TAPS = kernel sizes multiplied. The taps are in the order of the OUTPUT positions that one input
// position reaches, from -reach to reach along each axis, the last axis fastest: that is the kernel turned round. A 1x1
// convolution has reach 0 and one tap.
struct MixTask {
  int64_t images, positions;
  int64_t inputs, outputs;  // C, K
  int64_t grid[3];          // the positions as a grid, the last axis fastest; missing axes are 1
  int64_t reach[3];         // (kernel size - 1) / 2
  Map x;                    // (N, C, S)
  Map y;                    // (N, K, S): written forward; backward: read if y_scale is there
  Map grad;                 // (N, K, S), backward: the gradient by y; by y's own norm's output if y_scale is there
  Map total;                // (N, C, S), backward: what the gradient goes to, or no data
  int64_t assign;           // 0: total += scale * m; 1: total = m, the gradient by relu's input
  const void* scale;        // (C,)
  const void* shift;
  const void* mean;
  const void* weight;    // (TAPS, K, C), contiguous, in the type of the arithmetic
  const void* y_scale;   // (K,) or null: the gradient by y is y_scale * grad + y_slope * y + y_offset
  const void* y_slope;
  const void* y_offset;
  void* sums;     // (C,), added to; null if the gradient by x and its norm is not asked for
  void* sums_x;
  void* dweight;  // (TAPS, K, C), added to, or null
};

// Partial results of one slice of the rows.
struct MixSlice {
  double* sums;    // (2, C)
  void* dweight;   // (whole tiles of TAPS * K, whole vectors of C), or null
};

// A norm, relu and a pool over maps in rows, see pool.h.
struct PoolTask {
  int64_t images, channels;
  int64_t grid[3];    // the positions S of the map as a grid, the last axis fastest; missing axes are 1
  int64_t pooled[3];  // the same of S2, the pool's windows
  Map x;              // (N, C, S)
  Map grad;           // (N, C, S2), backward: the gradient by the pool's output
  Map out;            // forward: (N, C, S2); backward: (N, C, S), or no data
  int32_t* choice;    // (N, S2, C), contiguous: the position in 0..S-1 that a max pool takes, -1 if relu stops its gradient
  const void* scale;  // vectors (C,) as in Task
  const void* shift;
  const void* mean;
  void* sums;  // (C,), added to
  void* sums_x;
};

// What the loops of one pass share.
struct PoolWork {
  const PoolTask& task;
  int64_t rows_per_block;  // the pooled positions are shared out in blocks by the passes with sums
  double* partials;        // (blocks, 2, C): both sums of every block
};
