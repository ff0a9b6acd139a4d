// Vectors of the instruction set that this file is compiled for, as GCC and Clang spell them for
// any: arithmetic is + - *, contracted to fused multiply-adds by the compiler.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define LANES 8
#else
#define LANES 4
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace {

struct half { uint16_t bits; };
struct bfloat { uint16_t bits; };

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Shorts __attribute__((vector_size(LANES * 2)));
typedef double Doubles __attribute__((vector_size(LANES * 4)));      // half as many
typedef float HalfFloats __attribute__((vector_size(LANES * 2)));

// What a dtype is computed in, and how many of it go through a register at a time.
template <class T> struct Wide { typedef Floats type; typedef float scalar; static const int lanes = LANES; };
template <> struct Wide<double> { typedef Doubles type; typedef double scalar; static const int lanes = LANES / 2; };

template <class V, class T> INLINE V raw_load(const T* p) { V v; memcpy(&v, p, sizeof v); return v; }
template <class V, class T> INLINE void raw_store(T* p, V v) { memcpy(p, &v, sizeof v); }

INLINE Floats load(const float* p) { return raw_load<Floats>(p); }
INLINE Doubles load(const double* p) { return raw_load<Doubles>(p); }
INLINE void store(float* p, Floats v) { raw_store(p, v); }
INLINE void store(double* p, Doubles v) { raw_store(p, v); }

// To bfloat16, to nearest even; a NaN stays one.
INLINE Words rounded(Floats v) {
  Words u = (Words)v;
  Words up = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return v == v ? up : Words{} + 0x7fc0u;
}
// Between 16 bits and 32; GCC's own conversion of whole vectors takes detours.
#if LANES == 16
INLINE Words longer(Shorts v) { return (Words)_mm512_cvtepu16_epi32((__m256i)v); }
INLINE Shorts shorter(Words v) { return (Shorts)_mm512_cvtepi32_epi16((__m512i)v); }
#elif LANES == 8
INLINE Words longer(Shorts v) { return (Words)_mm256_cvtepu16_epi32((__m128i)v); }
INLINE Shorts shorter(Words v) {
  __m256i pairs = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  return (Shorts)_mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 8));
}
#else
INLINE Words longer(Shorts v) { return __builtin_convertvector(v, Words); }
INLINE Shorts shorter(Words v) { return __builtin_convertvector(v, Shorts); }
#endif

INLINE Floats load(const bfloat* p) { return (Floats)(longer(raw_load<Shorts>(p)) << 16); }
INLINE void store(bfloat* p, Floats v) { raw_store(p, shorter(rounded(v))); }

#if LANES == 16
#define HAS_HALF 1
INLINE Floats load(const half* p) { return (Floats)_mm512_cvtph_ps(raw_load<__m256i>(p)); }
INLINE void store(half* p, Floats v) { raw_store(p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT)); }
#elif LANES == 8
#define HAS_HALF 1
INLINE Floats load(const half* p) { return (Floats)_mm256_cvtph_ps(raw_load<__m128i>(p)); }
INLINE void store(half* p, Floats v) { raw_store(p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT)); }
#elif defined(__aarch64__)
#define HAS_HALF 1
INLINE Floats load(const half* p) { return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
INLINE void store(half* p, Floats v) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v))); }
#else
#define HAS_HALF 0
#endif

