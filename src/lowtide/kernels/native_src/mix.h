// y = W * relu(scale * x + shift), a 1x1 or a 3x3 convolution over maps in rows, and the backward of both. Relu's output is
// never written to memory: it is made for a few rows, multiplied while a near cache holds it, and made again in the
// backward. A 3x3 convolution is a product with all nine taps' weights at once (TAPS * K numbers per position); forward
// these are added up at the positions they belong to, backward they are gathered from there.

constexpr int64_t TILE_ROWS = 6;                               // of a product that is held in registers
constexpr int64_t TILE_VECTORS = LANE_BYTES == 64 ? 4 : 2;     // 6 x 4 of 32 registers, 6 x 2 of 16
constexpr int64_t BLOCK_BYTES = 256 * 1024;                    // of relu output that is held in the second-level cache

template <typename A>
constexpr int64_t lanes_of = Vector<A>::lanes;

// out (TILE_ROWS, NV vectors) = sum over k of a[r, k] * b[k, :], or += if ADD. b's rows are whole vectors.
template <typename A, int64_t NV, bool ADD>
__attribute__((noinline)) void multiply(
    const A* a, int64_t a_row, int64_t a_k, const A* b, int64_t b_k, int64_t depth, A* out, int64_t out_row) {
  using V = typename Vector<A>::type;
  V sum[TILE_ROWS][NV];
#pragma GCC unroll 8
  for (int64_t r = 0; r < TILE_ROWS; ++r)
#pragma GCC unroll 8
    for (int64_t v = 0; v < NV; ++v) sum[r][v] = V{};
  for (int64_t k = 0; k < depth; ++k) {
    V row[NV];
#pragma GCC unroll 8
    for (int64_t v = 0; v < NV; ++v) row[v] = load<V>(b + v * lanes_of<A>);
#pragma GCC unroll 8
    for (int64_t r = 0; r < TILE_ROWS; ++r) {
      const A number = a[r * a_row];
#pragma GCC unroll 8
      for (int64_t v = 0; v < NV; ++v) sum[r][v] += row[v] * number;
    }
    a += a_k;
    b += b_k;
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < TILE_ROWS; ++r)
#pragma GCC unroll 8
    for (int64_t v = 0; v < NV; ++v) {
      A* to = out + r * out_row + v * lanes_of<A>;
      store<V>(to, ADD ? load<V>(to) + sum[r][v] : sum[r][v]);
    }
}

template <typename A>
using Multiply = void (*)(const A*, int64_t, int64_t, const A*, int64_t, int64_t, A*, int64_t);

template <typename A, bool ADD>
inline Multiply<A> multiply_by(int64_t vectors) {
  if constexpr (TILE_VECTORS == 4) {
    constexpr Multiply<A> all[] = {multiply<A, 1, ADD>, multiply<A, 2, ADD>, multiply<A, 3, ADD>, multiply<A, 4, ADD>};
    return all[vectors - 1];
  } else {
    constexpr Multiply<A> all[] = {multiply<A, 1, ADD>, multiply<A, 2, ADD>};
    return all[vectors - 1];
  }
}

template <typename A>
inline int64_t whole_vectors(int64_t length) {
  return (length + lanes_of<A> - 1) / lanes_of<A> * lanes_of<A>;
}

inline int64_t whole_tiles(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; }

template <typename A>
using Buffer = std::unique_ptr<A[]>;

// Columns at a time: as many whole tiles as there are, the rest in one narrower tile. f(first column, vectors).
template <typename A, typename F>
inline void for_columns(int64_t padded, const F& f) {
  constexpr int64_t width = TILE_VECTORS * lanes_of<A>;
  for (int64_t first = 0; first < padded; first += width) f(first, std::min(width, padded - first) / lanes_of<A>);
}

// Asks for a stretch of a map that is needed soon, while there is other work: `length` numbers from `offset` on.
inline void prefetch(const Map& map, int64_t offset, int64_t length) {
  const int64_t size = map.dtype == F64 ? 8 : map.dtype == F32 ? 4 : 2;
  const char* data = static_cast<const char*>(map.data) + offset * size;
  for (int64_t at = 0; at < length * size; at += 64) __builtin_prefetch(data + at, 0, 2);
}

