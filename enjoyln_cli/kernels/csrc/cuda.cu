// CUDA kernels: one warp for a row of up to 1024 elements, 256 threads for a longer row.
#include <cuda_runtime.h>

#include "team.h"

namespace {

// Short rows in a block, threads for a long row, elements that a thread keeps in registers.
const int WARPS = 4, THREADS = 256, EACH = 32;

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

template <class T, class P> __device__ Place<T, P> place(const Call& c, int64_t row) {
  const int64_t at = row * c.d;
  return {(const T*)c.x + at, c.r ? (const T*)c.r + at : nullptr, (T*)c.y + at, (T*)c.s + at,
          (const P*)c.w, (const P*)c.b};
}

template <class T, class P, int N, int KEPT>
__global__ void __launch_bounds__(WARPS * 32) short_rows(Call c) {
  const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
  if (row < c.rows)
    norm_row<T, P, N, KEPT>(place<T, P>(c, row), (int)c.d, c.eps, c.layer,
                            Warp{(int)threadIdx.x % 32, 32});
}

template <class T, class P, int N, int KEPT>
__global__ void __launch_bounds__(THREADS) long_rows(Call c) {
  norm_row<T, P, N, KEPT>(place<T, P>(c, blockIdx.x), (int)c.d, c.eps, c.layer,
                          Block{(int)threadIdx.x, THREADS});
}

// Rows that are not aligned for packs are not kept in registers, but read twice.
template <class T, class P, int N> void start(const Call& c, cudaStream_t stream) {
  const int kept = N > 1 ? EACH / N : 0;
  if (c.d <= 32 * EACH) {
    const unsigned blocks = (unsigned)((c.rows + WARPS - 1) / WARPS);
    short_rows<T, P, N, kept><<<blocks, WARPS * 32, 0, stream>>>(c);
  } else if (kept && c.d <= THREADS * EACH) {
    long_rows<T, P, N, kept><<<(unsigned)c.rows, THREADS, 0, stream>>>(c);
  } else {
    long_rows<T, P, N, 0><<<(unsigned)c.rows, THREADS, 0, stream>>>(c);
  }
}

// Whether all pointers and the row length allow reading N elements at once.
template <class T, class P, int N> bool aligned(const Call& c) {
  const uintptr_t rows = (uintptr_t)c.x | (uintptr_t)c.r | (uintptr_t)c.y | (uintptr_t)c.s;
  const uintptr_t parameters = (uintptr_t)c.w | (uintptr_t)c.b;
  return c.d % N == 0 && rows % (sizeof(T) * N) == 0 && parameters % (sizeof(P) * N) == 0;
}

template <class T, class P> void typed(const Call& c, cudaStream_t stream) {
  const int N = 16 / sizeof(T);
  if (aligned<T, P, N>(c)) start<T, P, N>(c, stream);
  else start<T, P, 1>(c, stream);
}

}  // namespace

// Starts the kernel on the stream. Returns 0 if it has started; not if there is no kernel, or it
// fails.
extern "C" __attribute__((visibility("default"))) int enjoyln_launch(const Call* call,
                                                                     int32_t device, void* on) {
  const Call& c = *call;
  cudaStream_t stream = (cudaStream_t)on;
  // The dtype of the parameters, which has to be the same for both; a missing one fits any dtype.
  const Dtype given = c.w ? c.w_dtype : c.b ? c.b_dtype : c.dtype;
  if ((c.w && c.b && c.w_dtype != c.b_dtype) || c.rows > 0x7fffffff || c.d > 0x7fffffff) return 1;
  int before = device;
  if (cudaGetDevice(&before) != cudaSuccess) return 1;
  if (before != device && cudaSetDevice(device) != cudaSuccess) return 1;
  int failed = 0;
  if (c.dtype == F32 && given == F32) typed<float, float>(c, stream);
  else if (c.dtype == F64 && given == F64) typed<double, double>(c, stream);
  else if (c.dtype == F16 && given == F16) typed<Half, Half>(c, stream);
  else if (c.dtype == F16 && given == F32) typed<Half, float>(c, stream);
  else if (c.dtype == BF16 && given == BF16) typed<Bfloat, Bfloat>(c, stream);
  else if (c.dtype == BF16 && given == F32) typed<Bfloat, float>(c, stream);
  else failed = 1;
  if (!failed && cudaGetLastError() != cudaSuccess) failed = 1;
  if (before != device) cudaSetDevice(before);
  return failed;
}
