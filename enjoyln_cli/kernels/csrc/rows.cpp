// The CPU kernel for the rows of one call. It is compiled once for each instruction set, NAME.
//
// Several rows are processed together: two are summed at the same time, which keeps the processor's
// adders busy, and parameters are loaded once for all of them. Sums are collected in float lanes,
// and added to doubles after every few additions. If the squares leave the range of a float
// (overflow, or so small that they lose digits and eps does not hide this), the row is computed
// again in double, one number at a time.
#include "sums.h"

namespace {

// Rows that are written together; they are summed in pairs.
template <class T> const int MANY = sizeof(T) == 8 ? 1 : 4;

// s = x + r rounded to the dtype, and the sums of the stored values, or of their squares.
template <class T, bool LAYER, int K>
INLINE void add(T* s, const T* x, const T* r, int64_t d, double* sums) {
  summed<T, K>(
      d, sums,
      [&](int k, int64_t i, Vec<T>& a, Vec<T>& b) INLINE_LAMBDA {
        i += k * d;
        auto v = load_two(x + i), u = load_two(r + i);
        v = stored(s + i, {v.a + u.a, v.b + u.b});
        a += LAYER ? v.a : v.a * v.a;
        b += LAYER ? v.b : v.b * v.b;
      },
      [&](int k, int64_t i, int64_t n) INLINE_LAMBDA {
        i += k * d;
        store_some(s + i, load_some(x + i, n) + load_some(r + i, n), n);
        auto v = load_some(s + i, n);
        return LAYER ? v : v * v;
      });
}

template <class T> struct Row {
  const T* x;  // or the sum
  T* y;
  double mean, scale;
  bool fits;  // whether its sums fit into floats
};

// y = (x - mean) * scale * w + b for K rows; with BARE, w and b are null and left out.
template <class T, class P, bool LAYER, bool BARE, int K>
void write(const Row<T>* rows, const P* w, const P* b, int64_t d) {
  const int L = Wide<T>::lanes;
  Vec<T> mean[K], scale[K];
  const T* x[K];
  T* y[K];
  EACH(k, K) {
    mean[k] = Vec<T>{} + (Scalar<T>)rows[k].mean;
    scale[k] = Vec<T>{} + (Scalar<T>)rows[k].scale;
    x[k] = rows[k].x;
    y[k] = rows[k].y;
  }
  int64_t i = 0;
  for (; i + 2 * L <= d; i += 2 * L) {
    Two<Vec<T>> weight = {}, bias = {};
    if (!BARE) {
      weight = Parameters<T, P>::load(w + i);
      bias = Parameters<T, P>::load(b + i);
    }
    EACH(k, K) {
      auto v = load_two(x[k] + i);
      if (LAYER) {
        v.a -= mean[k];
        v.b -= mean[k];
      }
      v.a *= scale[k];
      v.b *= scale[k];
      if (!BARE) {
        v.a = v.a * weight.a + bias.a;
        v.b = v.b * weight.b + bias.b;
      }
      store_two(y[k] + i, v);
    }
  }
  for (; i < d; i += L) {
    const int64_t n = d - i < L ? d - i : L;
    Vec<T> weight = {}, bias = {};
    if (!BARE) {
      weight = load_some(w + i, n);
      bias = load_some(b + i, n);
    }
    EACH(k, K) {
      auto v = load_some(x[k] + i, n);
      if (LAYER) v -= mean[k];
      v *= scale[k];
      store_some(y[k] + i, BARE ? v : v * weight + bias, n);
    }
  }
}

// Computes a row whose sums do not fit into floats; if they may not fit into doubles, it is scaled.
template <class T, class P>
APART void careful(const Row<T>& row, const P* w, const P* b, int64_t d, double eps, bool layer) {
  double largest = 0, shrink = 1, mean = 0, sum = 0;
  for (int64_t i = 0; i < d; i++) {
    double v = fabs(one(row.x + i));
    if (!(v <= largest)) largest = v;  // NaN too
    if (v != v) break;
  }
  if (largest > 1e150) shrink = 1e-200;
  double bad = largest * 0;  // NaN if the row has an Inf or a NaN
  for (int64_t i = 0; layer && i < d; i++) mean += one(row.x + i) * shrink / d;
  for (int64_t i = 0; i < d; i++) {
    double v = one(row.x + i) * shrink - mean;
    sum += v * v;
  }
  double scale = 1 / sqrt(sum / d + eps * shrink * shrink) + bad;
  for (int64_t i = 0; i < d; i++)
    put(row.y + i,
        (one(row.x + i) * shrink - mean) * scale * (w ? one(w + i) : 1) + (b ? one(b + i) : 0));
}

// Adds the residual to K rows if there is one, and computes their sums.
template <class T, bool LAYER, int K> void sum_up(const Call& c, int64_t row, Row<T>* rows) {
  const int64_t d = c.d, at = row * d;
  const bool wide = sizeof(Scalar<T>) == 8;
  const double largest = wide ? 1e300 : 3e38, least = wide || c.eps >= 1e-23 ? 0 : 1e-30;
  const T* x = (const T*)c.x + at;
  double means[K] = {}, sums[K];
  if (c.r) {
    T* s = (T*)c.s + at;
    add<T, LAYER, K>(s, x, (const T*)c.r + at, d, sums);
    x = s;
  } else if (LAYER) {
    sum<T, K>(x, d, sums);
  } else {
    sum_of_squares<T, K>(x, d, sums);
  }
  if (LAYER) {
    EACH(k, K) means[k] = sums[k] / d;
    sum_of_deviations<T, K>(x, d, means, sums);
  }
  EACH(k, K) {
    const double variance = sums[k] / d;
    rows[k] = {x + k * d, (T*)c.y + at + k * d, means[k], 1 / sqrt(variance + c.eps),
               sums[k] <= largest && variance >= least};
  }
}

template <class T, class P, bool LAYER, bool BARE> void norms(const Call& c, int64_t row, int64_t end) {
  const P *w = (const P*)c.w, *b = (const P*)c.b;
  const int many = c.d * sizeof(T) <= 16384 ? MANY<T> : 1;  // several long rows exceed the cache
  Row<T> rows[MANY<T>];
  while (row < end) {
    const int count = row + many <= end ? many : 1;
    if (count == 1) sum_up<T, LAYER, 1>(c, row, rows);
    for (int k = 0; k + 2 <= count; k += 2) sum_up<T, LAYER, 2>(c, row + k, rows + k);
    bool fit = true;
    for (int k = 0; k < count; k++) fit &= rows[k].fits;
    if (fit && count == MANY<T>) write<T, P, LAYER, BARE, MANY<T>>(rows, w, b, c.d);
    else
      for (int k = 0; k < count; k++)
        if (rows[k].fits) write<T, P, LAYER, BARE, 1>(rows + k, w, b, c.d);
        else careful(rows[k], w, b, c.d, c.eps, LAYER);
    row += count;
  }
}

template <class T, class P = Scalar<T>> void typed(const Call& c, int64_t begin, int64_t end) {
  if (c.layer) norms<T, P, true, false>(c, begin, end);
  else if (c.w) norms<T, P, false, false>(c, begin, end);
  else norms<T, P, false, true>(c, begin, end);
}

template <class T> void widen(float* to, const T* from, int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, load(from + i));
  if (i < n) store_some(to + i, load_some(from + i, n - i), n - i);
}

}  // namespace

// Whether there is a kernel for the dtype.
HIDDEN int OF_THIS_SET(has_)(Dtype dtype) { return dtype != F16 || HAS_HALF; }

// Computes the rows from begin to end. w and b are float32, or float64 for float64 rows, or both
// bfloat16 for bfloat16 rows. For RMSNorm both may be null; otherwise neither is.
HIDDEN void OF_THIS_SET(rows_)(const Call* c, int64_t begin, int64_t end) {
  if (c->dtype == BF16 && c->w_dtype == BF16) typed<bfloat, bfloat>(*c, begin, end);
  if (c->dtype == BF16 && c->w_dtype == F32) typed<bfloat>(*c, begin, end);
  if (c->dtype == F32) typed<float>(*c, begin, end);
  if (c->dtype == F64) typed<double>(*c, begin, end);
#if HAS_HALF
  if (c->dtype == F16) typed<half>(*c, begin, end);
#endif
}

// Converts n parameters of a narrower dtype to float32.
HIDDEN void OF_THIS_SET(widen_)(float* to, const void* from, Dtype dtype, int64_t n) {
  if (dtype == BF16) widen(to, (const bfloat*)from, n);
#if HAS_HALF
  if (dtype == F16) widen(to, (const half*)from, n);
#endif
}
