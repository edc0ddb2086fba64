// Norm, relu and a pool of windows along every axis, over maps in rows: relu's output and the pool's are never both in memory.
//
//   max pool       windows of 3, stride 2, padding 1: 2j-1 .. 2j+1, cut at the border. As in torch the first of equal numbers
//                  is taken, in the order of the positions, and a NaN wins.
//   average pool   windows of 2, stride 2: 2j, 2j+1; what is left over at the end of an odd axis is not read.
//
// A missing axis has size 1 in both grids; the windows are then cut to it.

constexpr int64_t MOST_POSITIONS = 27;  // in a window of three axes
constexpr int64_t MOST_WINDOWS = 8;     // over a position
constexpr int64_t CHANNELS_AT_ONCE = 128;
constexpr int64_t POOLED_IN_FLOAT = 8;  // positions whose sum is made in A before it goes to double

// The positions of the window at pooled position `p`, in order; PADDING 1: max pool, 0: average pool.
template <int64_t PADDING>
inline int64_t window_at(const PoolTask& task, int64_t p, int64_t* positions) {
  const int64_t *grid = task.grid, *pooled = task.pooled;
  const int64_t at[3] = {p / (pooled[1] * pooled[2]), p / pooled[2] % pooled[1], p % pooled[2]};
  int64_t low[3], high[3], count = 0;
  for (int64_t i = 0; i < 3; ++i) {
    low[i] = std::max<int64_t>(0, 2 * at[i] - PADDING);
    high[i] = std::min(grid[i], 2 * at[i] + 2);
  }
  for (int64_t a = low[0]; a < high[0]; ++a)
    for (int64_t b = low[1]; b < high[1]; ++b)
      for (int64_t c = low[2]; c < high[2]; ++c) positions[count++] = (a * grid[1] + b) * grid[2] + c;
  return count;
}

// The max pool's windows that hold position `s`.
inline int64_t windows_over(const PoolTask& task, int64_t s, int64_t* windows) {
  const int64_t *grid = task.grid, *pooled = task.pooled;
  const int64_t at[3] = {s / (grid[1] * grid[2]), s / grid[2] % grid[1], s % grid[2]};
  int64_t last[3], count = 0;
  for (int64_t i = 0; i < 3; ++i) last[i] = std::min(pooled[i] - 1, (at[i] + 1) / 2);
  for (int64_t a = at[0] / 2; a <= last[0]; ++a)
    for (int64_t b = at[1] / 2; b <= last[1]; ++b)
      for (int64_t c = at[2] / 2; c <= last[2]; ++c) windows[count++] = (a * pooled[1] + b) * pooled[2] + c;
  return count;
}

// As many whole numbers as a register V has numbers, of its width; in memory they are int32_t.
template <typename V>
struct Indices {
  typedef decltype(V{} < V{}) type;
};
template <>
struct Indices<float> {
  typedef int32_t type;
};
template <>
struct Indices<double> {
  typedef int64_t type;
};

template <typename A, typename V>
inline typename Indices<V>::type all_indices(int64_t number) {
  using I = std::conditional_t<sizeof(A) == 4, int32_t, int64_t>;
  return typename Indices<V>::type{} + static_cast<I>(number);
}

template <typename A, typename V>
inline typename Indices<V>::type load_indices(const int32_t* p) {
  if constexpr (std::is_same_v<V, A>) {
    return *p;
  } else if constexpr (sizeof(A) == 4) {
    return load<typename Indices<V>::type>(p);
  } else {
    using Narrow = typename Vector<int32_t, sizeof(V) / 2>::type;
    return __builtin_convertvector(load<Narrow>(p), typename Indices<V>::type);
  }
}

template <typename A, typename V>
inline void store_indices(int32_t* p, typename Indices<V>::type indices) {
  if constexpr (std::is_same_v<V, A>) {
    *p = static_cast<int32_t>(indices);
  } else if constexpr (sizeof(A) == 4) {
    store(p, indices);
  } else {
    using Narrow = typename Vector<int32_t, sizeof(V) / 2>::type;
    store<Narrow>(p, __builtin_convertvector(indices, Narrow));
  }
}

// f(n, p, c, length, positions, count, x) for pieces of channels of the pooled positions begin..end, numbered n * S2 + p;
// x[w] are the numbers at positions[w].
template <typename A, int64_t PADDING, typename F>
inline void for_windows(const PoolTask& task, int64_t begin, int64_t end, const F& f) {
  const int64_t pooled = task.pooled[0] * task.pooled[1] * task.pooled[2];
  const std::unique_ptr<A[]> x_buffer(new A[MOST_POSITIONS * CHANNELS_AT_ONCE]);
  int64_t positions[MOST_POSITIONS];
  const A* x[MOST_POSITIONS];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t n = i / pooled, p = i % pooled, count = window_at<PADDING>(task, p, positions);
    for (int64_t c = 0; c < task.channels; c += CHANNELS_AT_ONCE) {
      const int64_t length = std::min(CHANNELS_AT_ONCE, task.channels - c);
      for (int64_t w = 0; w < count; ++w)
        x[w] = fetch<A>(task.x, row_offset(task.x, n, positions[w], c), length, x_buffer.get() + w * CHANNELS_AT_ONCE);
      f(n, p, c, length, positions, count, x);
    }
  }
}

