// RMSNorm of rows on a CPU, forward only, as a library with a plain C interface:
//
//     y = x / sqrt(mean(x^2) + eps) * weight + bias
//
// setuptools compiles this file when the package is installed. It needs no headers of torch or
// Python. It includes itself once for each level of processors; the best one is used.
#ifndef LEVEL
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT extern "C" __attribute__((visibility("default")))

enum Dtype : int64_t { F32, F16, BF16 };

// The arguments of a call, in the order in which cpu.py packs them. All tensors have one dtype. A
// row is `d` elements long, and rows follow each other. `weight` and `bias` may be null.
struct Call {
  const void* x;
  void* y;
  const void *weight, *bias;
  int64_t rows, d;
  double eps;
  Dtype dtype;
};

struct Half { uint16_t bits; };
struct Bfloat { uint16_t bits; };

#if defined(__x86_64__) && !defined(__clang__)  // which has no such pragma
#define LEVEL avx512
#define LANES 16
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#include "rms_norm.cpp"
#pragma GCC pop_options
#undef LEVEL
#undef LANES
#define LEVEL avx2
#define LANES 8
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include "rms_norm.cpp"
#pragma GCC pop_options
#undef LEVEL
#undef LANES
#define HAS_LEVELS
#endif
#define LEVEL plain
#define LANES 4
#include "rms_norm.cpp"

// torch's `torch_parallel_for`, or null for one thread.
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain,
                               void (*function)(int64_t, int64_t, void*), void* context);
static ParallelFor parallel_for = nullptr;
static void (*rows)(const Call&, int64_t begin, int64_t end) = plain::rows;

// Chooses a level by its name. Returns whether this processor runs it.
EXPORT int32_t enjoyln_use(const char* name, ParallelFor function) {
  parallel_for = function;
#ifdef HAS_LEVELS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!strcmp(name, "avx512") && avx512) return rows = avx512::rows, 1;
  if (!strcmp(name, "avx2") && avx2) return rows = avx2::rows, 1;
#endif
  return strcmp(name, "plain") ? 0 : (rows = plain::rows, 1);
}

EXPORT void enjoyln_rms_norm(const Call* call) {
  const int64_t grain = 32768 / call->d + 1;  // rows for which a second thread saves no time
  const auto some = [](int64_t begin, int64_t end, void* given) {
    rows(*(const Call*)given, begin, end);
  };
  const bool serial = !parallel_for || call->rows <= grain;
  if (serial || parallel_for(0, call->rows, grain, some, (void*)call)) rows(*call, 0, call->rows);
}
#else

