// The rows of one call on the CPU, compiled once for every instruction set, which NAME names.
//
// A row is read into registers, summed up in float lanes that are emptied into doubles every 64
// vectors, and read again from the first-level cache for the result. Where the squares leave the
// range of a float (overflow, or so small that they lose digits and eps does not hide it) the row is
// done again in double, one number at a time.
#include <math.h>

#include "call.h"
#include "simd.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define HAS(name) JOIN(has_, name)
#define ROWS(name) JOIN(rows_, name)
#define WIDEN(name) JOIN(widen_, name)

namespace {

const int UNROLLED = 4, BLOCK = 16;  // accumulators, and vectors that each takes before a double

template <class T> INLINE typename Wide<T>::type take(const T* p, int64_t n) {
  return n == Wide<T>::lanes ? load(p) : load_some(p, n);
}

// Sums f(i, n) over a row, where f gives the vector at i, of which n elements count.
template <class T, class F> INLINE double summed(int64_t d, F f) {
  typedef typename Wide<T>::type V;
  const int W = Wide<T>::lanes;
  Doubles total = {};
  int64_t i = 0;
  while (i + W <= d) {
    V a[UNROLLED] = {};
    int64_t end = i + (int64_t)BLOCK * UNROLLED * W;
    if (end > d) end = d;
    for (; i + UNROLLED * W <= end; i += UNROLLED * W) {
#pragma GCC unroll 4
      for (int k = 0; k < UNROLLED; k++) a[k] += f(i + k * W, W);
    }
    for (; i + W <= end; i += W) a[0] += f(i, W);
    total += widened((a[0] + a[1]) + (a[2] + a[3]));
  }
  if (i < d) total += widened(f(i, d - i));
  return added(total);
}

template <class T, class F> double sum_up(const T* x, int64_t d, F f) {
  return summed<T>(d, [&](int64_t i, int64_t n) INLINE_LAMBDA { return f(take(x + i, n)); });
}

// Writes s = x + r on the way.
template <class T, class F> double sum_of_sums(T* s, const T* x, const T* r, int64_t d, F f) {
  return summed<T>(d, [&](int64_t i, int64_t n) INLINE_LAMBDA {
    auto v = as_stored(take(x + i, n) + take(r + i, n), x);
    if (n == Wide<T>::lanes) store(s + i, v);
    else store_some(s + i, v, n);
    return f(v);
  });
}

template <class T, class S> double sum_of_deviations(const T* x, int64_t d, S mean) {
  typedef typename Wide<T>::type V;
  const int L = Wide<T>::lanes;
  return summed<T>(d, [&](int64_t i, int64_t n) INLINE_LAMBDA {
    V v = take(x + i, n) - (V{} + mean);
    for (int64_t k = n; k < L; k++) v[k] = 0;  // what lies after the row's end
    return v * v;
  });
}

// y = (x - mean) * scale * w + b; the parameters are as wide as what is computed in.
template <class T, bool W, bool B>
void write(T* y, const T* x, const typename Wide<T>::scalar* w, const typename Wide<T>::scalar* b,
           int64_t d, double mean, double scale) {
  typedef typename Wide<T>::type V;
  typedef typename Wide<T>::scalar S;
  const V m = V{} + (S)mean, r = V{} + (S)scale;
  auto result = [&](int64_t i, int64_t n) INLINE_LAMBDA {
    V v = (take(x + i, n) - m) * r;
    if (W && B) return v * take(w + i, n) + take(b + i, n);
    if (W) return v * take(w + i, n);
    if (B) return v + take(b + i, n);
    return v;
  };
  const int L = Wide<T>::lanes;
  int64_t i = 0;
  for (; i + 2 * L <= d; i += 2 * L) {
    V first = result(i, L), second = result(i + L, L);
    store(y + i, first);
    store(y + i + L, second);
  }
  if (i + L <= d) {
    store(y + i, result(i, L));
    i += L;
  }
  if (i < d) store_some(y + i, result(i, d - i), d - i);
}

// A row whose sums do not fit into floats; doubles that do not fit are scaled by a power of two.
template <class T>
__attribute__((noinline)) void careful(T* y, const T* x, const typename Wide<T>::scalar* w,
                                       const typename Wide<T>::scalar* b, int64_t d, double eps,
                                       bool layer) {
  double largest = 0, shrink = 1, mean = 0, sum = 0;
  for (int64_t i = 0; i < d; i++) {
    double v = fabs(one(x + i));
    if (!(v <= largest)) largest = v;  // NaN too
    if (v != v) break;
  }
  if (largest > 1e150) shrink = 1e-200;
  double bad = largest * 0;  // NaN where the row has an Inf or a NaN
  for (int64_t i = 0; layer && i < d; i++) mean += one(x + i) * shrink / d;
  for (int64_t i = 0; i < d; i++) {
    double v = one(x + i) * shrink - mean;
    sum += v * v;
  }
  double scale = 1 / sqrt(sum / d + eps * shrink * shrink) + bad;
  for (int64_t i = 0; i < d; i++) {
    double v = (one(x + i) * shrink - mean) * scale;
    if (w) v *= w[i];
    if (b) v += b[i];
    put(y + i, v);
  }
}

template <class T> void rows(const Call& c, int64_t begin, int64_t end) {
  typedef typename Wide<T>::type V;
  typedef typename Wide<T>::scalar S;
  const S *w = (const S*)c.w, *b = (const S*)c.b;
  const int64_t d = c.d;
  const bool layer = c.layer;
  const double largest = sizeof(S) == 8 ? 1e300 : 3e38;
  auto square = [](V v) INLINE_LAMBDA { return v * v; };
  auto itself = [](V v) INLINE_LAMBDA { return v; };
  for (int64_t row = begin; row < end; row++) {
    const T* x = (const T*)c.x + row * d;
    T* y = (T*)c.y + row * d;
    double sum, mean = 0;
    if (c.r) {
      T* s = (T*)c.s + row * d;
      const T* r = (const T*)c.r + row * d;
      sum = layer ? sum_of_sums(s, x, r, d, itself) : sum_of_sums(s, x, r, d, square);
      x = s;
    } else {
      sum = layer ? sum_up<T>(x, d, itself) : sum_up<T>(x, d, square);
    }
    if (layer) {
      mean = sum / d;
      sum = sum_of_deviations(x, d, (S)mean);
    }
    const double variance = sum / d;
    if (!(sum <= largest) || (variance < 1e-30 && c.eps < 1e-23 && sizeof(S) == 4)) {
      careful(y, x, w, b, d, c.eps, layer);
      continue;
    }
    const double scale = 1 / sqrt(variance + c.eps);
    if (w && b) write<T, true, true>(y, x, w, b, d, mean, scale);
    else if (w) write<T, true, false>(y, x, w, b, d, mean, scale);
    else if (b) write<T, false, true>(y, x, w, b, d, mean, scale);
    else write<T, false, false>(y, x, w, b, d, mean, scale);
  }
}

template <class T> void widen(float* to, const T* from, int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, load(from + i));
  if (i < n) store_some(to + i, load_some(from + i, n - i), n - i);
}

}  // namespace

#define HIDDEN extern "C" __attribute__((visibility("hidden")))

// Whether the instruction set has a way with the dtype.
HIDDEN int HAS(NAME)(Dtype dtype) { return dtype != F16 || HAS_HALF; }

// Computes the rows from begin to end; the parameters are float32, or float64 for float64.
HIDDEN void ROWS(NAME)(const Call* c, int64_t begin, int64_t end) {
  if (c->dtype == F32) rows<float>(*c, begin, end);
  if (c->dtype == F64) rows<double>(*c, begin, end);
  if (c->dtype == BF16) rows<bfloat>(*c, begin, end);
#if HAS_HALF
  if (c->dtype == F16) rows<half>(*c, begin, end);
#endif
}

// n parameters of a narrower dtype as float32.
HIDDEN void WIDEN(NAME)(float* to, const void* from, Dtype dtype, int64_t n) {
  if (dtype == BF16) widen(to, (const bfloat*)from, n);
#if HAS_HALF
  if (dtype == F16) widen(to, (const half*)from, n);
#endif
}
