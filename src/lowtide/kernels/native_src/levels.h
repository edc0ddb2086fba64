// Compiles LOOPS_FILE once per instruction set, with `loops[]` in each: LOOPS_OF(float) and LOOPS_OF(double). Included once by a
// .cpp inside its unnamed namespace, after it defined `struct Loops`, LOOPS_OF and LOOPS_FILE.

namespace baseline {
#define LANE_BYTES 16
#include "vector.h"
#include LOOPS_FILE
#undef LANE_BYTES
const Loops loops[] = {LOOPS_OF(float), LOOPS_OF(double)};
}  // namespace baseline

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#define LANE_BYTES 32
#include "vector.h"
#include LOOPS_FILE
#undef LANE_BYTES
const Loops loops[] = {LOOPS_OF(float), LOOPS_OF(double)};
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace avx512 {
#define LANE_BYTES 64
#include "vector.h"
#include LOOPS_FILE
#undef LANE_BYTES
const Loops loops[] = {LOOPS_OF(float), LOOPS_OF(double)};
}  // namespace avx512
#pragma GCC pop_options
#endif

// `level`: see lowtide_highest_level.
const Loops& loops_for(bool is_double, int64_t level) {
#if defined(__x86_64__)
  if (level == 2) return avx512::loops[is_double];
  if (level == 1) return avx2::loops[is_double];
#endif
  return baseline::loops[is_double];
}
