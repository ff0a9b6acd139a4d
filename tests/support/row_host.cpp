// The CUDA kernels' row on the host, with a team of one: read by test_kernels.py through ctypes.
#include "team.h"

struct Alone {
  int rank, size;
  template <class S> S sum(S v) const { return v; }
  void wait() const {}
};

template <class T, class P, int N, int KEPT> void rows(const Call& c) {
  for (int64_t row = 0; row < c.rows; row++) {
    const int64_t at = row * c.d;
    Place<T, P> place = {(const T*)c.x + at, c.r ? (const T*)c.r + at : nullptr, (T*)c.y + at,
                         (T*)c.s + at, (const P*)c.w, (const P*)c.b};
    norm_row<T, P, N, KEPT>(place, c.d, c.eps, c.layer, Alone{0, 1});
  }
}

template <class T, class P> void typed(const Call& c, int pack, int kept) {
  const int N = 16 / sizeof(T);
  if (pack == 1) rows<T, P, 1, 0>(c);
  else if (kept) rows<T, P, N, 64>(c);
  else rows<T, P, N, 0>(c);
}

extern "C" void run(const Call* c, int pack, int kept) {
  if (c->dtype == F32) typed<float, float>(*c, pack, kept);
  if (c->dtype == F64) typed<double, double>(*c, pack, kept);
  if (c->dtype == F16) typed<Half, Half>(*c, pack, kept);
  if (c->dtype == BF16 && c->w_dtype == F32) typed<Bfloat, float>(*c, pack, kept);
  if (c->dtype == BF16 && c->w_dtype == BF16) typed<Bfloat, Bfloat>(*c, pack, kept);
}
