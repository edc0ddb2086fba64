// The passes over maps in rows: the channels of one position are neighbours, and the rows of an image lie stride_s apart.
// GROUP rows are worked on together, so that a vector of channel numbers is loaded once for all of them.

constexpr int64_t GROUP = 4;
constexpr int64_t ROW_PIECE = 256;     // channels at a time
constexpr int64_t ROWS_IN_FLOAT = 256; // rows whose sum is made in A before it goes to double; a multiple of GROUP

template <int64_t R>
using Rows = std::integral_constant<int64_t, R>;

// f(Rows<R>, n, s) for rows s..s+R of image n, R = GROUP or 1, over the rows begin..end numbered n * S + s.
template <typename F>
inline void for_row_groups(const Task& task, int64_t begin, int64_t end, const F& f) {
  while (begin < end) {
    const int64_t n = begin / task.positions, s = begin % task.positions;
    const int64_t stop = std::min(task.positions, s + end - begin);
    int64_t i = s;
    for (; i + GROUP <= stop; i += GROUP) f(Rows<GROUP>{}, n, i);
    for (; i < stop; ++i) f(Rows<1>{}, n, i);
    begin += stop - s;
  }
}

template <typename A, bool RELU>
void rows_scale_shift_act(const Work& work, int64_t begin, int64_t end) {
  const Task& task = work.task;
  const A *scales = static_cast<const A*>(task.scale), *shifts = static_cast<const A*>(task.shift);
  for_row_groups(task, begin, end, [&]<int64_t R>(Rows<R>, int64_t n, int64_t s) {
    for (int64_t c = 0; c < task.channels; c += ROW_PIECE) {
      const int64_t length = std::min(ROW_PIECE, task.channels - c);
      alignas(64) A x_buffer[R][ROW_PIECE], out_buffer[R][ROW_PIECE];
      const A* x[R];
      A* out[R];
      for (int64_t r = 0; r < R; ++r) {
        x[r] = fetch<A>(task.x, row_offset(task.x, n, s + r, c), length, x_buffer[r]);
        out[r] = place<A>(task.out, row_offset(task.out, n, s + r, c), out_buffer[r]);
      }
      for_each<A>(length, [&](int64_t i, auto v) {
        using V = decltype(v);
        const V scale = load<V>(scales + c + i), shift = load<V>(shifts + c + i);
        for (int64_t r = 0; r < R; ++r) {
          const V z = load<V>(x[r] + i) * scale + shift;
          store<V>(out[r] + i, RELU ? relu(z) : z);
        }
      });
      for (int64_t r = 0; r < R; ++r) flush<A>(task.out, row_offset(task.out, n, s + r, c), length, out[r]);
    }
  });
}

template <typename A, bool SCALED>
void rows_affine_add(const Work& work, int64_t begin, int64_t end) {
  const Task& task = work.task;
  const A *scales = static_cast<const A*>(task.scale), *slopes = static_cast<const A*>(task.shift);
  const A* offsets = static_cast<const A*>(task.mean);
  for_row_groups(task, begin, end, [&]<int64_t R>(Rows<R>, int64_t n, int64_t s) {
    for (int64_t c = 0; c < task.channels; c += ROW_PIECE) {
      const int64_t length = std::min(ROW_PIECE, task.channels - c);
      alignas(64) A x_buffer[R][ROW_PIECE], grad_buffer[R][ROW_PIECE];
      const A* x[R];
      A* grad[R];
      for (int64_t r = 0; r < R; ++r) {
        x[r] = fetch<A>(task.x, row_offset(task.x, n, s + r, c), length, x_buffer[r]);
        grad[r] = fetch<A>(task.grad, row_offset(task.grad, n, s + r, c), length, grad_buffer[r]);
      }
      for_each<A>(length, [&](int64_t i, auto v) {
        using V = decltype(v);
        const V slope = load<V>(slopes + c + i), offset = load<V>(offsets + c + i);
        V scale{};
        if constexpr (SCALED) scale = load<V>(scales + c + i);
        for (int64_t r = 0; r < R; ++r) {
          const V correction = load<V>(x[r] + i) * slope + offset, g = load<V>(grad[r] + i);
          store<V>(grad[r] + i, SCALED ? g * scale + correction : g + correction);
        }
      });
      for (int64_t r = 0; r < R; ++r) flush<A>(task.grad, row_offset(task.grad, n, s + r, c), length, grad[r]);
    }
  });
}

// ---- passes with sums: the rows are cut into blocks, each with its own sums, which are added up afterwards in the order of
// the blocks. The blocks do not depend on the number of threads, so neither does the result. ----