namespace LEVEL {

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef float Quarter __attribute__((vector_size(16)));
struct Two { Floats a, b; };
const int64_t PACK = 2 * LANES;

template <class V, class T> INLINE V raw(const T* p) { V v; memcpy(&v, p, sizeof v); return v; }
template <class V, class T> INLINE void put(T* p, V v) { memcpy(p, &v, sizeof v); }

// PACK elements, as floats. Bfloats are in an order that needs no shuffle: the even elements first.
INLINE Two load(const float* p) { return {raw<Floats>(p), raw<Floats>(p + LANES)}; }
INLINE Two load(const Bfloat* p) {
  const Words v = raw<Words>(p);
  return {(Floats)(v << 16), (Floats)(v & 0xffff0000u)};
}
INLINE void store(float* p, Two v) { put(p, v.a); put(p + LANES, v.b); }

// Rounds to nearest; a value halfway between two bfloats away from zero. NaNs stay NaNs: those that
// come from bfloats have no bits in the lower half.
INLINE void store(Bfloat* p, Two v) {
  put(p, (((Words)v.a + 0x8000u) >> 16) | (((Words)v.b + 0x8000u) & 0xffff0000u));
}

#if LANES == 16
INLINE Floats halves(const Half* p) { return (Floats)_mm512_cvtph_ps(raw<__m256i>(p)); }
INLINE void put_halves(Half* p, Floats v) { put(p, _mm512_cvtps_ph((__m512)v, 0)); }
#elif LANES == 8
INLINE Floats halves(const Half* p) { return (Floats)_mm256_cvtph_ps(raw<__m128i>(p)); }
INLINE void put_halves(Half* p, Floats v) { put(p, _mm256_cvtps_ph((__m256)v, 0)); }
#endif
#if LANES > 4  // else there are no instructions for them, and torch's LayerNorm is faster
INLINE Two load(const Half* p) { return {halves(p), halves(p + LANES)}; }
INLINE void store(Half* p, Two v) { put_halves(p, v.a); put_halves(p + LANES, v.b); }
#endif

// The first n elements, at most PACK; a load fills the vectors with zeros.
template <class T> INLINE Two load(const T* p, int64_t n) {
  if (n >= PACK) return load(p);
  T all[PACK] = {};
  memcpy(all, p, n * sizeof(T));
  return load(all);
}
template <class T> INLINE void store(T* p, Two v, int64_t n) {
  if (n >= PACK) return store(p, v);
  T all[PACK];
  store(all, v);
  memcpy(p, all, n * sizeof(T));
}

INLINE double total(Floats v) {
  Quarter all[LANES / 4];
  memcpy(all, &v, sizeof v);
  for (int n = LANES / 8; n; n /= 2)
    for (int i = 0; i < n; i++) all[i] += all[i + n];
  return (double)(all[0][0] + all[0][1]) + (double)(all[0][2] + all[0][3]);
}

// Blocks are summed in float, and added up in double.
const int64_t BLOCK = 32 * LANES;
template <class T> INLINE double sum_of_squares(const T* x, int64_t d) {
  double sum = 0;
  for (int64_t i = 0; i < d;) {
    const int64_t end = d - i < BLOCK ? d : i + BLOCK;
    Floats sums[4] = {};
    for (; i + 2 * PACK <= end; i += 2 * PACK) {
      const Two v = load(x + i), w = load(x + i + PACK);
      sums[0] += v.a * v.a;
      sums[1] += v.b * v.b;
      sums[2] += w.a * w.a;
      sums[3] += w.b * w.b;
    }
    for (; i < end; i += PACK) {
      const Two v = load(x + i, end - i);
      sums[0] += v.a * v.a;
      sums[1] += v.b * v.b;
    }
    sum += total((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
  return sum;
}

// What a row is multiplied by: by `first`, which is a power of two, and then by `second`.
struct Factor { float first, second; };

template <class T> INLINE Factor factor_of(const T* x, int64_t d, double eps) {
  double squares = sum_of_squares(x, d);
  if (!(squares <= 1e38 && squares >= 1e-20)) {  // too large or too small for floats
    squares = 0;
    for (int64_t i = 0; i < d; i++) {
      const double v = load(x + i, 1).a[0];
      squares += v * v;
    }
  }
  // NaN for a row with an Inf or a NaN, as torch's LayerNorm makes it.
  const double factor = squares < INFINITY ? 1 / sqrt(squares / d + eps) : NAN;
  const float first = factor < 1e-30 ? 0x1p-64f : factor > 1e30 ? 0x1p64f : 1;
  return {first, (float)(factor / first)};
}

// Computes K rows together, so that weight and bias are loaded once.
template <class T, int K> INLINE void norm(const Call& c, int64_t row) {
  const int64_t d = c.d;
  const T *x = (const T*)c.x + row * d, *weight = (const T*)c.weight, *bias = (const T*)c.bias;
  T* y = (T*)c.y + row * d;
  Factor factors[K];
  for (int k = 0; k < K; k++) factors[k] = factor_of(x + k * d, d, c.eps);
  const auto write = [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    Two w = {}, b = {};
    if (weight) w = load(weight + i, n);
    if (bias) b = load(bias + i, n);
    for (int k = 0; k < K; k++) {
      const Factor f = factors[k];
      Two v = load(x + k * d + i, n);
      v = {v.a * f.first * f.second, v.b * f.first * f.second};
      if (weight) v = {v.a * w.a, v.b * w.b};
      if (bias) v = {v.a + b.a, v.b + b.b};
      store(y + k * d + i, v, n);
    }
  };
  int64_t i = 0;
  for (; i + PACK <= d; i += PACK) write(i, PACK);
  if (i < d) write(i, d - i);
}

template <class T> static void norms(const Call& c, int64_t begin, int64_t end) {
  for (; begin + 4 <= end; begin += 4) norm<T, 4>(c, begin);
  for (; begin < end; begin++) norm<T, 1>(c, begin);
}

static void rows(const Call& c, int64_t begin, int64_t end) {
#if LANES > 4
  if (c.dtype == F16) return norms<Half>(c, begin, end);
#endif
  (c.dtype == F32 ? norms<float> : norms<Bfloat>)(c, begin, end);
}

}  // namespace LEVEL
#endif
