// What the Python side hands over: one struct for every pass. Mirrored field by field in native.py.
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
