// The passes over maps in planes: x[n, c] is a run of neighbouring positions. Work is done in pieces of at most PIECE of them.

constexpr int64_t PIECE = 1024;
constexpr int64_t CHANNEL_BLOCK = 32;  // channels whose sums are on the stack at once

// f(n, c, s, length) for every piece of the rows begin..end, numbered n * C + c.
template <typename F>
inline void for_pieces(const Task& task, int64_t begin, int64_t end, const F& f) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t s = 0; s < task.positions; s += PIECE)
      f(row / task.channels, row % task.channels, s, std::min(PIECE, task.positions - s));
}

template <typename A, bool RELU>
void planes_scale_shift_act(const Work& work, int64_t begin, int64_t end) {
  const Task& task = work.task;
  for_pieces(task, begin, end, [&](int64_t n, int64_t c, int64_t s, int64_t length) {
    alignas(64) A x_buffer[PIECE], out_buffer[PIECE];
    const A scale = static_cast<const A*>(task.scale)[c], shift = static_cast<const A*>(task.shift)[c];
    const A* x = fetch<A>(task.x, plane_offset(task.x, n, c, s), length, x_buffer);
    A* out = place<A>(task.out, plane_offset(task.out, n, c, s), out_buffer);
    for_each<A>(length, [&](int64_t i, auto v) {
      using V = decltype(v);
      const V z = load<V>(x + i) * scale + shift;
      store<V>(out + i, RELU ? relu(z) : z);
    });
    flush<A>(task.out, plane_offset(task.out, n, c, s), length, out);
  });
}

template <typename A, bool SCALED>
void planes_affine_add(const Work& work, int64_t begin, int64_t end) {
  const Task& task = work.task;
  for_pieces(task, begin, end, [&](int64_t n, int64_t c, int64_t s, int64_t length) {
    alignas(64) A x_buffer[PIECE], grad_buffer[PIECE];
    const A slope = static_cast<const A*>(task.shift)[c], offset = static_cast<const A*>(task.mean)[c];
    const A scale = SCALED ? static_cast<const A*>(task.scale)[c] : A{1};
    const A* x = fetch<A>(task.x, plane_offset(task.x, n, c, s), length, x_buffer);
    A* grad = fetch<A>(task.grad, plane_offset(task.grad, n, c, s), length, grad_buffer);
    for_each<A>(length, [&](int64_t i, auto v) {
      using V = decltype(v);
      const V correction = load<V>(x + i) * slope + offset;
      store<V>(grad + i, SCALED ? load<V>(grad + i) * scale + correction : load<V>(grad + i) + correction);
    });
    flush<A>(task.grad, plane_offset(task.grad, n, c, s), length, grad);
  });
}

// x in planes, out in rows: squares of SIDE x SIDE, so that both sides are read and written by whole cache lines.
template <typename A, bool RELU>
void planes_to_rows_scale_shift_act(const Work& work, int64_t begin, int64_t end) {
  constexpr int64_t SIDE = 32;  // as in passes.cpp
  const Task& task = work.task;
  const int64_t strips = (task.positions + SIDE - 1) / SIDE;  // the items are strips of SIDE positions of one image
  for (int64_t item = begin; item < end; ++item) {
    const int64_t n = item / strips, s = item % strips * SIDE, height = std::min(SIDE, task.positions - s);
    for (int64_t c = 0; c < task.channels; c += SIDE) {
      const int64_t width = std::min(SIDE, task.channels - c);
      alignas(64) A x_buffer[SIDE], square[SIDE][SIDE], out_buffer[SIDE];
      for (int64_t j = 0; j < width; ++j) {
        const A scale = static_cast<const A*>(task.scale)[c + j], shift = static_cast<const A*>(task.shift)[c + j];
        const A* x = fetch<A>(task.x, plane_offset(task.x, n, c + j, s), height, x_buffer);
        for_each<A>(height, [&](int64_t i, auto v) {
          using V = decltype(v);
          const V z = load<V>(x + i) * scale + shift;
          store<V>(square[j] + i, RELU ? relu(z) : z);
        });
      }
      for (int64_t i = 0; i < height; ++i) {
        const int64_t offset = row_offset(task.out, n, s + i, c);
        A* out = place<A>(task.out, offset, out_buffer);
        for (int64_t j = 0; j < width; ++j) out[j] = square[j][i];
        flush<A>(task.out, offset, width, out);
      }
    }
  }
}

// ---- passes with sums over N and S: a thread owns whole channels, so no two threads touch one sum ----

using Doubles = Vector<double>::type;

// One sum, in double lanes.
struct Sum {
  Doubles lanes{};
  double tail = 0;
  void add(double v) { tail += v; }
  void add(Doubles v) { lanes += v; }
  template <typename V>
  void add(V v) {
    for (size_t i = 0; i < sizeof(V) / sizeof(v[0]); ++i) tail += v[i];
  }
  double total() const {
    double total = tail;
    for (int64_t i = 0; i < Vector<double>::lanes; ++i) total += lanes[i];
    return total;
  }
};