// Two vectors at a time: the processor's own conversion to bfloat16 takes as many. It is exact but
// for results under 1.2e-38, which become zero. Where the order does not matter, since all operands
// come in the same, they are the even and the odd elements of bfloat16: the halves of every word.
template <class V> struct Two { V a, b; };
template <bool ANY_ORDER = false, class T> INLINE Two<typename Wide<T>::type> load_two(const T* p) {
  return {load(p), load(p + Wide<T>::lanes)};
}
template <bool ANY_ORDER = false, class T, class V> INLINE void store_two(T* p, Two<V> v) {
  store(p, v.a);
  store(p + Wide<T>::lanes, v.b);
}
#if defined(__AVX512BF16__)
typedef uint16_t Pairs __attribute__((vector_size(64)));
INLINE __m512i joined(Two<Floats> v) {
  const __m512i order = (__m512i)(Pairs){0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                         21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                         11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)v.b, (__m512)v.a));
}
template <bool ANY_ORDER = false> INLINE Two<Floats> load_two(const bfloat* p) {
  if (!ANY_ORDER) return {load(p), load(p + LANES)};
  const Words v = raw_load<Words>(p);
  return {(Floats)(v << 16), (Floats)(v & 0xffff0000u)};
}
template <bool ANY_ORDER = false> INLINE void store_two(bfloat* p, Two<Floats> v) {
  if (ANY_ORDER) raw_store(p, joined(v));
  else raw_store(p, _mm512_cvtne2ps_pbh((__m512)v.b, (__m512)v.a));
}
#endif

// The first n elements only, zeros after them.
template <class T> INLINE typename Wide<T>::type load_some(const T* p, int64_t n) {
  T all[Wide<T>::lanes] = {};
  for (int64_t i = 0; i < n; i++) all[i] = p[i];
  return load(all);
}
template <class T, class V> INLINE void store_some(T* p, V v, int64_t n) {
  T all[Wide<T>::lanes];
  store(all, v);
  for (int64_t i = 0; i < n; i++) p[i] = all[i];
}
#if LANES == 16
INLINE Floats load_some(const float* p, int64_t n) { return (Floats)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
INLINE Floats load_some(const bfloat* p, int64_t n) {
  __m256i v = _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16);
}
INLINE Floats load_some(const half* p, int64_t n) {
  return (Floats)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p));
}
INLINE void store_some(float* p, Floats v, int64_t n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v); }
INLINE void store_some(bfloat* p, Floats v, int64_t n) {
  _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), _mm512_cvtepi32_epi16((__m512i)rounded(v)));
}
INLINE void store_some(half* p, Floats v, int64_t n) {
  _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
#endif

// Float lanes as doubles, added in pairs: the sums of long rows are kept in double.
#if LANES == 16
INLINE Doubles widened(Floats v) {
  __m512d all = _mm512_castps_pd((__m512)v);
  __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(all, 1));
  return (Doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)) + (Doubles)_mm512_cvtps_pd(high);
}
#elif LANES == 8
INLINE Doubles widened(Floats v) {
  __m128 high = _mm256_extractf128_ps((__m256)v, 1);
  return (Doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)) + (Doubles)_mm256_cvtps_pd(high);
}
#else
INLINE Doubles widened(Floats v) {
  HalfFloats low, high;
  memcpy(&low, &v, sizeof low);
  memcpy(&high, (char*)&v + sizeof low, sizeof high);
  return __builtin_convertvector(low, Doubles) + __builtin_convertvector(high, Doubles);
}
#endif
INLINE Doubles widened(Doubles v) { return v; }

INLINE double added(Doubles v) {
#if LANES == 16
  return _mm512_reduce_add_pd((__m512d)v);
#else
  double all[LANES / 2], sum = 0;
  memcpy(all, &v, sizeof all);
  for (int i = 0; i < LANES / 2; i++) sum += all[i];
  return sum;
#endif
}

// One number, for the rows that floats cannot sum up.
INLINE double one(const float* p) { return *p; }
INLINE double one(const double* p) { return *p; }
INLINE double one(const bfloat* p) { uint32_t u = (uint32_t)p->bits << 16; float f; memcpy(&f, &u, 4); return f; }
#if HAS_HALF
INLINE double one(const half* p) { return load_some(p, 1)[0]; }
#endif
INLINE void put(float* p, double v) { *p = (float)v; }
INLINE void put(double* p, double v) { *p = v; }
INLINE void put(bfloat* p, double v) { store_some(p, Floats{} + (float)v, 1); }
#if HAS_HALF
INLINE void put(half* p, double v) { store_some(p, Floats{} + (float)v, 1); }
#endif

}  // namespace
