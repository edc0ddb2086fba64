// The cascade of lean/stream_cascade.py for some columns (channels of one row of the batch): they are independent of each
// other. Like vector.h this file is included once per instruction set, inside a namespace, behind vector.h.

constexpr int64_t TILE = 16;                           // samples that go through a level together, at most
constexpr int64_t GROUP = LANE_BYTES == 64 ? 4 : 2;    // samples that share a loaded coefficient
constexpr int64_t COLUMN_VECTORS = 4;                  // registers side by side

// One column block: where it lies, and the two sums of a tile, P and Q.
template <typename A, int64_t W>
struct Columns {
  const Stream& task;
  int64_t b, h, c;
  int64_t first;  // time of the tile's first sample
  alignas(64) A P[TILE][W], Q[TILE][W];
};

// P += alpha * u(t - offset), Q += beta * u(t - offset) for cells begin..end, T samples from t on, N registers from column x on.
template <typename V, typename A, int64_t W, int64_t N, int64_t T, bool RAMP>
inline void combs(Columns<A, W>& columns, int64_t begin, int64_t end, int64_t t, int64_t x) {
  constexpr int64_t lanes = sizeof(V) / sizeof(A);
  const Stream& task = columns.task;
  const int64_t stride = task.batch * task.features;
  const A* ring = static_cast<const A*>(task.ring) + columns.b * task.features + columns.h + x;
  const A* coefficient = static_cast<const A*>(task.coefficients) + columns.c * task.features + columns.h + x;
  const int64_t part = task.outputs * task.features, cell_stride = (task.ramp ? 2 : 1) * part;
  const int64_t now = (columns.first + t) % task.ring_rows;
  V P[T][N], Q[T][N];
  for (int64_t i = 0; i < T; ++i)
    for (int64_t n = 0; n < N; ++n) {
      P[i][n] = load<V>(columns.P[t + i] + x + n * lanes);
      if (RAMP) Q[i][n] = load<V>(columns.Q[t + i] + x + n * lanes);
    }
  for (int64_t cell = begin; cell < end; ++cell) {
    V alpha[N], beta[N];
    for (int64_t n = 0; n < N; ++n) {
      alpha[n] = load<V>(coefficient + cell * cell_stride + n * lanes);
      if (RAMP) beta[n] = load<V>(coefficient + cell * cell_stride + part + n * lanes);
    }
    int64_t row = now - task.offsets[cell];
    row += row < 0 ? task.ring_rows : 0;
    for (int64_t i = 0; i < T; ++i) {
      const A* heard = ring + row * stride;
      row = row + 1 == task.ring_rows ? 0 : row + 1;
      for (int64_t n = 0; n < N; ++n) {
        const V u = load<V>(heard + n * lanes);
        P[i][n] += alpha[n] * u;
        if (RAMP) Q[i][n] += beta[n] * u;
        // the row that this cell needs for the next tile: no hardware guesses hundreds of streams
        __builtin_prefetch(heard + task.tile * stride + n * lanes);
      }
    }
  }
  for (int64_t i = 0; i < T; ++i)
    for (int64_t n = 0; n < N; ++n) {
      store<V>(columns.P[t + i] + x + n * lanes, P[i][n]);
      if (RAMP) store<V>(columns.Q[t + i] + x + n * lanes, Q[i][n]);
    }
}

