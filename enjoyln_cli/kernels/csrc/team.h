// Computes one row of a norm by a team of threads, for the CUDA kernels. Tests run them on the CPU.
//
// The row is read once, in packs of 16 bytes if its alignment allows, and kept in registers (KEPT
// packs for each thread). A longer row (KEPT = 0) is read again from the cache. A team sums in a
// fixed order, so results are the same in every run. If the squares leave the range of a float,
// they are summed again in double.
#pragma once
#include "call.h"
#ifdef __CUDACC_RTC__  // has no headers of the C library, but their functions
#define NAN __int_as_float(0x7fffffff)
#else
#include <math.h>
#include <string.h>
#endif

#ifdef __CUDA_ARCH__
#define INLINE __device__ __forceinline__
#define FAR __device__ __noinline__
#define UNROLLED _Pragma("unroll")
#define LOOP _Pragma("unroll 1")
#else
#define INLINE inline
#define FAR inline
#define UNROLLED
#define LOOP
#endif

struct Half { uint16_t bits; };
struct Bfloat { uint16_t bits; };
template <class T> struct Computed { typedef float type; };
template <> struct Computed<double> { typedef double type; };

INLINE float wide(float v) { return v; }
INLINE double wide(double v) { return v; }
INLINE float wide(Bfloat v) {
  uint32_t bits = (uint32_t)v.bits << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
INLINE void narrow(float v, float& to) { to = v; }
INLINE void narrow(double v, double& to) { to = v; }
INLINE void narrow(double v, float& to) { to = (float)v; }
#if __CUDA_ARCH__ >= 800  // the GPU's own conversion, to nearest even
INLINE void narrow(float v, Bfloat& to) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(v)); }
#else
INLINE void narrow(float v, Bfloat& to) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  to.bits = v == v ? (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) : 0x7fc0;
}
#endif
#ifdef __CUDA_ARCH__
INLINE void narrow(float v, Half& to) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(v)); }
INLINE float wide(Half v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
  return f;
}
#else
INLINE void narrow(float v, Half& to) {
  _Float16 f = (_Float16)v;
  memcpy(&to, &f, 2);
}
INLINE float wide(Half v) {
  _Float16 f;
  memcpy(&f, &v, 2);
  return (float)f;
}
#endif
INLINE void narrow(double v, Bfloat& to) { narrow((float)v, to); }
INLINE void narrow(double v, Half& to) { narrow((float)v, to); }

template <class T, int N> struct alignas(sizeof(T) * N) Pack { T v[N]; };

template <class T, class P> struct Place {  // the pointers of one row
  const T *x, *r;
  T *y, *s;
  const P *w, *b;
};

// Computes a row whose sums do not fit into floats, after the addition. If they do not even fit
// into doubles, the row is scaled.
template <class T, class P, class Team>
FAR void careful_row(Place<T, P> at, int d, double eps, bool layer, Team team) {
  const T* x = at.r ? at.s : at.x;
  double shrink = 1, mean = 0, sum = 0;
  team.wait();  // other threads wrote the elements of s that are read now
  for (int attempt = 0; attempt < 2; attempt++) {
    mean = sum = 0;
    if (layer) {
      LOOP for (int i = team.rank; i < d; i += team.size) mean += wide(x[i]) * shrink / d;
      mean = team.sum(mean);
    }
    LOOP for (int i = team.rank; i < d; i += team.size) {
      const double u = wide(x[i]) * shrink - mean;
      sum += u * u;
    }
    sum = team.sum(sum);
    if (sum <= 1e300) break;
    if (!attempt) shrink = 1e-200;
  }
  // NaN if the row has an Inf or a NaN
  const double scale = sum <= 1e300 ? 1 / sqrt(sum / d + eps * shrink * shrink) : (double)NAN;
  team.wait();  // y may overwrite the sum
  LOOP for (int i = team.rank; i < d; i += team.size) {
    double u = (wide(x[i]) * shrink - mean) * scale;
    if (at.w) u *= wide(at.w[i]);
    if (at.b) u += wide(at.b[i]);
    narrow(u, at.y[i]);
  }
}

template <class T, class P, int N, int KEPT, class Team>
INLINE void norm_row(Place<T, P> at, int d, double eps, bool layer, Team team) {
  typedef typename Computed<T>::type S;
  typedef Pack<T, N> Packed;
  const int packs = d / N;
  S kept[KEPT ? KEPT * N : 1];

  // first and again: call f(i, v) for each pack i of this thread, with its values v. first loads
  // them.
  auto fetch = [&](int i, S* v) {
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
        const int i = team.rank + k * team.size;
        if (i < packs) {
          fetch(i, kept + k * N);
          f(i, kept + k * N);
        }
      }
    } else {
      LOOP for (int i = team.rank; i < packs; i += team.size) {
        S v[N];
        fetch(i, v);
        f(i, v);
      }
    }
  };
  auto again = [&](auto f) {
    if (KEPT) {
      UNROLLED for (int k = 0; k < KEPT; k++) {
        const int i = team.rank + k * team.size;
        if (i < packs) f(i, kept + k * N);
      }
    } else {
      const T* from = at.r ? at.s : at.x;
      LOOP for (int i = team.rank; i < packs; i += team.size) {
        const Packed x = ((const Packed*)from)[i];
        S v[N];
        UNROLLED for (int j = 0; j < N; j++) v[j] = wide(x.v[j]);
        f(i, v);
      }
    }
  };

  S sum = 0, mean = 0;
  first([&](int, S* v) {
    UNROLLED for (int j = 0; j < N; j++) sum += layer ? v[j] : v[j] * v[j];
  });
  sum = team.sum(sum);
  if (layer) {
    mean = sum / d;
    sum = 0;
    again([&](int, S* v) {
      UNROLLED for (int j = 0; j < N; j++) sum += (v[j] - mean) * (v[j] - mean);
    });
    sum = team.sum(sum);
  }
  const S variance = sum / d;

  const bool fits = sizeof(S) == 8 ? variance <= 1e300
                                   : variance <= 3e38 && (variance >= 1e-30 || eps >= 1e-23);
  if (!fits) return careful_row(at, d, eps, layer, team);
  const S scale = 1 / sqrt(variance + (S)eps);
  again([&](int i, S* v) {
    Packed y;
    Pack<P, N> w, b;
    UNROLLED for (int j = 0; j < N; j++) {
      narrow((S)1, w.v[j]);
      narrow((S)0, b.v[j]);
    }
    if (at.w) w = ((const Pack<P, N>*)at.w)[i];
    if (at.b) b = ((const Pack<P, N>*)at.b)[i];
    UNROLLED for (int j = 0; j < N; j++)
      narrow((v[j] - mean) * scale * wide(w.v[j]) + wide(b.v[j]), y.v[j]);
    ((Packed*)at.y)[i] = y;
  });
}
