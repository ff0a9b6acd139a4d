// Computes the gradient of one row of a norm by a team of threads, on a GPU (see backward.h).
//
// The row is read again for each sum, and for the result: from the cache, as it was just read.
#pragma once
#include "backward.h"
#include "team.h"

template <class T, class P, int N, class Team>
INLINE void gradient_row(const Backward& c, int64_t row, Team team) {
  typedef typename Computed<T>::type S;
  typedef Pack<T, N> Packed;
  const int d = (int)c.d, packs = d / N;
  const int64_t at = row * c.d;
  const Packed* x = (const Packed*)((const T*)c.x + at);
  const Packed* dy = (const Packed*)((const T*)c.dy + at);
  const Packed* a = c.a ? (const Packed*)((const T*)c.a + at) : nullptr;
  Packed* dx = (Packed*)((T*)c.dx + at);

  S mean = 0, squares = 0;
  if (c.layer) {
    LOOP for (int i = team.rank; i < packs; i += team.size) {
      const Packed v = x[i];
      UNROLLED for (int j = 0; j < N; j++) mean += wide(v.v[j]);
    }
    mean = team.sum(mean) / d;
  }
  LOOP for (int i = team.rank; i < packs; i += team.size) {
    const Packed v = x[i];
    UNROLLED for (int j = 0; j < N; j++) squares += (wide(v.v[j]) - mean) * (wide(v.v[j]) - mean);
  }
  const S r = 1 / sqrt(team.sum(squares) / d + (S)c.eps);

  // Calls f(i, g, h) for each pack i of this thread.
  auto each = [&](auto f) {
    LOOP for (int i = team.rank; i < packs; i += team.size) {
      const Packed v = x[i], up = dy[i];
      Pack<P, N> w;
      S g[N], h[N];
      UNROLLED for (int j = 0; j < N; j++) narrow((S)1, w.v[j]);
      if (c.w) w = ((const Pack<P, N>*)c.w)[i];
      UNROLLED for (int j = 0; j < N; j++) {
        g[j] = wide(up.v[j]) * wide(w.v[j]);
        h[j] = (wide(v.v[j]) - mean) * r;
      }
      f(i, g, h);
    }
  };
  S dot = 0, total = 0;
  each([&](int, S* g, S* h) {
    UNROLLED for (int j = 0; j < N; j++) {
      dot += g[j] * h[j];
      total += g[j];
    }
  });
  dot = team.sum(dot) / d;
  total = c.layer ? team.sum(total) / d : 0;
  each([&](int i, S* g, S* h) {
    Packed v;
    S more[N] = {};
    if (a) {
      v = a[i];
      UNROLLED for (int j = 0; j < N; j++) more[j] = wide(v.v[j]);
    }
    UNROLLED for (int j = 0; j < N; j++) narrow(r * (g[j] - h[j] * dot - total) + more[j], v.v[j]);
    dx[i] = v;
  });
  if (team.rank == 0) {
    ((S*)c.scales)[row] = r;
    ((S*)c.scales)[c.rows + row] = mean;
  }
}
