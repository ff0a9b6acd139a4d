// `Backward`: the gradients of one norm, as passed to the kernels of a device.
#pragma once
#include "call.h"

// Computes dx = r (g - h mean(g h)) + a with g = w dy, h = x r, r = 1 / sqrt(mean(x^2) + eps), and
// the sums over the rows of dy h and dy, which are the gradients of weight and bias. For LayerNorm
// x is centred first, and mean(g) is subtracted from g - h mean(g h). The rows are cut into chunks:
// the sums of a chunk are added up before those of all chunks, so that results do not depend on the
// number of threads. All pointers are on one device.
struct Backward {
  const void *dy, *x, *w, *a;  // (rows, d), (rows, d), (d), (rows, d); w and a may be null
  void* dx;                    // (rows, d)
  void* sums;     // (2, d), float, or double for double rows: gradients of weight and bias
  void* partial;  // (chunks, 2, d), as sums
  void* scales;   // (2, rows), as sums: r and the mean of each row; not used on the CPU
  int64_t rows, d, chunks;
  double eps;
  Dtype dtype;    // of dy, x, a and dx
  Dtype w_dtype;  // without w, that of dy
  int32_t layer;

#ifdef __CUDACC__
  __device__
#endif
  int64_t first_row(int64_t chunk) const { return rows * chunk / chunks; }
};
