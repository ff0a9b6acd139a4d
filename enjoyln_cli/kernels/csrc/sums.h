// Sums over rows, and names for what is compiled once for each instruction set, NAME.
#pragma once
#include <math.h>

#include "call.h"
#include "simd.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define OF_THIS_SET(name) JOIN(name, NAME)
#define HIDDEN extern "C" __attribute__((visibility("hidden")))
#define EACH(k, n) _Pragma("GCC unroll 4") for (int k = 0; k < n; k++)

namespace {

// Additions to a float sum before it is added to a double.
template <class T> const int BLOCK = sizeof(T) == 2 ? 32 : LANES > 8 ? 8 : 4;
template <class T> using Vec = typename Wide<T>::type;
template <class T> using Scalar = typename Wide<T>::scalar;

// Sums K rows; the order of additions in a row is the same for any K. f(k, i, a, b) adds the terms
// of the two vectors of row k at i to the sums a and b. rest(k, i, n) returns the terms of the n
// elements at i.
template <class T, int K, class F, class G> INLINE void summed(int64_t d, double* sums, F f, G rest) {
  const int L = Wide<T>::lanes, TWO = 2 * L;
  Doubles total[K] = {};
  int64_t i = 0;
  while (i + TWO <= d) {
    Vec<T> a[K] = {}, b[K] = {}, e[K] = {}, g[K] = {};
    const int64_t block = i + BLOCK<T> * 2 * TWO, end = block < d ? block : d;
    for (; i + 2 * TWO <= end; i += 2 * TWO)
      EACH(k, K) {
        f(k, i, a[k], b[k]);
        f(k, i + TWO, e[k], g[k]);
      }
    if (i + TWO <= end) {
      EACH(k, K) f(k, i, a[k], b[k]);
      i += TWO;
    }
    EACH(k, K) total[k] += widened((a[k] + b[k]) + (e[k] + g[k]));
  }
  for (; i < d; i += L) EACH(k, K) total[k] += widened(rest(k, i, d - i < L ? d - i : L));
  EACH(k, K) sums[k] = added(total[k]);
}

template <class T, int K> INLINE void sum(const T* x, int64_t d, double* sums) {
  summed<T, K>(
      d, sums,
      [&](int k, int64_t i, Vec<T>& a, Vec<T>& b) INLINE_LAMBDA {
        auto v = load_two(x + k * d + i);
        a += v.a;
        b += v.b;
      },
      [&](int k, int64_t i, int64_t n) INLINE_LAMBDA { return load_some(x + k * d + i, n); });
}

template <class T, int K> INLINE void sum_of_squares(const T* x, int64_t d, double* sums) {
  summed<T, K>(
      d, sums,
      [&](int k, int64_t i, Vec<T>& a, Vec<T>& b) INLINE_LAMBDA {
        auto v = load_two(x + k * d + i);
        a += v.a * v.a;
        b += v.b * v.b;
      },
      [&](int k, int64_t i, int64_t n) INLINE_LAMBDA {
        auto v = load_some(x + k * d + i, n);
        return v * v;
      });
}

template <class T, int K>
INLINE void sum_of_deviations(const T* x, int64_t d, const double* means, double* sums) {
  Vec<T> mean[K];
  EACH(k, K) mean[k] = Vec<T>{} + (Scalar<T>)means[k];
  summed<T, K>(
      d, sums,
      [&](int k, int64_t i, Vec<T>& a, Vec<T>& b) INLINE_LAMBDA {
        auto v = load_two(x + k * d + i);
        v.a -= mean[k];
        v.b -= mean[k];
        a += v.a * v.a;
        b += v.b * v.b;
      },
      [&](int k, int64_t i, int64_t n) INLINE_LAMBDA {
        auto v = load_some(x + k * d + i, n) - mean[k];
        for (int64_t j = n; j < Wide<T>::lanes; j++) v[j] = 0;  // lanes after the end of the row
        return v * v;
      });
}

}  // namespace