// out = pool of relu(scale * x + shift)
template <typename A, bool MAX>
void pool_forward(const PoolWork& work, int64_t begin, int64_t end) {
  const PoolTask& task = work.task;
  const A *scales = static_cast<const A*>(task.scale), *shifts = static_cast<const A*>(task.shift);
  for_windows<A, MAX>(
      task, begin, end,
      [&](int64_t n, int64_t p, int64_t c, int64_t length, const int64_t*, int64_t count, const A* const* x) {
        alignas(64) A out_buffer[CHANNELS_AT_ONCE];
        A* out = place<A>(task.out, row_offset(task.out, n, p, c), out_buffer);
        for_each<A>(length, [&](int64_t i, auto v) {
          using V = decltype(v);
          const V scale = load<V>(scales + c + i), shift = load<V>(shifts + c + i);
          V result = load<V>(x[0] + i) * scale + shift;
          if constexpr (MAX) {  // relu keeps the order: once, at the end
            for (int64_t w = 1; w < count; ++w) {
              const V z = load<V>(x[w] + i) * scale + shift;
              result = ((z > result) | (z != z)) ? z : result;
            }
            result = relu<V>(result);
          } else {
            result = relu<V>(result);
            for (int64_t w = 1; w < count; ++w) result += relu<V>(load<V>(x[w] + i) * scale + shift);
            result /= static_cast<A>(count);
          }
          store<V>(out + i, result);
        });
        flush<A>(task.out, row_offset(task.out, n, p, c), length, out);
      });
}

// Runs loop(first, last, sums), which adds two sums per channel to `sums` (2, C), over all pooled positions of the blocks.
template <typename A, typename F>
inline void for_blocks(const PoolWork& work, int64_t begin_block, int64_t end_block, const F& loop) {
  const PoolTask& task = work.task;
  const int64_t both = 2 * task.channels;
  const int64_t rows = task.images * task.pooled[0] * task.pooled[1] * task.pooled[2];
  const std::unique_ptr<A[]> sums(new A[both]);
  for (int64_t block = begin_block; block < end_block; ++block) {
    double* partials = work.partials + block * both;
    const int64_t end = std::min(rows, (block + 1) * work.rows_per_block);
    for (int64_t first = block * work.rows_per_block; first < end; first += POOLED_IN_FLOAT) {
      std::fill(sums.get(), sums.get() + both, A{});
      loop(first, std::min(end, first + POOLED_IN_FLOAT), sums.get());
      for (int64_t i = 0; i < both; ++i) partials[i] += sums[i];
    }
  }
}

// Sums of m = grad * relu'(z) and of m * (x - mean) at the positions that the max pool takes; choice = these positions, -1
// where relu stops the gradient.
template <typename A>
void max_pool_sums(const PoolWork& work, int64_t begin_block, int64_t end_block) {
  const PoolTask& task = work.task;
  const A *scales = static_cast<const A*>(task.scale), *shifts = static_cast<const A*>(task.shift);
  const A* means = static_cast<const A*>(task.mean);
  const int64_t pooled = task.pooled[0] * task.pooled[1] * task.pooled[2];
  for_blocks<A>(work, begin_block, end_block, [&](int64_t first, int64_t last, A* sums) {
    A* sums_x = sums + task.channels;
    for_windows<A, 1>(
        task, first, last,
        [&](int64_t n, int64_t p, int64_t c, int64_t length, const int64_t* positions, int64_t count,
            const A* const* x) {
          alignas(64) A grad_buffer[CHANNELS_AT_ONCE];
          const A* grad = fetch<A>(task.grad, row_offset(task.grad, n, p, c), length, grad_buffer);
          int32_t* choice = task.choice + (n * pooled + p) * task.channels + c;
          for_each<A>(length, [&](int64_t i, auto v) {
            using V = decltype(v);
            const V scale = load<V>(scales + c + i), shift = load<V>(shifts + c + i);
            V taken = load<V>(x[0] + i), best = taken * scale + shift;
            auto index = all_indices<A, V>(positions[0]);
            for (int64_t w = 1; w < count; ++w) {
              const V number = load<V>(x[w] + i), z = number * scale + shift;
              const auto better = (z > best) | (z != z);
              best = better ? z : best;
              taken = better ? number : taken;
              index = better ? all_indices<A, V>(positions[w]) : index;
            }
            const V m = relu_backward<V>(load<V>(grad + i), best);
            store_indices<A, V>(choice + i, best <= V{} ? all_indices<A, V>(-1) : index);
            store<V>(sums + c + i, load<V>(sums + c + i) + m);
            store<V>(sums_x + c + i, load<V>(sums_x + c + i) + m * (taken - load<V>(means + c + i)));
          });
        });
  });
}