// The same sum over one piece, in A: a lane adds PIECE / lanes numbers at most before they go to double.
template <typename A>
struct PieceSum {
  using V = typename Vector<A>::type;
  V lanes{};
  double tail = 0;
  void add(V v) { lanes += v; }
  void add(A v) { tail += v; }
  template <typename Narrow>
  void add(Narrow v) {
    for (size_t i = 0; i < sizeof(Narrow) / sizeof(A); ++i) tail += v[i];
  }
  void add_to(Sum& sum) const {
    typedef A Part __attribute__((vector_size(LANE_BYTES / 8 * sizeof(A))));  // as many numbers as Doubles holds
    for (size_t first = 0; first < sizeof(V); first += sizeof(Part))
      sum.lanes += __builtin_convertvector(load<Part>(reinterpret_cast<const char*>(&lanes) + first), Doubles);
    sum.tail += tail;
  }
};

// f(n, c, s, length, index) for every piece of the channels begin..end, an image's channels together; then done(c, index).
template <typename F, typename G>
inline void for_channels(const Task& task, int64_t begin, int64_t end, const F& f, const G& done) {
  for (int64_t first = begin; first < end; first += CHANNEL_BLOCK) {
    const int64_t last = std::min(end, first + CHANNEL_BLOCK);
    for (int64_t n = 0; n < task.images; ++n)
      for (int64_t c = first; c < last; ++c)
        for (int64_t s = 0; s < task.positions; s += PIECE)
          f(n, c, s, std::min(PIECE, task.positions - s), c - first);
    for (int64_t c = first; c < last; ++c) done(c, c - first);
  }
}

// The gradient behind the activation, m = grad * act'(scale * x + shift), and its two sums.
// ACCUMULATE: out += scale * m and grad stays; otherwise grad = m.
template <typename A, bool RELU, bool ACCUMULATE>
void planes_act_backward(const Work& work, int64_t begin, int64_t end) {
  const Task& task = work.task;
  const Map& target = ACCUMULATE ? task.out : task.grad;
  Sum sums[CHANNEL_BLOCK] = {}, sums_x[CHANNEL_BLOCK] = {};
  for_channels(
      task, begin, end,
      [&](int64_t n, int64_t c, int64_t s, int64_t length, int64_t index) {
        alignas(64) A x_buffer[PIECE], grad_buffer[PIECE], out_buffer[PIECE];
        const A scale = static_cast<const A*>(task.scale)[c], shift = static_cast<const A*>(task.shift)[c];
        const A mean = static_cast<const A*>(task.mean)[c];
        const A* x = fetch<A>(task.x, plane_offset(task.x, n, c, s), length, x_buffer);
        A* grad = fetch<A>(task.grad, plane_offset(task.grad, n, c, s), length, grad_buffer);
        A* out = ACCUMULATE ? fetch<A>(target, plane_offset(target, n, c, s), length, out_buffer) : grad;
        PieceSum<A> sum, sum_x;
        for_each<A>(length, [&](int64_t i, auto v) {
          using V = decltype(v);
          const V position = load<V>(x + i), g = load<V>(grad + i);
          const V m = RELU ? relu_backward<V>(g, position * scale + shift) : g;
          sum.add(m);
          sum_x.add(m * (position - mean));
          store<V>(out + i, ACCUMULATE ? load<V>(out + i) + m * scale : m);
        });
        flush<A>(target, plane_offset(target, n, c, s), length, out);
        sum.add_to(sums[index]);
        sum_x.add_to(sums_x[index]);
      },
      [&](int64_t c, int64_t index) {
        work.partials[c] = sums[index].total();
        work.partials[task.channels + c] = sums_x[index].total();
        sums[index] = sums_x[index] = Sum{};
      });
}

// sum(x - pivot) and sum((x - pivot)^2), in double from the start.
template <typename A>
void planes_moments(const Work& work, int64_t begin, int64_t end) {
  const Task& task = work.task;
  Sum sums[CHANNEL_BLOCK] = {}, squares[CHANNEL_BLOCK] = {};
  for_channels(
      task, begin, end,
      [&](int64_t n, int64_t c, int64_t s, int64_t length, int64_t index) {
        alignas(64) A x_buffer[PIECE];
        const A* x = fetch<A>(task.x, plane_offset(task.x, n, c, s), length, x_buffer);
        const double pivot = work.pivots[c];
        Sum &sum = sums[index], &square = squares[index];
        for_each<double>(length, [&](int64_t i, auto v) {
          const auto d = as_double<decltype(v)>(x + i) - pivot;
          sum.add(d);
          square.add(d * d);
        });
      },
      [&](int64_t c, int64_t index) {
        work.partials[c] = sums[index].total();
        work.partials[task.channels + c] = squares[index].total();
        sums[index] = squares[index] = Sum{};
      });
}