// relu(scale * x + shift) of one row.
template <typename A>
inline void activate_row(const MixTask& task, int64_t n, int64_t s, A* z, A* x_buffer) {
  const A *scales = static_cast<const A*>(task.scale), *shifts = static_cast<const A*>(task.shift);
  const A* x = fetch<A>(task.x, row_offset(task.x, n, s, 0), task.inputs, x_buffer);
  for_each<A>(task.inputs, [&](int64_t i, auto v) {
    using V = decltype(v);
    store<V>(z + i, relu<V>(load<V>(x + i) * load<V>(scales + i) + load<V>(shifts + i)));
  });
}

// The rows begin..end, numbered n * S + s. `packed` is W transposed, (C, whole vectors of K).
template <typename A>
void mix_forward(const MixTask& task, const void* packed, int64_t begin, int64_t end) {
  const int64_t inputs = task.inputs, outputs = task.outputs, padded = whole_vectors<A>(outputs);
  const Buffer<A> z(new A[TILE_ROWS * inputs]()), x_buffer(new A[inputs]), y_buffer(new A[outputs]);
  for (int64_t first = begin; first < end; first += TILE_ROWS) {
    const int64_t rows = std::min(TILE_ROWS, end - first);
    for (int64_t r = 0; r < rows; ++r) {
      activate_row(
          task, (first + r) / task.positions, (first + r) % task.positions, z.get() + r * inputs, x_buffer.get());
      const int64_t next = std::min(first + r + TILE_ROWS, end - 1);
      prefetch(task.x, row_offset(task.x, next / task.positions, next % task.positions, 0), inputs);
    }
    for_columns<A>(padded, [&](int64_t column, int64_t vectors) {
      alignas(64) A tile[TILE_ROWS * TILE_VECTORS * lanes_of<A>];
      multiply_by<A, false>(vectors)(
          z.get(), inputs, 1, static_cast<const A*>(packed) + column, padded, inputs, tile, vectors * lanes_of<A>);
      const int64_t length = std::min(vectors * lanes_of<A>, outputs - column);
      for (int64_t r = 0; r < rows; ++r) {
        const A* from = tile + r * vectors * lanes_of<A>;
        const int64_t offset =
            row_offset(task.y, (first + r) / task.positions, (first + r) % task.positions, column);
        A* y = place<A>(task.y, offset, y_buffer.get());
        for_each<A>(length, [&](int64_t i, auto v) { store(y + i, load<decltype(v)>(from + i)); });
        flush<A>(task.y, offset, length, y);
      }
    });
  }
}

inline int64_t taps_of(const MixTask& task) {
  return (2 * task.reach[0] + 1) * (2 * task.reach[1] + 1) * (2 * task.reach[2] + 1);
}

// f(tap, s, count) for every run of taps along the last axis: tap, tap + 1.. belong to the positions s, s + 1.. of the grid.
// outside(tap, count) for taps off the grid.
template <typename F, typename G>
inline void for_runs(const MixTask& task, int64_t s, const F& f, const G& outside) {
  const int64_t *grid = task.grid, *reach = task.reach, width = 2 * reach[2] + 1;
  const int64_t at[3] = {s / (grid[1] * grid[2]), s / grid[2] % grid[1], s % grid[2]};
  const int64_t left = std::max<int64_t>(0, reach[2] - at[2]);
  const int64_t right = std::min(width, grid[2] - at[2] + reach[2]);
  int64_t tap = 0;
  for (int64_t a = at[0] - reach[0]; a <= at[0] + reach[0]; ++a)
    for (int64_t b = at[1] - reach[1]; b <= at[1] + reach[1]; ++b, tap += width) {
      if (a < 0 || a >= grid[0] || b < 0 || b >= grid[1]) {
        outside(tap, width);
        continue;
      }
      if (left > 0) outside(tap, left);
      f(tap + left, (a * grid[1] + b) * grid[2] + at[2] - reach[2] + left, right - left);
      if (right < width) outside(tap + right, width - right);
    }
}

