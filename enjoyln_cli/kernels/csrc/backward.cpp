// The CPU kernel for the gradients of a norm. It is compiled once for each instruction set, NAME.
//
// The weight is float32, or float64 for float64 rows. A row is read twice: for its sums, to which
// the terms of the weight and the bias are added on the way, and for the result.
#include "backward.h"
#include "sums.h"

namespace {

template <class T> struct Gradients {
  typedef Vec<T> V;
  typedef Scalar<T> S;
  static const int L = Wide<T>::lanes;

  const T *dy, *x, *a;
  T* dx;
  const S* w;
  S *dw, *db;
  int64_t d;

  // The elements at i: all of a vector, or the first n.
  template <class E> V read(const E* p, int64_t i, int64_t n) const {
    return n == L ? load(p + i) : load_some(p + i, n);
  }
  template <class E> void write(E* p, int64_t i, int64_t n, V v) const {
    if (n == L) store(p + i, v);
    else store_some(p + i, v, n);
  }

  void row(double eps, bool layer) const {
    double mean = 0, squares, scale;
    if (layer) {
      sum<T, 1>(x, d, &mean);
      mean /= d;
      sum_of_deviations<T, 1>(x, d, &mean, &squares);
    } else {
      sum_of_squares<T, 1>(x, d, &squares);
    }
    scale = 1 / sqrt(squares / d + eps);
    const V centre = V{} + (S)mean, r = V{} + (S)scale;
    Doubles dots = {}, totals = {};
    for (int64_t i = 0; i < d; i += L) {
      const int64_t n = d - i < L ? d - i : L;
      const V h = (read(x, i, n) - centre) * r, up = read(dy, i, n);
      const V g = w ? up * read(w, i, n) : up;
      dots += widened(g * h);
      totals += widened(g);
      write(dw, i, n, read(dw, i, n) + up * h);
      write(db, i, n, read(db, i, n) + up);
    }
    const V dot = V{} + (S)(added(dots) / d), total = V{} + (S)(layer ? added(totals) / d : 0);
    for (int64_t i = 0; i < d; i += L) {
      const int64_t n = d - i < L ? d - i : L;
      const V h = (read(x, i, n) - centre) * r, up = read(dy, i, n);
      V v = r * ((w ? up * read(w, i, n) : up) - h * dot - total);
      if (a) v += read(a, i, n);
      write(dx, i, n, v);
    }
  }
};

template <class T> void chunk(const Backward& c, int64_t index) {
  Scalar<T>* sums = (Scalar<T>*)c.partial + 2 * c.d * index;
  for (int64_t i = 0; i < 2 * c.d; i++) sums[i] = 0;
  for (int64_t row = c.first_row(index); row < c.first_row(index + 1); row++) {
    const int64_t at = row * c.d;
    const T* a = c.a ? (const T*)c.a + at : nullptr;
    const Gradients<T> one = {(const T*)c.dy + at, (const T*)c.x + at, a, (T*)c.dx + at,
                              (const Scalar<T>*)c.w, sums, sums + c.d, c.d};
    one.row(c.eps, c.layer);
  }
}

}  // namespace

// Computes the chunks from begin to end.
HIDDEN void OF_THIS_SET(backward_)(const Backward* c, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    if (c->dtype == F32) chunk<float>(*c, i);
    if (c->dtype == F64) chunk<double>(*c, i);
    if (c->dtype == BF16) chunk<bfloat>(*c, i);
#if HAS_HALF
    if (c->dtype == F16) chunk<half>(*c, i);
#endif
  }
}
