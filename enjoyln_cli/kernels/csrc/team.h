// One row of a norm, computed by a team of threads: what the CUDA kernels do, and what a test does
// on the host with a team of one.
//
// The row is read once, in packs of 16 bytes where its place in memory allows, and stays in
// registers (KEPT packs for each thread); a longer row (KEPT = 0) is read again from the cache. A
// team sums in a fixed order, so results are the same in every run. Where the squares leave the
// range of a float, they are summed again in double.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "call.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define BOTH_SIDES __host__ __device__ __forceinline__
#define FAR __host__ __device__ __noinline__
#define UNROLLED _Pragma("unroll")
#else
#define BOTH_SIDES inline
#define FAR inline
#define UNROLLED
#endif

struct Half { uint16_t bits; };
struct Bfloat { uint16_t bits; };
template <class T> struct Computed { typedef float type; };
template <> struct Computed<double> { typedef double type; };

BOTH_SIDES float wide(float v) { return v; }
BOTH_SIDES double wide(double v) { return v; }
BOTH_SIDES float wide(Bfloat v) {
  uint32_t bits = (uint32_t)v.bits << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
BOTH_SIDES void narrow(float v, float& to) { to = v; }
BOTH_SIDES void narrow(double v, double& to) { to = v; }
BOTH_SIDES void narrow(double v, float& to) { to = (float)v; }
BOTH_SIDES void narrow(float v, Bfloat& to) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  to.bits = v == v ? (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) : 0x7fc0;
}
#if defined(__CUDACC__)
BOTH_SIDES float wide(Half v) {
  __half_raw raw;
  raw.x = v.bits;
  return __half2float(__half(raw));
}
BOTH_SIDES void narrow(float v, Half& to) { to.bits = __half_raw(__float2half_rn(v)).x; }
#else
BOTH_SIDES float wide(Half v) {
  _Float16 f;
  memcpy(&f, &v, 2);
  return (float)f;
}
BOTH_SIDES void narrow(float v, Half& to) {
  _Float16 f = (_Float16)v;
  memcpy(&to, &f, 2);
}
#endif
BOTH_SIDES void narrow(double v, Bfloat& to) { narrow((float)v, to); }
BOTH_SIDES void narrow(double v, Half& to) { narrow((float)v, to); }

template <class T, int N> struct alignas(sizeof(T) * N) Pack { T v[N]; };

template <class T, class P> struct Place {  // of one row
  const T *x, *r;
  T *y, *s;
  const P *w, *b;
};

// A row whose sums do not fit, after its addition; doubles that do not fit are scaled.
template <class T, class P, class Team>
FAR void careful_row(Place<T, P> at, int64_t d, double eps, bool layer, Team team) {
  const T* x = at.r ? at.s : at.x;
  double shrink = 1, mean = 0, sum = 0;
  team.wait();  // the sum was written in another order
  for (int attempt = 0; attempt < 2; attempt++) {
    mean = sum = 0;
    if (layer) {
      for (int64_t i = team.rank; i < d; i += team.size) mean += wide(x[i]) * shrink / d;
      mean = team.sum(mean);
    }
    for (int64_t i = team.rank; i < d; i += team.size) {
      const double u = wide(x[i]) * shrink - mean;
      sum += u * u;
    }
    sum = team.sum(sum);
    if (sum <= 1e300) break;
    if (!attempt) shrink = 1e-200;
  }
  // NaN where the row has an Inf or a NaN
  const double scale = sum <= 1e300 ? 1 / sqrt(sum / d + eps * shrink * shrink) : (double)NAN;
  team.wait();  // y may be where the sum is
  for (int64_t i = team.rank; i < d; i += team.size) {
    double u = (wide(x[i]) * shrink - mean) * scale;
    if (at.w) u *= wide(at.w[i]);
    if (at.b) u += wide(at.b[i]);
    narrow(u, at.y[i]);
  }
}

template <class T, class P, int N, int KEPT, class Team>
BOTH_SIDES void norm_row(Place<T, P> at, int64_t d, double eps, bool layer, Team team) {
  typedef typename Computed<T>::type S;
  typedef Pack<T, N> Packed;
  const int64_t packs = d / N;
  S kept[KEPT ? KEPT * N : 1];

  // first and again: f(i, v) for every pack i of this thread with its values v, fetched at first.
  auto fetch = [&](int64_t i, S* v) {
    Packed x = ((const Packed*)at.x)[i];
    if (at.r) {
      Packed r = ((const Packed*)at.r)[i];
      UNROLLED for (int j = 0; j < N; j++) narrow(wide(x.v[j]) + wide(r.v[j]), x.v[j]);
      ((Packed*)at.s)[i] = x;
    }
    UNROLLED for (int j = 0; j < N; j++) v[j] = wide(x.v[j]);
  };
  auto first = [&](auto f) {
    if (KEPT) {
      UNROLLED for (int k = 0; k < KEPT; k++) {
        const int64_t i = team.rank + (int64_t)k * team.size;
        if (i < packs) {
          fetch(i, kept + k * N);
          f(i, kept + k * N);
        }
      }
    } else {
      for (int64_t i = team.rank; i < packs; i += team.size) {
        S v[N];
        fetch(i, v);
        f(i, v);
      }
    }
  };
  auto again = [&](auto f) {
    if (KEPT) {
      UNROLLED for (int k = 0; k < KEPT; k++) {
        const int64_t i = team.rank + (int64_t)k * team.size;
        if (i < packs) f(i, kept + k * N);
      }
    } else {
      const T* from = at.r ? at.s : at.x;
      for (int64_t i = team.rank; i < packs; i += team.size) {
        const Packed x = ((const Packed*)from)[i];
        S v[N];
        UNROLLED for (int j = 0; j < N; j++) v[j] = wide(x.v[j]);
        f(i, v);
      }
    }
  };

  S sum = 0, mean = 0;
  first([&](int64_t, S* v) {
    UNROLLED for (int j = 0; j < N; j++) sum += layer ? v[j] : v[j] * v[j];
  });
  sum = team.sum(sum);
  if (layer) {
    mean = sum / d;
    sum = 0;
    again([&](int64_t, S* v) {
      UNROLLED for (int j = 0; j < N; j++) sum += (v[j] - mean) * (v[j] - mean);
    });
    sum = team.sum(sum);
  }
  const S variance = sum / d;

  const bool fits = sizeof(S) == 8 ? variance <= 1e300
                                   : variance <= 3e38 && (variance >= 1e-30 || eps >= 1e-23);
  if (!fits) return careful_row(at, d, eps, layer, team);
  const S scale = 1 / sqrt(variance + (S)eps);
  again([&](int64_t i, S* v) {
    Packed y;
    Pack<P, N> w, b;
    if (at.w) w = ((const Pack<P, N>*)at.w)[i];
    if (at.b) b = ((const Pack<P, N>*)at.b)[i];
    UNROLLED for (int j = 0; j < N; j++) {
      S u = (v[j] - mean) * scale;
      if (at.w) u *= wide(w.v[j]);
      if (at.b) u += wide(b.v[j]);
      narrow(u, y.v[j]);
    }
    ((Packed*)at.y)[i] = y;
  });
}
