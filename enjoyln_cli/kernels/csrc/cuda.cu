// The CUDA kernels for one dtype of rows and one of parameters.
//
// NVRTC compiles this file on the user's machine, for the GPU at hand, with two types defined: ROW
// of x, the residual and the results, and PARAMETER of weight and bias. `launch.h` says which kernel
// computes which call. A test compiles the same file with a stand-in for CUDA, and runs it on the
// CPU.
#ifndef __CUDACC_RTC__
#include <cuda_runtime.h>
#endif

#include "gradient.h"
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

template <int N> __device__ void short_gradient(const Backward& c) {
  const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
  if (row < c.rows) gradient_row<T, P, N>(c, row, Warp{(int)threadIdx.x % 32, 32});
}

template <int N> __device__ void long_gradient(const Backward& c) {
  gradient_row<T, P, N>(c, blockIdx.x, Block{(int)threadIdx.x, THREADS});
}

// The sums of one chunk of rows for some columns.
__device__ void sum_chunk(const Backward& c) {
  typedef typename Computed<T>::type S;
  __shared__ S shared[2][SHARE][COLUMNS];
  const int64_t across = (c.d + COLUMNS - 1) / COLUMNS, chunk = blockIdx.x / across;
  const int column = threadIdx.x % COLUMNS, share = threadIdx.x / COLUMNS;
  const int64_t at = blockIdx.x % across * COLUMNS + column;
  const S *scales = (const S*)c.scales, *means = scales + c.rows;
  S dw = 0, db = 0;
  if (at < c.d)
    for (int64_t row = c.first_row(chunk) + share; row < c.first_row(chunk + 1); row += SHARE) {
      const S up = wide(((const T*)c.dy)[row * c.d + at]);
      dw += up * (wide(((const T*)c.x)[row * c.d + at]) - means[row]) * scales[row];
      db += up;
    }
  shared[0][share][column] = dw;
  shared[1][share][column] = db;
  __syncthreads();
  if (share < 2 && at < c.d) {  // of these, one thread adds up the weight's, and one the bias's
    S sum = 0;
    for (int i = 0; i < SHARE; i++) sum += shared[share][i][column];
    ((S*)c.partial)[(2 * chunk + share) * c.d + at] = sum;
  }
}

__device__ void sum_chunks(const Backward& c) {
  typedef typename Computed<T>::type S;
  const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (i >= 2 * c.d) return;
  S sum = 0;
  for (int64_t chunk = 0; chunk < c.chunks; chunk++) sum += ((const S*)c.partial)[2 * c.d * chunk + i];
  ((S*)c.sums)[i] = sum;
}

const int PACK = 16 / sizeof(T);

}  // namespace

#define KERNEL(name, Given, threads, body) \
  extern "C" __global__ void __launch_bounds__(threads) name(Given c) { body(c); }

KERNEL(short_packs, Call, WARPS * 32, (short_row<PACK, EACH / PACK>))
KERNEL(short_single, Call, WARPS * 32, (short_row<1, 0>))
KERNEL(long_kept, Call, THREADS, (long_row<PACK, EACH / PACK>))
KERNEL(long_packs, Call, THREADS, (long_row<PACK, 0>))
KERNEL(long_single, Call, THREADS, (long_row<1, 0>))
KERNEL(back_short_packs, Backward, WARPS * 32, short_gradient<PACK>)
KERNEL(back_short_single, Backward, WARPS * 32, short_gradient<1>)
KERNEL(back_long_packs, Backward, THREADS, long_gradient<PACK>)
KERNEL(back_long_single, Backward, THREADS, long_gradient<1>)
KERNEL(back_chunks, Backward, THREADS, sum_chunk)
KERNEL(back_sums, Backward, THREADS, sum_chunks)
