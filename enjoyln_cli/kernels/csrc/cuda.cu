// The CUDA kernels for one dtype of rows and one of parameters.
//
// NVRTC compiles this file on the user's machine, for the GPU at hand, with two types defined: ROW
// of x, the residual and the results, and PARAMETER of weight and bias. `launch.h` says which kernel
// computes which call. A test compiles the same file with a stand-in for CUDA, and runs it on the
// CPU.
#ifndef __CUDACC_RTC__
#include <cuda_runtime.h>
#endif

#include "launch.h"
#include "team.h"

namespace {

typedef ROW T;
typedef PARAMETER P;

struct Warp {
  int rank, size;
  template <class S> __device__ S sum(S v) const {
    for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
  }
  __device__ void wait() const { __syncwarp(); }
};

struct Block {
  int rank, size;
  template <class S> __device__ S sum(S v) const {
    __shared__ S partial[THREADS / 32];
    v = Warp{0, 32}.sum(v);
    __syncthreads();  // other threads may still read the previous sum
    if (rank % 32 == 0) partial[rank / 32] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < THREADS / 32; i++) v += partial[i];
    return v;
  }
  __device__ void wait() const { __syncthreads(); }
};

__device__ Place<T, P> place(const Call& c, int64_t row) {
  const int64_t at = row * c.d;
  return {(const T*)c.x + at, c.r ? (const T*)c.r + at : nullptr, (T*)c.y + at, (T*)c.s + at,
          (const P*)c.w, (const P*)c.b};
}

template <int N, int KEPT> __device__ void short_row(const Call& c) {
  const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
  if (row < c.rows)
    norm_row<T, P, N, KEPT>(place(c, row), (int)c.d, c.eps, c.layer,
                            Warp{(int)threadIdx.x % 32, 32});
}

template <int N, int KEPT> __device__ void long_row(const Call& c) {
  norm_row<T, P, N, KEPT>(place(c, blockIdx.x), (int)c.d, c.eps, c.layer,
                          Block{(int)threadIdx.x, THREADS});
}

const int PACK = 16 / sizeof(T);

}  // namespace

#define KERNEL(name, threads, body) \
  extern "C" __global__ void __launch_bounds__(threads) name(Call c) { body(c); }

KERNEL(short_packs, WARPS * 32, (short_row<PACK, EACH / PACK>))
KERNEL(short_single, WARPS * 32, (short_row<1, 0>))
KERNEL(long_kept, THREADS, (long_row<PACK, EACH / PACK>))
KERNEL(long_packs, THREADS, (long_row<PACK, 0>))
KERNEL(long_single, THREADS, (long_row<1, 0>))
