// The rows of one call on the CPU, compiled once for every instruction set, which NAME names.
//
// A few rows at a time are summed up and then written, so that the wait for one row's square root is
// spent on another's sum, and the parameters are read once for two rows. Sums are kept in float
// lanes that are emptied into doubles every BLOCK vectors. Where the squares leave the range of a
// float (overflow, or so small that they lose digits and eps does not hide it) the row is done again
// in double, one number at a time.
#include <math.h>

#include "call.h"
#include "simd.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define HAS(name) JOIN(has_, name)
#define ROWS(name) JOIN(rows_, name)
#define WIDEN(name) JOIN(widen_, name)

namespace {

const int BLOCK = LANES > 8 ? 8 : 4;  // vectors for each float sum, before it goes into a double
const int MANY = 4;                   // rows at a time

template <class T> using Vec = typename Wide<T>::type;
template <class T> using Scalar = typename Wide<T>::scalar;

// Adds f(i) over the steps of two vectors and rest(i, n) over the n elements that are left.
// f and rest take their index and give what it adds to the sum, f to two sums.
template <class T, class F, class G> INLINE double summed(int64_t d, F f, G rest) {
  const int L = Wide<T>::lanes;
  Doubles total = {};
  int64_t i = 0;
  while (i + 2 * L <= d) {
    Vec<T> a = {}, b = {}, e = {}, g = {};
    int64_t end = i + (int64_t)BLOCK * 4 * L;
    if (end > d) end = d;
    for (; sizeof(T) == 2 && i + 8 * L <= end; i += 8 * L) {
      f(i, a, b);
      f(i + 2 * L, e, g);
      f(i + 4 * L, b, a);  // for those that add to the first alone
      f(i + 6 * L, g, e);
    }
    for (; i + 4 * L <= end; i += 4 * L) {
      f(i, a, b);
      f(i + 2 * L, e, g);
    }
    if (i + 2 * L <= end) {
      f(i, a, b);
      i += 2 * L;
    }
    total += widened((a + b) + (e + g));
  }
  for (; i < d; i += L) total += widened(rest(i, d - i < L ? d - i : L));
  return added(total);
}

template <class T> double sum(const T* x, int64_t d) {
  return summed<T>(
      d,
      [&](int64_t i, Vec<T>& a, Vec<T>& b) INLINE_LAMBDA {
        auto v = load_two(x + i);
        a += v.a;
        b += v.b;
      },
      [&](int64_t i, int64_t n) INLINE_LAMBDA { return load_some(x + i, n); });
}

// The processor multiplies and adds pairs of bfloat16 by itself.
template <class T> INLINE void add_squares(const T* x, Vec<T>& a, Vec<T>& b) {
  auto v = load_two(x);
  a += v.a * v.a;
  b += v.b * v.b;
}
#if defined(__AVX512BF16__)
INLINE void add_squares(const bfloat* x, Floats& a, Floats&) {
  __m512bh v = raw_load<__m512bh>(x);
  a = (Floats)_mm512_dpbf16_ps((__m512)a, v, v);
}
#endif

template <class T> double sum_of_squares(const T* x, int64_t d) {
  return summed<T>(
      d, [&](int64_t i, Vec<T>& a, Vec<T>& b) INLINE_LAMBDA { add_squares(x + i, a, b); },
      [&](int64_t i, int64_t n) INLINE_LAMBDA {
        auto v = load_some(x + i, n);
        return v * v;
      });
}

template <class T> double sum_of_deviations(const T* x, int64_t d, double mean) {
  const Vec<T> m = Vec<T>{} + (Scalar<T>)mean;
  return summed<T>(
      d,
      [&](int64_t i, Vec<T>& a, Vec<T>& b) INLINE_LAMBDA {
        auto v = load_two(x + i);
        v.a -= m;
        v.b -= m;
        a += v.a * v.a;
        b += v.b * v.b;
      },
      [&](int64_t i, int64_t n) INLINE_LAMBDA {
        auto v = load_some(x + i, n) - m;
        for (int64_t k = n; k < Wide<T>::lanes; k++) v[k] = 0;  // what lies after the row's end
        return v * v;
      });
}

// s = x + r for two vectors, as the dtype stores it, and what was stored to the sums, or its squares.
template <class T, bool LAYER>
INLINE void add_two(T* s, const T* x, const T* r, Vec<T>& a, Vec<T>& b) {
  auto v = load_two(x), u = load_two(r);
  store_two(s, Two<Vec<T>>{v.a + u.a, v.b + u.b});
  if (!LAYER) return add_squares(s, a, b);
  v = load_two(s);
  a += v.a;
  b += v.b;
}
#if defined(__AVX512BF16__)
template <class T, bool LAYER>
INLINE void add_two(bfloat* s, const bfloat* x, const bfloat* r, Floats& a, Floats&) {
  const auto v = load_two<true>(x), u = load_two<true>(r);
  const __m512i sum = joined({v.a + u.a, v.b + u.b});
  raw_store(s, sum);
  const __m512bh factor = LAYER ? (__m512bh)_mm512_set1_epi16(0x3f80) : (__m512bh)sum;
  a = (Floats)_mm512_dpbf16_ps((__m512)a, (__m512bh)sum, factor);
}
#endif

template <class T, bool LAYER> double add(T* s, const T* x, const T* r, int64_t d) {
  return summed<T>(
      d,
      [&](int64_t i, Vec<T>& a, Vec<T>& b) INLINE_LAMBDA {
        add_two<T, LAYER>(s + i, x + i, r + i, a, b);
      },
      [&](int64_t i, int64_t n) INLINE_LAMBDA {
        store_some(s + i, load_some(x + i, n) + load_some(r + i, n), n);
        auto v = load_some(s + i, n);
        return LAYER ? v : v * v;
      });
}

template <class T> struct Row {
  const T* x;
  T* y;
  double mean, scale;
};

// y = (x - mean) * scale * w + b for R rows.
template <class T, class P, bool LAYER, int R>
void write(const Row<T>* rows, const P* w, const P* b, int64_t d) {
  const bool ALIKE = sizeof(T) == sizeof(P);  // then all may come in another order
  const int L = Wide<T>::lanes;
  Vec<T> m[R], r[R];
  for (int k = 0; k < R; k++) {
    m[k] = Vec<T>{} + (Scalar<T>)rows[k].mean;
    r[k] = Vec<T>{} + (Scalar<T>)rows[k].scale;
  }
  int64_t i = 0;
  for (; i + 2 * L <= d; i += 2 * L) {
    auto weight = load_two<ALIKE>(w + i), bias = load_two<ALIKE>(b + i);
#pragma GCC unroll 2
    for (int k = 0; k < R; k++) {
      auto v = load_two<ALIKE>(rows[k].x + i);
      if (LAYER) {
        v.a -= m[k];
        v.b -= m[k];
      }
      v.a = v.a * r[k] * weight.a + bias.a;
      v.b = v.b * r[k] * weight.b + bias.b;
      store_two<ALIKE>(rows[k].y + i, v);
    }
  }
  for (; i < d; i += L) {
    const int64_t n = d - i < L ? d - i : L;
    auto weight = load_some(w + i, n), bias = load_some(b + i, n);
    for (int k = 0; k < R; k++) {
      auto v = load_some(rows[k].x + i, n);
      if (LAYER) v -= m[k];
      store_some(rows[k].y + i, v * r[k] * weight + bias, n);
    }
  }
}

// A row whose sums do not fit into floats; doubles that do not fit are scaled by a power of two.
template <class T, class P>
__attribute__((noinline)) void careful(const Row<T>& row, const P* w, const P* b, int64_t d,
                                       double eps, bool layer) {
  double largest = 0, shrink = 1, mean = 0, sum = 0;
  for (int64_t i = 0; i < d; i++) {
    double v = fabs(one(row.x + i));
    if (!(v <= largest)) largest = v;  // NaN too
    if (v != v) break;
  }
  if (largest > 1e150) shrink = 1e-200;
  double bad = largest * 0;  // NaN where the row has an Inf or a NaN
  for (int64_t i = 0; layer && i < d; i++) mean += one(row.x + i) * shrink / d;
  for (int64_t i = 0; i < d; i++) {
    double v = one(row.x + i) * shrink - mean;
    sum += v * v;
  }
  double scale = 1 / sqrt(sum / d + eps * shrink * shrink) + bad;
  for (int64_t i = 0; i < d; i++)
    put(row.y + i, (one(row.x + i) * shrink - mean) * scale * one(w + i) + one(b + i));
}

template <class T, class P, bool LAYER> void all(const Call& c, int64_t begin, int64_t end) {
  const P *w = (const P*)c.w, *b = (const P*)c.b;
  const int64_t d = c.d;
  const bool wide = sizeof(Scalar<T>) == 8;
  const double largest = wide ? 1e300 : 3e38;
  const int64_t many = d * sizeof(T) <= 4096 ? MANY : d * sizeof(T) <= 16384 ? 2 : 1;
  Row<T> rows[MANY];
  for (int64_t row = begin; row < end;) {
    int count = 0;  // of the rows that are as they should be
    for (int64_t last = row + many < end ? row + many : end; row < last; row++) {
      Row<T> now = {(const T*)c.x + row * d, (T*)c.y + row * d, 0, 0};
      double variance;
      if (c.r) {
        T* s = (T*)c.s + row * d;
        variance = add<T, LAYER>(s, now.x, (const T*)c.r + row * d, d) / d;
        now.x = s;
      } else {
        variance = (LAYER ? sum(now.x, d) : sum_of_squares(now.x, d)) / d;
      }
      if (LAYER) {
        now.mean = variance;
        variance = sum_of_deviations(now.x, d, now.mean) / d;
      }
      now.scale = 1 / sqrt(variance + c.eps);
      if (variance * d <= largest && (wide || variance >= 1e-30 || c.eps >= 1e-23))
        rows[count++] = now;
      else
        careful(now, w, b, d, c.eps, LAYER);
    }
    int k = 0;
    for (; k + 2 <= count; k += 2) write<T, P, LAYER, 2>(rows + k, w, b, d);
    if (k < count) write<T, P, LAYER, 1>(rows + k, w, b, d);
  }
}

template <class T, class P = Scalar<T>> void typed(const Call& c, int64_t begin, int64_t end) {
  if (c.layer) all<T, P, true>(c, begin, end);
  else all<T, P, false>(c, begin, end);
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

// Computes the rows from begin to end; w and b are not null, and of float32, or float64 for float64,
// or with instructions for bfloat16 both of that.
HIDDEN void ROWS(NAME)(const Call* c, int64_t begin, int64_t end) {
#if defined(__AVX512BF16__)
  if (c->w_dtype == BF16) typed<bfloat, bfloat>(*c, begin, end);
  else typed<bfloat>(*c, begin, end);
#else
  if (c->dtype == BF16) typed<bfloat>(*c, begin, end);
  if (c->dtype == F32) typed<float>(*c, begin, end);
  if (c->dtype == F64) typed<double>(*c, begin, end);
#if HAS_HALF
  if (c->dtype == F16) typed<half>(*c, begin, end);
#endif
#endif
}

// n parameters of a narrower dtype as float32.
HIDDEN void WIDEN(NAME)(float* to, const void* from, Dtype dtype, int64_t n) {
  if (dtype == BF16) widen(to, (const bfloat*)from, n);
#if HAS_HALF
  if (dtype == F16) widen(to, (const half*)from, n);
#endif
}