// Positions first..last of image n, whole steps along the outermost axis, of a convolution with several taps. Every input
// position that reaches them is multiplied, those of the neighbours' steps too. `packed` is (C, whole vectors of TAPS * K).
template <typename A>
void convolve_forward(const MixTask& task, const void* packed, int64_t n, int64_t first, int64_t last) {
  const int64_t inputs = task.inputs, outputs = task.outputs, products = taps_of(task) * outputs;
  const int64_t padded = whole_vectors<A>(products);
  const int64_t farthest = (task.reach[0] * task.grid[1] + task.reach[1]) * task.grid[2] + task.reach[2];
  const int64_t begin = std::max<int64_t>(0, first - farthest), end = std::min(task.positions, last + farthest);
  const Buffer<A> z(new A[TILE_ROWS * inputs]()), x_buffer(new A[inputs]);
  const Buffer<A> tile(new A[TILE_ROWS * padded]), y(new A[(last - first) * outputs]());
  for (int64_t top = begin; top < end; top += TILE_ROWS) {
    const int64_t rows = std::min(TILE_ROWS, end - top);
    for (int64_t r = 0; r < rows; ++r) {
      activate_row(task, n, top + r, z.get() + r * inputs, x_buffer.get());
      prefetch(task.x, row_offset(task.x, n, std::min(top + r + TILE_ROWS, end - 1), 0), inputs);
    }
    for_columns<A>(padded, [&](int64_t column, int64_t vectors) {
      multiply_by<A, false>(vectors)(
          z.get(), inputs, 1, static_cast<const A*>(packed) + column, padded, inputs, tile.get() + column, padded);
    });
    for (int64_t r = 0; r < rows; ++r) {
      const A* from = tile.get() + r * padded;
      for_runs(
          task, top + r,
          [&](int64_t tap, int64_t s, int64_t count) {
            const int64_t skipped = std::max<int64_t>(0, first - s), kept = std::min(count, last - s) - skipped;
            const A* products = from + (tap + skipped) * outputs;
            A* to = y.get() + (s + skipped - first) * outputs;
            for_each<A>(kept * outputs, [&](int64_t i, auto v) {
              using V = decltype(v);
              store<V>(to + i, load<V>(to + i) + load<V>(products + i));
            });
          },
          [](int64_t, int64_t) {});
    }
  }
  const Buffer<A> y_buffer(new A[outputs]);
  for (int64_t s = first; s < last; ++s) {
    const int64_t offset = row_offset(task.y, n, s, 0);
    A* to = place<A>(task.y, offset, y_buffer.get());
    std::copy(y.get() + (s - first) * outputs, y.get() + (s - first + 1) * outputs, to);
    flush<A>(task.y, offset, outputs, to);
  }
}

// The gradient by y that reaches one input position through every tap: (TAPS * K).
template <typename A>
inline void gather_row(const MixTask& task, int64_t n, int64_t s, A* g) {
  const int64_t outputs = task.outputs, dense = in_place<A>(task.grad) && task.grad.stride_s == outputs;
  for_runs(
      task, s,
      [&](int64_t tap, int64_t from, int64_t count) {
        // neighbours in memory are copied at once
        const int64_t length = dense ? count * outputs : outputs, pieces = dense ? 1 : count;
        for (int64_t i = 0; i < pieces; ++i) {
          A* to = g + (tap + i) * outputs;
          const A* piece = fetch<A>(task.grad, row_offset(task.grad, n, from + i, 0), length, to);
          if (piece == to) continue;
          for_each<A>(length, [&](int64_t j, auto v) { store(to + j, load<decltype(v)>(piece + j)); });
        }
      },
      [&](int64_t tap, int64_t count) { std::fill(g + tap * outputs, g + (tap + count) * outputs, A{}); });
}

// The gradient by y at one position: (K).
template <typename A>
inline void gradient_row(const MixTask& task, int64_t n, int64_t s, A* g, A* y_buffer) {
  const A* grad = fetch<A>(task.grad, row_offset(task.grad, n, s, 0), task.outputs, g);
  if (task.y_scale == nullptr) {
    if (grad != g) std::copy(grad, grad + task.outputs, g);
    return;
  }
  const A *scales = static_cast<const A*>(task.y_scale), *slopes = static_cast<const A*>(task.y_slope);
  const A* offsets = static_cast<const A*>(task.y_offset);
  const A* y = fetch<A>(task.y, row_offset(task.y, n, s, 0), task.outputs, y_buffer);
  for_each<A>(task.outputs, [&](int64_t i, auto v) {
    using V = decltype(v);
    const V correction = load<V>(y + i) * load<V>(slopes + i) + load<V>(offsets + i);
    store<V>(g + i, load<V>(grad + i) * load<V>(scales + i) + correction);
  });
}