// out = scale * m + slope * x + offset with m = grad where `choice` says so; slope and offset are in `shift` and `mean`. The
// items are positions of x.
template <typename A>
void max_pool_backward(const PoolWork& work, int64_t begin, int64_t end) {
  const PoolTask& task = work.task;
  const A *scales = static_cast<const A*>(task.scale), *slopes = static_cast<const A*>(task.shift);
  const A* offsets = static_cast<const A*>(task.mean);
  const int64_t pooled = task.pooled[0] * task.pooled[1] * task.pooled[2];
  const int64_t positions = task.grid[0] * task.grid[1] * task.grid[2];
  const std::unique_ptr<A[]> buffer(new A[(MOST_WINDOWS + 2) * CHANNELS_AT_ONCE]);
  A *x_buffer = buffer.get(), *out_buffer = x_buffer + CHANNELS_AT_ONCE, *grad_buffer = out_buffer + CHANNELS_AT_ONCE;
  int64_t windows[MOST_WINDOWS];
  const A* grad[MOST_WINDOWS];
  const int32_t* choice[MOST_WINDOWS];
  for (int64_t item = begin; item < end; ++item) {
    const int64_t n = item / positions, s = item % positions, count = windows_over(task, s, windows);
    for (int64_t c = 0; c < task.channels; c += CHANNELS_AT_ONCE) {
      const int64_t length = std::min(CHANNELS_AT_ONCE, task.channels - c);
      for (int64_t w = 0; w < count; ++w) {
        grad[w] = fetch<A>(task.grad, row_offset(task.grad, n, windows[w], c), length, grad_buffer + w * CHANNELS_AT_ONCE);
        choice[w] = task.choice + (n * pooled + windows[w]) * task.channels + c;
      }
      const A* x = fetch<A>(task.x, row_offset(task.x, n, s, c), length, x_buffer);
      A* out = place<A>(task.out, row_offset(task.out, n, s, c), out_buffer);
      for_each<A>(length, [&](int64_t i, auto v) {
        using V = decltype(v);
        V m{};
        for (int64_t w = 0; w < count; ++w)
          m += load_indices<A, V>(choice[w] + i) == all_indices<A, V>(s) ? load<V>(grad[w] + i) : V{};
        const V correction = load<V>(x + i) * load<V>(slopes + c + i) + load<V>(offsets + c + i);
        store<V>(out + i, m * load<V>(scales + c + i) + correction);
      });
      flush<A>(task.out, row_offset(task.out, n, s, c), length, out);
    }
  }
}

// With m = grad / positions of the window * relu'(z): out += scale * m if there is an out; sums of m and m * (x - mean).
template <typename A>
void average_pool_backward(const PoolWork& work, int64_t begin_block, int64_t end_block) {
  const PoolTask& task = work.task;
  const A *scales = static_cast<const A*>(task.scale), *shifts = static_cast<const A*>(task.shift);
  const A* means = static_cast<const A*>(task.mean);
  const bool has_out = task.out.data != nullptr;
  for_blocks<A>(work, begin_block, end_block, [&](int64_t first, int64_t last, A* sums) {
    A* sums_x = sums + task.channels;
    for_windows<A, 0>(
        task, first, last,
        [&](int64_t n, int64_t p, int64_t c, int64_t length, const int64_t* positions, int64_t count,
            const A* const* x) {
          alignas(64) A grad_buffer[CHANNELS_AT_ONCE], out_buffer[MOST_WINDOWS][CHANNELS_AT_ONCE];
          const A* grad = fetch<A>(task.grad, row_offset(task.grad, n, p, c), length, grad_buffer);
          A* out[MOST_WINDOWS];
          for (int64_t w = 0; w < count && has_out; ++w)
            out[w] = fetch<A>(task.out, row_offset(task.out, n, positions[w], c), length, out_buffer[w]);
          for_each<A>(length, [&](int64_t i, auto v) {
            using V = decltype(v);
            const V scale = load<V>(scales + c + i), shift = load<V>(shifts + c + i), mean = load<V>(means + c + i);
            const V g = load<V>(grad + i) / static_cast<A>(count);
            V sum{}, sum_x{};
            for (int64_t w = 0; w < count; ++w) {
              const V number = load<V>(x[w] + i), m = relu_backward<V>(g, number * scale + shift);
              sum += m;
              sum_x += m * (number - mean);
              if (has_out) store<V>(out[w] + i, load<V>(out[w] + i) + m * scale);
            }
            store<V>(sums + c + i, load<V>(sums + c + i) + sum);
            store<V>(sums_x + c + i, load<V>(sums_x + c + i) + sum_x);
          });
          for (int64_t w = 0; w < count && has_out; ++w)
            flush<A>(task.out, row_offset(task.out, n, positions[w], c), length, out[w]);
        });
  });
}