// As planes_act_backward.
template <typename A, bool RELU, bool ACCUMULATE>
void rows_act_backward(const Work& work, int64_t begin_block, int64_t end_block) {
  const Task& task = work.task;
  const Map& target = ACCUMULATE ? task.out : task.grad;
  const int64_t channels = task.channels, rows = task.images * task.positions;
  const A *scales = static_cast<const A*>(task.scale), *shifts = static_cast<const A*>(task.shift);
  const A* means = static_cast<const A*>(task.mean);
  const std::unique_ptr<A[]> both(new A[2 * channels]);
  A *sums = both.get(), *sums_x = sums + channels;
  for (int64_t block = begin_block; block < end_block; ++block) {
    double* partials = work.partials + block * 2 * channels;
    std::fill(partials, partials + 2 * channels, 0.0);
    const int64_t end = std::min(rows, (block + 1) * work.rows_per_block);
    for (int64_t begin = block * work.rows_per_block; begin < end; begin += ROWS_IN_FLOAT) {
      std::fill(sums, sums + 2 * channels, A{});
      for_row_groups(
          task, begin, std::min(end, begin + ROWS_IN_FLOAT), [&]<int64_t R>(Rows<R>, int64_t n, int64_t s) {
            for (int64_t c = 0; c < channels; c += ROW_PIECE) {
              const int64_t length = std::min(ROW_PIECE, channels - c);
              alignas(64) A x_buffer[R][ROW_PIECE], grad_buffer[R][ROW_PIECE], out_buffer[R][ROW_PIECE];
              const A* x[R];
              A *grad[R], *out[R];
              for (int64_t r = 0; r < R; ++r) {
                x[r] = fetch<A>(task.x, row_offset(task.x, n, s + r, c), length, x_buffer[r]);
                grad[r] = fetch<A>(task.grad, row_offset(task.grad, n, s + r, c), length, grad_buffer[r]);
                out[r] = grad[r];
                if constexpr (ACCUMULATE)
                  out[r] = fetch<A>(target, row_offset(target, n, s + r, c), length, out_buffer[r]);
              }
              for_each<A>(length, [&](int64_t i, auto v) {
                using V = decltype(v);
                const V scale = load<V>(scales + c + i), shift = load<V>(shifts + c + i), mean = load<V>(means + c + i);
                V sum{}, sum_x{};
                for (int64_t r = 0; r < R; ++r) {
                  const V position = load<V>(x[r] + i), g = load<V>(grad[r] + i);
                  const V m = RELU ? relu_backward<V>(g, position * scale + shift) : g;
                  sum += m;
                  sum_x += m * (position - mean);
                  store<V>(out[r] + i, ACCUMULATE ? load<V>(out[r] + i) + m * scale : m);
                }
                store<V>(sums + c + i, load<V>(sums + c + i) + sum);
                store<V>(sums_x + c + i, load<V>(sums_x + c + i) + sum_x);
              });
              for (int64_t r = 0; r < R; ++r) flush<A>(target, row_offset(target, n, s + r, c), length, out[r]);
            }
          });
      for (int64_t i = 0; i < 2 * channels; ++i) partials[i] += sums[i];
    }
  }
}

// As planes_moments.
template <typename A>
void rows_moments(const Work& work, int64_t begin_block, int64_t end_block) {
  const Task& task = work.task;
  const int64_t channels = task.channels, rows = task.images * task.positions;
  for (int64_t block = begin_block; block < end_block; ++block) {
    double *sums = work.partials + block * 2 * channels, *squares = sums + channels;
    std::fill(sums, sums + 2 * channels, 0.0);
    const int64_t begin = block * work.rows_per_block, end = std::min(rows, begin + work.rows_per_block);
    for_row_groups(task, begin, end, [&]<int64_t R>(Rows<R>, int64_t n, int64_t s) {
      for (int64_t c = 0; c < channels; c += ROW_PIECE) {
        const int64_t length = std::min(ROW_PIECE, channels - c);
        alignas(64) A x_buffer[R][ROW_PIECE];
        const A* x[R];
        for (int64_t r = 0; r < R; ++r) x[r] = fetch<A>(task.x, row_offset(task.x, n, s + r, c), length, x_buffer[r]);
        for_each<double>(length, [&](int64_t i, auto v) {
          using D = decltype(v);
          const D pivot = load<D>(work.pivots + c + i);
          D sum{}, square{};
          for (int64_t r = 0; r < R; ++r) {
            const D d = as_double<D>(x[r] + i) - pivot;
            sum += d;
            square += d * d;
          }
          store<D>(sums + c + i, load<D>(sums + c + i) + sum);
          store<D>(squares + c + i, load<D>(squares + c + i) + square);
        });
      }
    });
  }
}
