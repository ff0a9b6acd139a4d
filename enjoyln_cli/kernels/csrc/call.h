// `Call`: the arguments of one norm on contiguous rows, as passed to the kernels of a device.
#pragma once
#ifdef __CUDACC_RTC__  // has no <stdint.h>
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uintptr_t;
#else
#include <stdint.h>
#endif

enum Dtype : int32_t { F32, F16, BF16, F64, DTYPES };

// Computes y = norm(x), or y = norm(s) with s = x + r rounded to the dtype of x. All pointers are
// on one device. s == r replaces the residual by the sum. s == y if the sum is not kept; then y
// holds it temporarily. y may be x.
struct Call {
  const void *x, *r;  // (rows, d); r is null without an addition
  void *y, *s;
  const void *w, *b;  // (d), or null
  int64_t rows, d;
  double eps;
  Dtype dtype;            // of x, r, y and s
  Dtype w_dtype, b_dtype;
  int32_t layer;          // LayerNorm instead of RMSNorm
};
