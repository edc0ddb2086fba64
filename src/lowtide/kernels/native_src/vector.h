// Vector registers and number formats. Like planes.h, rows.h and mix.h this file is included once per instruction set, inside a
// namespace, with LANE_BYTES set to the width of a register: so it has no include guard and includes nothing.

// A register full of numbers; GCC gives it + - * / and comparisons.
template <typename A, int64_t BYTES = LANE_BYTES>
struct Vector {
  typedef A type __attribute__((vector_size(BYTES)));
  static constexpr int64_t lanes = BYTES / sizeof(A);
};

template <typename V, typename A>
inline V load(const A* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <typename V, typename A>
inline void store(A* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

// Calls f(i, V{}) on as many numbers as fill a register V, then on half registers, and so on to single ones f(i, A{}).
template <typename A, int64_t BYTES = LANE_BYTES, typename F>
inline void for_each(int64_t length, const F& f, int64_t i = 0) {
  using V = typename Vector<A, BYTES>::type;
  constexpr int64_t lanes = BYTES / sizeof(A);
  for (; i + lanes <= length; i += lanes) f(i, V{});
  if constexpr (BYTES > 16) {
    for_each<A, BYTES / 2>(length, f, i);
  } else {
    for (; i < length; ++i) f(i, A{});
  }
}

// A NaN passes through, as in torch.
template <typename V>
inline V relu(V z) {
  return z < V{} ? V{} : z;
}

// The gradient behind relu; a NaN in z lets it through, as autograd's relu does.
template <typename V>
inline V relu_backward(V grad, V z) {
  return z <= V{} ? V{} : grad;
}

// Where a run of neighbours starts: positions of a map in planes, channels of a map in rows.
inline int64_t plane_offset(const Map& map, int64_t n, int64_t c, int64_t s) {
  return n * map.stride_n + c * map.stride_c + s;
}

inline int64_t row_offset(const Map& map, int64_t n, int64_t s, int64_t c) {
  return n * map.stride_n + s * map.stride_s + c;
}

// ---- maps as numbers of type A: in place, or widened from half precision into a buffer ----

template <typename A>
inline bool in_place(const Map& map) {
  return map.dtype == (sizeof(A) == 4 ? F32 : F64);
}

// Not inlined: every pass would hold several copies.
__attribute__((noinline)) void widen(const Map& map, int64_t offset, int64_t length, float* to) {
  const uint16_t* from = static_cast<const uint16_t*>(map.data) + offset;
  if (map.dtype == BF16) {
    for (int64_t i = 0; i < length; ++i) {
      const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
      __builtin_memcpy(to + i, &bits, 4);
    }
    return;
  }
  int64_t i = 0;
#if LANE_BYTES > 16
  for (; i + 8 <= length; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
  for (; i < length; ++i) to[i] = c10::detail::fp16_ieee_to_fp32_value(from[i]);
}

// Rounds to nearest, ties to even, as torch does.
__attribute__((noinline)) void narrow(const float* from, const Map& map, int64_t offset, int64_t length) {
  uint16_t* to = static_cast<uint16_t*>(map.data) + offset;
  if (map.dtype == BF16) {
    for (int64_t i = 0; i < length; ++i) {
      uint32_t bits;
      __builtin_memcpy(&bits, from + i, 4);
      const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
      to[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
    return;
  }
  int64_t i = 0;
#if LANE_BYTES > 16
  for (; i + 8 <= length; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
  for (; i < length; ++i) to[i] = c10::detail::fp16_ieee_from_fp32_value(from[i]);
}

// Where to read `length` numbers: in the map itself if it holds A, else in `buffer`, filled from the map.
template <typename A>
inline A* fetch(const Map& map, int64_t offset, int64_t length, A* buffer) {
  if (in_place<A>(map)) return static_cast<A*>(map.data) + offset;
  if constexpr (sizeof(A) == 4) widen(map, offset, length, buffer);
  return buffer;
}

// Where to write numbers: in the map itself or in `buffer`. `flush` then brings a buffer's numbers to the map.
template <typename A>
inline A* place(const Map& map, int64_t offset, A* buffer) {
  return in_place<A>(map) ? static_cast<A*>(map.data) + offset : buffer;
}

template <typename A>
inline void flush(const Map& map, int64_t offset, int64_t length, const A* buffer) {
  if (in_place<A>(map)) return;
  if constexpr (sizeof(A) == 4) narrow(buffer, map, offset, length);
}

// As many numbers of type A as fill D, a register of doubles or a single double, converted.
template <typename D, typename A>
inline D as_double(const A* p) {
  if constexpr (std::is_same_v<D, double>) {
    return *p;
  } else {
    typedef A Narrow __attribute__((vector_size(sizeof(D) / sizeof(double) * sizeof(A))));
    return __builtin_convertvector(load<Narrow>(p), D);
  }
}