// From level 2r to level r: P += P(t - r) + r Q(t - r), Q += Q(t - r), sample by sample through the delay lines.
template <typename V, typename A, int64_t W, bool RAMP>
inline void take_in(Columns<A, W>& columns, int64_t count, int64_t r) {
  constexpr int64_t lanes = sizeof(V) / sizeof(A);
  const Stream& task = columns.task;
  const int64_t stride = task.batch * task.outputs * task.features;
  A* lines = static_cast<A*>(task.lines) + (columns.b * task.outputs + columns.c) * task.features + columns.h;
  for (int64_t t = 0; t < count; ++t) {
    A* line = lines + (r - 1 + ((columns.first + t) & (r - 1))) * stride;
    A* ramp_line = line + (task.widest - 1) * stride;
    for (int64_t x = 0; x < W; x += lanes) {
      const V P = load<V>(columns.P[t] + x);
      V delayed = load<V>(line + x);
      store<V>(line + x, P);
      if (RAMP) {
        const V Q = load<V>(columns.Q[t] + x), delayed_ramp = load<V>(ramp_line + x);
        store<V>(ramp_line + x, Q);
        store<V>(columns.Q[t] + x, Q + delayed_ramp);
        delayed += static_cast<A>(r) * delayed_ramp;
      }
      store<V>(columns.P[t] + x, P + delayed);
    }
  }
}

template <typename V, typename A, int64_t N, bool RAMP>
void stream_columns(const Stream& task, int64_t b, int64_t h) {
  constexpr int64_t lanes = sizeof(V) / sizeof(A), W = N * lanes, M = N < 2 ? N : 2;
  const int64_t stride = task.batch * task.features, column = b * task.features + h;
  Columns<A, W> columns{task, b, h, 0, 0, {}, {}};
  for (int64_t start = 0; start < task.samples; start += task.tile) {
    const int64_t count = std::min(task.tile, task.samples - start);
    columns.first = *task.position + start;
    for (int64_t t = 0; t < count; ++t)
      __builtin_memcpy(static_cast<A*>(task.ring) + (columns.first + t) % task.ring_rows * stride + column,
                       static_cast<const A*>(task.u) + (start + t) * stride + column, W * sizeof(A));
    for (columns.c = 0; columns.c < task.outputs; ++columns.c) {
      __builtin_memset(columns.P, 0, count * W * sizeof(A));
      if (RAMP) __builtin_memset(columns.Q, 0, count * W * sizeof(A));
      int64_t begin = 0;
      for (int64_t level = 0; level < task.levels; ++level) {
        const int64_t end = task.level_ends[level];
        if (level > 0) take_in<V, A, W, RAMP>(columns, count, task.widest >> level);
        int64_t t = 0;
        for (; t + GROUP <= count; t += GROUP)
          for (int64_t x = 0; x < W; x += M * lanes) combs<V, A, W, M, GROUP, RAMP>(columns, begin, end, t, x);
        for (; t < count; ++t) combs<V, A, W, N, 1, RAMP>(columns, begin, end, t, 0);
        begin = end;
      }
      for (int64_t t = 0; t < count; ++t)
        __builtin_memcpy(static_cast<A*>(task.y) + (((start + t) * task.batch + b) * task.outputs + columns.c) * task.features + h,
                         columns.P[t], W * sizeof(A));
    }
  }
}

template <typename A>
constexpr int64_t block_width = COLUMN_VECTORS * LANE_BYTES / sizeof(A);

// Blocks begin..end of columns, numbered b * blocks per row + block.
template <typename A, bool RAMP>
void stream_blocks(const Stream& task, int64_t begin, int64_t end) {
  constexpr int64_t width = block_width<A>, lanes = LANE_BYTES / sizeof(A), few = 16 / sizeof(A);
  using V = typename Vector<A>::type;
  using Few = typename Vector<A, 16>::type;
  const int64_t per_row = (task.features + width - 1) / width;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t b = block / per_row;
    int64_t h = block % per_row * width;
    const int64_t stop = std::min(h + width, task.features);
    for (; h + width <= stop; h += width) stream_columns<V, A, COLUMN_VECTORS, RAMP>(task, b, h);
    for (; h + lanes <= stop; h += lanes) stream_columns<V, A, 1, RAMP>(task, b, h);
    for (; h + few <= stop; h += few) stream_columns<Few, A, 1, RAMP>(task, b, h);
    for (; h < stop; ++h) stream_columns<A, A, 1, RAMP>(task, b, h);
  }
}
