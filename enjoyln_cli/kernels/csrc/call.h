// One call of a norm on contiguous rows: what Python's side hands to the kernels of a device.
#pragma once
#include <stdint.h>

enum Dtype : int32_t { F32, F16, BF16, F64, DTYPES };

// y = norm(x), or norm(s) with s = x + r rounded to the dtype of x. All pointers are on one device.
// s == r for the sum in place, s == y where the sum is not kept; then y first holds it. y may be x.
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
