// Which CUDA kernel computes a call, with how many blocks and threads.
//
// A warp computes a row of up to 1024 elements, a block of 256 threads a longer row. Rows whose
// alignment allows it are read in packs of 16 bytes. A row that fits is kept in registers; a longer
// one, or one without packs, is read twice.
#pragma once
#include "backward.h"
#include "call.h"

// Short rows in a block, threads for a long row, elements that a thread keeps in registers.
const int WARPS = 4, THREADS = 256, EACH = 32;

// The functions of cuda.cu, in the order of `KERNELS` in cuda.py.
enum Kernel : int32_t {
  SHORT_PACKS, SHORT_SINGLE, LONG_KEPT, LONG_PACKS, LONG_SINGLE,
  BACK_SHORT_PACKS, BACK_SHORT_SINGLE, BACK_LONG_PACKS, BACK_LONG_SINGLE, BACK_CHUNKS, BACK_SUMS,
  KERNELS
};

// Columns that a block adds up, and how many of its threads share one.
const int COLUMNS = 32, SHARE = THREADS / COLUMNS;

#ifndef __CUDACC_RTC__
struct Launch {
  Kernel kernel;
  unsigned blocks, threads;
};

inline int size_of(Dtype dtype) { return dtype == F64 ? 8 : dtype == F32 ? 4 : 2; }

// Whether all pointers and the row length allow reading 16 bytes of x at once.
inline bool in_packs(const Call& c) {
  const uintptr_t pack = 16 / size_of(c.dtype);
  const uintptr_t rows = (uintptr_t)c.x | (uintptr_t)c.r | (uintptr_t)c.y | (uintptr_t)c.s;
  const uintptr_t parameters = (uintptr_t)c.w | (uintptr_t)c.b;
  return c.d % pack == 0 && rows % 16 == 0 && parameters % (size_of(c.w_dtype) * pack) == 0;
}

// The dtypes of the parameters are those of x, or both F32.
inline Launch launch_of(const Call& c) {
  const bool packs = in_packs(c);
  if (c.d <= 32 * EACH) {
    const unsigned blocks = (unsigned)((c.rows + WARPS - 1) / WARPS);
    return {packs ? SHORT_PACKS : SHORT_SINGLE, blocks, WARPS * 32};
  }
  const Kernel kernel = !packs ? LONG_SINGLE : c.d <= THREADS * EACH ? LONG_KEPT : LONG_PACKS;
  return {kernel, (unsigned)c.rows, THREADS};
}

// The three steps of the gradients: each row, the sums of each chunk, and the sums of all chunks.
inline Launch launch_of_rows(const Backward& c) {
  const uintptr_t pack = 16 / size_of(c.dtype);
  const uintptr_t rows = (uintptr_t)c.dy | (uintptr_t)c.x | (uintptr_t)c.a | (uintptr_t)c.dx;
  const bool packs = c.d % pack == 0 && rows % 16 == 0 &&
                     (uintptr_t)c.w % (size_of(c.w_dtype) * pack) == 0;
  if (c.d <= 32 * EACH) {
    const unsigned blocks = (unsigned)((c.rows + WARPS - 1) / WARPS);
    return {packs ? BACK_SHORT_PACKS : BACK_SHORT_SINGLE, blocks, WARPS * 32};
  }
  return {packs ? BACK_LONG_PACKS : BACK_LONG_SINGLE, (unsigned)c.rows, THREADS};
}
inline Launch launch_of_chunks(const Backward& c) {
  return {BACK_CHUNKS, (unsigned)((c.d + COLUMNS - 1) / COLUMNS * c.chunks), THREADS};
}
inline Launch launch_of_sums(const Backward& c) {
  return {BACK_SUMS, (unsigned)((2 * c.d + THREADS - 1) / THREADS), THREADS};
}
#endif
