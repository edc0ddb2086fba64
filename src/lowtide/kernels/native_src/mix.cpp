// A norm, relu and a 1x1 convolution in one sweep over maps in rows, and its backward: how the loops of mix.h are shared out
// over torch's threads, and their partial results added up. Python calls the extern "C" functions at the end, see native.py.

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

// The loops of one instruction set for one type of arithmetic.
struct Loops {
  void (*forward)(const MixTask&, const void* packed, int64_t begin, int64_t end);
  void (*convolve)(const MixTask&, const void* packed, int64_t n, int64_t first, int64_t last);
  void (*backward)(const MixTask&, const void* packed, const MixSlice&, int64_t begin, int64_t end);
  int64_t lanes;
};

#define LOOPS_OF(A) {mix_forward<A>, convolve_forward<A>, mix_backward<A>, Vector<A>::lanes}

#define LOOPS_FILE "mix.h"
#include "levels.h"

// Below this many multiplications a second thread costs more than it saves.
constexpr int64_t PRODUCTS_PER_THREAD = 131072;

int64_t products_of(const MixTask& task) {
  int64_t products = task.outputs;
  for (const int64_t reach : task.reach) products *= 2 * reach + 1;
  return products;
}

// W (TAPS * K, C) with rows of whole vectors; TRANSPOSED: its transpose.
template <typename A>
std::unique_ptr<A[]> pack(const MixTask& task, int64_t lanes, bool transposed) {
  const A* weight = static_cast<const A*>(task.weight);
  const int64_t products = products_of(task), inputs = task.inputs;
  const int64_t rows = transposed ? inputs : products, columns = transposed ? products : inputs;
  const int64_t padded = (columns + lanes - 1) / lanes * lanes;
  std::unique_ptr<A[]> packed(new A[rows * padded]());
  constexpr int64_t strip = 16;  // of columns: a transpose that reads and writes whole cache lines
  for (int64_t first = 0; first < inputs; first += strip)
    for (int64_t k = 0; k < products; ++k)
      for (int64_t c = first; c < std::min(inputs, first + strip); ++c)
        packed[transposed ? c * padded + k : k * padded + c] = weight[k * inputs + c];
  return packed;
}

template <typename A>
void forward_by(const MixTask& task, const Loops& loops) {
  const auto packed = pack<A>(task, loops.lanes, true);
  const int64_t products = products_of(task), per_row = std::max<int64_t>(1, task.inputs * products);
  if (products == task.outputs) {
    const int64_t grain = std::max<int64_t>(6, PRODUCTS_PER_THREAD / per_row);
    at::parallel_for(0, task.images * task.positions, grain, [&](int64_t begin, int64_t end) {
      loops.forward(task, packed.get(), begin, end);
    });
    return;
  }
  // whole images, or, where there are few, parts of them along the outermost axis: what lies on the border of two parts is
  // multiplied for both
  const int64_t steps = task.grid[0] > 1 ? task.grid[0] : task.grid[1] > 1 ? task.grid[1] : task.grid[2];
  const int64_t step = task.positions / std::max<int64_t>(1, steps), threads = at::get_num_threads();
  const int64_t parts = task.images >= 4 * threads ? 1 : std::min(steps, (2 * threads - 1) / std::max<int64_t>(1, task.images) + 1);
  const int64_t per_part = (steps + parts - 1) / std::max<int64_t>(1, parts) * step;
  at::parallel_for(0, task.images * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % parts * per_part, last = std::min(task.positions, first + per_part);
      if (first < last) loops.convolve(task, packed.get(), i / parts, first, last);
    }
  });
}

template <typename A>
void backward_by(const MixTask& task, const Loops& loops) {
  const auto packed = pack<A>(task, loops.lanes, false);
  const int64_t rows = task.images * task.positions, inputs = task.inputs, products = products_of(task);
  const int64_t padded = (inputs + loops.lanes - 1) / loops.lanes * loops.lanes;
  const int64_t dweight_size = (products + 5) / 6 * 6 * padded;  // whole tiles, see mix.h
  // one slice per thread, each with its own weight gradient; they are added up in order
  const int64_t slices = std::clamp<int64_t>(at::get_num_threads(), 1, std::clamp<int64_t>(rows / 256, 1, 16));
  const int64_t per_slice = (rows + slices - 1) / slices;
  std::unique_ptr<double[]> sums(new double[slices * 2 * inputs]());
  std::unique_ptr<A[]> dweight(task.dweight == nullptr ? nullptr : new A[slices * dweight_size]());
  at::parallel_for(0, slices, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const MixSlice slice{sums.get() + i * 2 * inputs, dweight == nullptr ? nullptr : dweight.get() + i * dweight_size};
      loops.backward(task, packed.get(), slice, i * per_slice, std::min(rows, (i + 1) * per_slice));
    }
  });
  for (int64_t i = 0; i < slices; ++i) {
    for (int64_t c = 0; c < inputs && task.sums != nullptr; ++c) {
      static_cast<A*>(task.sums)[c] += static_cast<A>(sums[i * 2 * inputs + c]);
      static_cast<A*>(task.sums_x)[c] += static_cast<A>(sums[(i * 2 + 1) * inputs + c]);
    }
    for (int64_t k = 0; k < products && task.dweight != nullptr; ++k)
      for (int64_t c = 0; c < inputs; ++c)
        static_cast<A*>(task.dweight)[k * inputs + c] += dweight[i * dweight_size + k * padded + c];
  }
}

}  // namespace

extern "C" {

int64_t lowtide_mix_task_bytes() { return sizeof(MixTask); }

void lowtide_mix_forward(const MixTask* task, int64_t level) {
  const Loops& loops = loops_for(task->x.dtype == F64, level);
  task->x.dtype == F64 ? forward_by<double>(*task, loops) : forward_by<float>(*task, loops);
}

void lowtide_mix_backward(const MixTask* task, int64_t level) {
  const Loops& loops = loops_for(task->x.dtype == F64, level);
  task->x.dtype == F64 ? backward_by<double>(*task, loops) : backward_by<float>(*task, loops);
}

}  // extern "C"
