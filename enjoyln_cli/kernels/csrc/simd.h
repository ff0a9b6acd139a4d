// Vectors for the instruction set that this file is compiled for, written with the portable vector
// extensions of GCC and Clang. The compiler contracts + - * to fused multiply-adds.
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
#define APART static __attribute__((noinline))

namespace {

struct half { uint16_t bits; };
struct bfloat { uint16_t bits; };

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Shorts __attribute__((vector_size(LANES * 2)));
typedef double Doubles __attribute__((vector_size(LANES * 4)));      // half as many
typedef float HalfFloats __attribute__((vector_size(LANES * 2)));

// The vector type that a dtype is computed in, and the number of elements in one vector.
template <class T> struct Wide { typedef Floats type; typedef float scalar; static const int lanes = LANES; };
template <> struct Wide<double> { typedef Doubles type; typedef double scalar; static const int lanes = LANES / 2; };

template <class V, class T> INLINE V raw_load(const T* p) { V v; memcpy(&v, p, sizeof v); return v; }
template <class V, class T> INLINE void raw_store(T* p, V v) { memcpy(p, &v, sizeof v); }

INLINE Floats load(const float* p) { return raw_load<Floats>(p); }
INLINE Doubles load(const double* p) { return raw_load<Doubles>(p); }
INLINE void store(float* p, Floats v) { raw_store(p, v); }
INLINE void store(double* p, Doubles v) { raw_store(p, v); }

// Rounds to bfloat16, to nearest even; NaN stays NaN.
INLINE Words rounded(Floats v) {
  Words u = (Words)v;
  Words up = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return v == v ? up : Words{} + 0x7fc0u;
}
// Conversions between 16 and 32 bits; GCC's own conversion of vectors is slower.
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

// Two vectors at a time. For bfloat16 these are the even and the odd elements, i.e. the halves of
// each 32-bit word, so that no shuffle is needed. A result halfway between two bfloat16 numbers is
// rounded away from zero here. Sums, which are often halfway, are rounded to even (`stored`), and
// so are all values at the end of a row that do not fill two vectors.
template <class V> struct Two { V a, b; };
template <class T> INLINE Two<typename Wide<T>::type> load_two(const T* p) {
  return {load(p), load(p + Wide<T>::lanes)};
}
template <class T> INLINE void store_two(T* p, Two<typename Wide<T>::type> v) {
  store(p, v.a);
  store(p + Wide<T>::lanes, v.b);
}
INLINE Two<Floats> load_two(const bfloat* p) {
  const Words v = raw_load<Words>(p);
  return {(Floats)(v << 16), (Floats)(v & 0xffff0000u)};
}
INLINE void store_two(bfloat* p, Two<Floats> v) {
  raw_store(p, (((Words)v.a + 0x8000u) >> 16) | (((Words)v.b + 0x8000u) & 0xffff0000u));
}

// Loads parameters in the element order of the two vectors of T. A float32 NaN is replaced by one
// whose bits stay NaN when a result is rounded to bfloat16.
template <class T, class P> struct Parameters {
  INLINE Two<typename Wide<T>::type> load(const P* p) { return load_two(p); }
};
template <> struct Parameters<bfloat, float> {
  INLINE Two<Floats> load(const float* p) {
    Two<Floats> v = load_two(p);
#if LANES == 16
    const __m512i order = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i next = (__m512i)((Words)order + 1);
    v = {(Floats)_mm512_permutex2var_ps((__m512)v.a, order, (__m512)v.b),
         (Floats)_mm512_permutex2var_ps((__m512)v.a, next, (__m512)v.b)};
#elif LANES == 8
    const __m256d a = (__m256d)_mm256_shuffle_ps((__m256)v.a, (__m256)v.b, 0x88);
    const __m256d b = (__m256d)_mm256_shuffle_ps((__m256)v.a, (__m256)v.b, 0xdd);
    v = {(Floats)_mm256_permute4x64_pd(a, 0xd8), (Floats)_mm256_permute4x64_pd(b, 0xd8)};
#else
    v = {Floats{p[0], p[2], p[4], p[6]}, Floats{p[1], p[3], p[5], p[7]}};
#endif
    const Floats nan = Floats{} + __builtin_nanf("");
    return {v.a == v.a ? v.a : nan, v.b == v.b ? v.b : nan};
  }
};

// Stores a sum rounded to T, and returns the stored value.
template <class T> INLINE Two<typename Wide<T>::type> stored(T* p, Two<typename Wide<T>::type> v) {
  store_two(p, v);
  return load_two(p);
}
// Rounds to bfloat16 (nearest even), as a float. NaNs that come from bfloat16 have no lower bits,
// so rounding does not change them.
INLINE Floats even(Floats v) {
#if LANES == 16
  const __mmask16 odd = _mm512_test_epi32_mask((__m512i)v, _mm512_set1_epi32(0x10000));
  const __m512i up = (__m512i)((Words)v + 0x7fffu);
  const Words u = (Words)_mm512_mask_add_epi32(up, odd, (__m512i)v, _mm512_set1_epi32(0x8000));
#else
  const Words u = (Words)v + 0x7fffu + (((Words)v >> 16) & 1u);
#endif
  return (Floats)(u & 0xffff0000u);
}
INLINE Two<Floats> stored(bfloat* p, Two<Floats> v) {
  v = {even(v.a), even(v.b)};
  raw_store(p, ((Words)v.a >> 16) | (Words)v.b);
  return v;
}

// Loads and stores the first n elements only; a load fills the vector with zeros.
template <class T> APART typename Wide<T>::type load_some(const T* p, int64_t n) {
  T all[Wide<T>::lanes] = {};
  for (int64_t i = 0; i < n; i++) all[i] = p[i];
  return load(all);
}
template <class T, class V> APART void store_some(T* p, V v, int64_t n) {
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

// Converts float lanes to doubles and adds them in pairs: sums of long rows are kept in double.
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

// Loads and stores one number as a double, for rows whose sums do not fit into floats.
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
