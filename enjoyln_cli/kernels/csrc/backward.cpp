// The CPU kernel for the gradients of a norm. It is compiled once for each instruction set, NAME.
//
// The weight is float32, or float64 for float64 rows. A row is read three times: for its sums, for
// its terms of the gradients of weight and bias, and for the result. Several rows are processed
// together, so that the gradients of weight and bias are loaded and stored once for all of them.
#include "backward.h"
#include "sums.h"

namespace {

template <bool B> struct Is { static const bool value = B; };

const int TOGETHER = 4;       // rows
const int BEFORE_DOUBLE = 8;  // additions to a float sum before it is added to a double

// All elements of a vector, or the first n.
template <bool ALL, class E> INLINE auto read(const E* p, int64_t n) {
  return ALL ? load(p) : load_some(p, n);
}
template <bool ALL, class E, class V> INLINE void write(E* p, V v, int64_t n) {
  if (ALL) store(p, v);
  else store_some(p, v, n);
}

// K rows from the row at `at`; dw and db are the sums of their chunk.
template <class T, bool LAYER, int K>
void gradients(const Backward& c, int64_t at, Scalar<T>* dw, Scalar<T>* db) {
  typedef Vec<T> V;
  typedef Scalar<T> S;
  const int L = Wide<T>::lanes;
  const int64_t d = c.d, whole = d / L * L, rest = d - whole;
  const T *x = (const T*)c.x + at * d, *dy = (const T*)c.dy + at * d;
  const T* a = c.a ? (const T*)c.a + at * d : nullptr;
  T* dx = (T*)c.dx + at * d;
  const S* w = (const S*)c.w;

  double means[K] = {}, squares[K];
  V mean[K], r[K];
  if (LAYER) {
    sum<T, K>(x, d, means);
    EACH(k, K) means[k] /= d;
    sum_of_deviations<T, K>(x, d, means, squares);
  } else {
    sum_of_squares<T, K>(x, d, squares);
  }
  EACH(k, K) {
    mean[k] = V{} + (S)means[k];
    r[k] = V{} + (S)(1 / sqrt(squares[k] / d + c.eps));
  }

  Doubles dots[K] = {}, totals[K] = {};
  V dot[K] = {}, total[K] = {};
  auto add_terms = [&](auto all, int64_t i) INLINE_LAMBDA {
    const bool ALL = decltype(all)::value;
    V weight = V{} + (S)1, more_w = {}, more_b = {};
    if (w) weight = read<ALL>(w + i, rest);
    EACH(k, K) {
      V h = read<ALL>(x + k * d + i, rest);
      if (LAYER) h -= mean[k];
      h *= r[k];
      const V up = read<ALL>(dy + k * d + i, rest);
      dot[k] += up * weight * h;
      if (LAYER) total[k] += up * weight;
      more_w += up * h;
      more_b += up;
    }
    write<ALL>(dw + i, read<ALL>(dw + i, rest) + more_w, rest);
    write<ALL>(db + i, read<ALL>(db + i, rest) + more_b, rest);
  };
  auto to_doubles = [&]() INLINE_LAMBDA {
    EACH(k, K) {
      dots[k] += widened(dot[k]);
      dot[k] = V{};
      if (LAYER) {
        totals[k] += widened(total[k]);
        total[k] = V{};
      }
    }
  };
  for (int64_t i = 0; i < whole;) {
    const int64_t end = i + BEFORE_DOUBLE * L < whole ? i + BEFORE_DOUBLE * L : whole;
    for (; i < end; i += L) add_terms(Is<true>(), i);
    to_doubles();
  }
  if (rest) {
    add_terms(Is<false>(), whole);
    to_doubles();
  }
  EACH(k, K) {
    dot[k] = V{} + (S)(added(dots[k]) / d);
    total[k] = V{} + (S)(LAYER ? added(totals[k]) / d : 0);
  }

  auto write_result = [&](auto all, int64_t i) INLINE_LAMBDA {
    const bool ALL = decltype(all)::value;
    V weight = V{} + (S)1;
    if (w) weight = read<ALL>(w + i, rest);
    EACH(k, K) {
      V h = read<ALL>(x + k * d + i, rest), g = read<ALL>(dy + k * d + i, rest) * weight;
      if (LAYER) h -= mean[k];
      g -= h * r[k] * dot[k];
      if (LAYER) g -= total[k];
      g *= r[k];
      if (a) g += read<ALL>(a + k * d + i, rest);
      write<ALL>(dx + k * d + i, g, rest);
    }
  };
  for (int64_t i = 0; i < whole; i += L) write_result(Is<true>(), i);
  if (rest) write_result(Is<false>(), whole);
}

template <class T, bool LAYER> void chunk(const Backward& c, int64_t index) {
  Scalar<T>* dw = (Scalar<T>*)c.partial + 2 * c.d * index;
  Scalar<T>* db = dw + c.d;
  for (int64_t i = 0; i < 2 * c.d; i++) dw[i] = 0;
  const int64_t end = c.first_row(index + 1);
  int64_t row = c.first_row(index);
  for (; row + TOGETHER <= end; row += TOGETHER) gradients<T, LAYER, TOGETHER>(c, row, dw, db);
  for (; row < end; row++) gradients<T, LAYER, 1>(c, row, dw, db);
}

template <class T> void chunks(const Backward& c, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    if (c.layer) chunk<T, true>(c, i);
    else chunk<T, false>(c, i);
  }
}

}  // namespace

// Computes the chunks from begin to end.
HIDDEN void OF_THIS_SET(backward_)(const Backward* c, int64_t begin, int64_t end) {
  if (c->dtype == F32) chunks<float>(*c, begin, end);
  if (c->dtype == F64) chunks<double>(*c, begin, end);
  if (c->dtype == BF16) chunks<bfloat>(*c, begin, end);
#if HAS_HALF
  if (c->dtype == F16) chunks<half>(*c, begin, end);
#endif
}
