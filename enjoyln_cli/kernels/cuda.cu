// RMSNorm of rows on an NVIDIA GPU, forward only, for one dtype of rows and one of parameters:
//
//     y = x / sqrt(mean(x^2) + eps) * weight + bias
//
// torch compiles this file with NVRTC on the user's machine, for the GPU at hand, with two types
// defined: ROW of x and y, and PARAMETER of weight and bias. A block computes a row. It reads packs
// of 16 bytes where the alignment allows it. A test compiles the same file with a
// stand-in for CUDA, and runs it on the CPU.
#ifdef __CUDACC_RTC__  // has no headers of the C library
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
struct Half { uint16_t bits; };
#else
#include <cuda_runtime.h>
#endif

const int MOST_THREADS = 256, LANES = 32;  // as in gpu.py
const int WEIGHT = 1, BIAS = 2;  // bits of `parts`: which of the two there are

struct Bfloat { uint16_t bits; };

__device__ inline float widen(float v) { return v; }
__device__ inline float widen(Bfloat v) {
  const uint32_t bits = (uint32_t)v.bits << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
__device__ inline void narrow(float v, float& to) { to = v; }
__device__ inline void narrow(float v, Bfloat& to) {  // to nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &v, 4);
  to.bits = v == v ? (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) : 0x7fc0;
}
#ifdef __CUDACC_RTC__  // the stand-in has these two itself
__device__ inline void narrow(float v, Half& to) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(v));
}
__device__ inline float widen(Half v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
  return f;
}
#endif

template <class T, int N> struct alignas(sizeof(T) * N) Pack { T v[N]; };

// The sum of `v` over all threads of the block, in an order that is the same in every run.
__device__ float sum_over_block(float v) {
  __shared__ float partial[MOST_THREADS / LANES];
  for (int step = LANES / 2; step; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
  if (threadIdx.x % LANES == 0) partial[threadIdx.x / LANES] = v;
  __syncthreads();
  v = 0;
  for (int i = 0; i < blockDim.x / LANES; i++) v += partial[i];
  return v;
}

template <int N>
__device__ void norm_row(const ROW* x, ROW* y, const PARAMETER* weight, const PARAMETER* bias,
                         int d, double eps, int parts) {
  typedef Pack<ROW, N> Packed;
  typedef Pack<PARAMETER, N> Parameters;
  const Packed* from = (const Packed*)(x + (int64_t)blockIdx.x * d);
  Packed* to = (Packed*)(y + (int64_t)blockIdx.x * d);
  float squares = 0;
  for (int i = threadIdx.x; i < d / N; i += blockDim.x) {
    const Packed v = from[i];
    for (int j = 0; j < N; j++) squares += widen(v.v[j]) * widen(v.v[j]);
  }
  squares = sum_over_block(squares);
  // NaN if a square does not fit into a float, as for a row with an Inf or a NaN.
  const float scale = 1 / sqrtf(squares / d + (float)eps) + (squares - squares);
  for (int i = threadIdx.x; i < d / N; i += blockDim.x) {
    Packed v = from[i];
    Parameters w, b;
    if (parts & WEIGHT) w = ((const Parameters*)weight)[i];
    if (parts & BIAS) b = ((const Parameters*)bias)[i];
    for (int j = 0; j < N; j++) {
      float normed = widen(v.v[j]) * scale;
      if (parts & WEIGHT) normed *= widen(w.v[j]);
      if (parts & BIAS) normed += widen(b.v[j]);
      narrow(normed, v.v[j]);
    }
    to[i] = v;
  }
}

#define KERNEL(name, n)                                                                      \
  extern "C" __global__ void __launch_bounds__(MOST_THREADS)                                 \
      name(const ROW* x, ROW* y, const PARAMETER* weight, const PARAMETER* bias, int d,      \
           double eps, int parts) {                                                          \
    norm_row<n>(x, y, weight, bias, d, eps, parts);                                          \
  }
KERNEL(rms_norm_packs, 16 / sizeof(ROW))
KERNEL(rms_norm_single, 1)