// The rows begin..end. `packed` is W, (TAPS * K, whole vectors of C).
template <typename A>
void mix_backward(const MixTask& task, const void* packed, const MixSlice& slice, int64_t begin, int64_t end) {
  const int64_t taps = taps_of(task), inputs = task.inputs, products = taps * task.outputs;
  const int64_t z_row = whole_vectors<A>(inputs), g_row = whole_tiles(products);
  const int64_t block_rows =
      std::clamp<int64_t>(BLOCK_BYTES / (z_row * sizeof(A)), 8 * TILE_ROWS, 12 * TILE_ROWS) / TILE_ROWS * TILE_ROWS;
  const A *scales = static_cast<const A*>(task.scale), *means = static_cast<const A*>(task.mean);
  A* dweight = static_cast<A*>(slice.dweight);
  const bool has_total = task.total.data != nullptr, assign = task.assign;
  const Buffer<A> z(new A[block_rows * z_row]()), g(new A[block_rows * g_row]());
  const Buffer<A> x_buffer(new A[inputs]), y_buffer(new A[task.outputs]);
  for (int64_t first = begin; first < end; first += block_rows) {
    const int64_t rows = std::min(block_rows, end - first);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t n = (first + r) / task.positions, s = (first + r) % task.positions;
      const int64_t next = std::min(first + r + block_rows, end - 1);
      const int64_t next_n = next / task.positions, next_s = next % task.positions;
      if (taps > 1) {
        gather_row(task, n, s, g.get() + r * g_row);
      } else {
        gradient_row(task, n, s, g.get() + r * g_row, y_buffer.get());
        if (task.y_scale != nullptr) prefetch(task.y, row_offset(task.y, next_n, next_s, 0), task.outputs);
      }
      prefetch(task.grad, row_offset(task.grad, next_n, next_s, 0), task.outputs);
      activate_row(task, n, s, z.get() + r * z_row, x_buffer.get());
    }
    // rows up to a whole tile: their products are not used, but should not meet a NaN either
    std::fill(g.get() + rows * g_row, g.get() + whole_tiles(rows) * g_row, A{});
    for_columns<A>(z_row, [&](int64_t column, int64_t vectors) {
      if (dweight != nullptr)
        for (int64_t k = 0; k < products; k += TILE_ROWS)
          multiply_by<A, true>(vectors)(
              g.get() + k, 1, g_row, z.get() + column, z_row, rows, dweight + k * z_row + column, z_row);
      if (task.sums == nullptr) return;
      constexpr int64_t widest = TILE_VECTORS * lanes_of<A>;
      const int64_t width = vectors * lanes_of<A>, length = std::min(width, inputs - column);
      alignas(64) A tile[TILE_ROWS * widest], sums[widest] = {}, sums_x[widest] = {};
      alignas(64) A x_wide[TILE_ROWS][widest], total_wide[TILE_ROWS][widest];
      for (int64_t top = 0; top < rows; top += TILE_ROWS) {
        const int64_t height = std::min(TILE_ROWS, rows - top);
        const A* x[TILE_ROWS];
        A* total[TILE_ROWS];
        for (int64_t r = 0; r < height; ++r) {
          const int64_t row = first + top + r, next = std::min(row + block_rows, end - 1);
          const int64_t next_n = next / task.positions, next_s = next % task.positions;
          prefetch(task.x, row_offset(task.x, next_n, next_s, column), length);
          if (has_total) prefetch(task.total, row_offset(task.total, next_n, next_s, column), length);
          const int64_t n = row / task.positions, s = row % task.positions;
          x[r] = fetch<A>(task.x, row_offset(task.x, n, s, column), length, x_wide[r]);
          if (has_total) total[r] = fetch<A>(task.total, row_offset(task.total, n, s, column), length, total_wide[r]);
        }
        multiply_by<A, false>(vectors)(
            g.get() + top * g_row, g_row, 1, static_cast<const A*>(packed) + column, z_row, products, tile, width);
        const A* kept = z.get() + top * z_row + column;
        for_each<A>(length, [&](int64_t i, auto v) {
          using V = decltype(v);
          const V mean = load<V>(means + column + i), scale = load<V>(scales + column + i);
          V sum = load<V>(sums + i), sum_x = load<V>(sums_x + i);
          for (int64_t r = 0; r < height; ++r) {
            const V m = relu_backward<V>(load<V>(tile + r * width + i), load<V>(kept + r * z_row + i));
            sum += m;
            sum_x += m * (load<V>(x[r] + i) - mean);
            if (has_total) store<V>(total[r] + i, assign ? m : load<V>(total[r] + i) + m * scale);
          }
          store<V>(sums + i, sum);
          store<V>(sums_x + i, sum_x);
        });
        for (int64_t r = 0; r < height && has_total; ++r) {
          const int64_t row = first + top + r;
          flush<A>(task.total, row_offset(task.total, row / task.positions, row % task.positions, column), length, total[r]);
        }
      }
      for (int64_t i = 0; i < length; ++i) {
        slice.sums[column + i] += sums[i];
        slice.sums[inputs + column + i] += sums_x[i];
      }
    });
  }
}
