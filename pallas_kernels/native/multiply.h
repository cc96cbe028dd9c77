// The register tile of every product: a few rows of one matrix with a few of another. Included after `Isa` is defined,
// see kernel.h.
#pragma once

#include "inline.h"

namespace pwjax {
namespace {

constexpr int kRows = 4;  // rows of a register tile

using V = Isa::V;

// Elements of a vector of them.
template <class E>
constexpr int kElements = Isa::kLanes * static_cast<int>(sizeof(float) / sizeof(E));

// acc[t][i] += w row i times token t, over `vectors` vectors. From a vector of a row to its next are `step` elements,
// from a row to the next `stride`.
template <int T, class E>
PWJAX_INLINE void multiply(const E* w, int64_t step, int64_t stride, const E* const* x, int64_t at, int vectors,
                           V* acc) {
  using Vector = decltype(Isa::load(w));
  V sum[T][kRows];
  for (int t = 0; t < T; ++t) {
    for (int i = 0; i < kRows; ++i) sum[t][i] = acc[t * kRows + i];
  }
  PWJAX_UNROLL_4
  for (int v = 0; v < vectors; ++v) {
    Vector in[T];
    for (int t = 0; t < T; ++t) in[t] = Isa::load(x[t] + at + v * kElements<E>);
    for (int i = 0; i < kRows; ++i) {
      Vector row = Isa::load(w + v * step + i * stride);
      for (int t = 0; t < T; ++t) sum[t][i] = Isa::fma(row, in[t], sum[t][i]);
    }
  }
  for (int t = 0; t < T; ++t) {
    for (int i = 0; i < kRows; ++i) acc[t * kRows + i] = sum[t][i];
  }
}

template <class E>
PWJAX_INLINE void multiply(int tokens, const E* w, int64_t step, int64_t stride, const E* const* x, int64_t at,
                           int vectors, V* acc) {
  static_assert(Isa::kTile <= 6, "add the missing cases");
  switch (tokens) {
    case 1: return multiply<1>(w, step, stride, x, at, vectors, acc);
    case 2: return multiply<2>(w, step, stride, x, at, vectors, acc);
    case 3: return multiply<3>(w, step, stride, x, at, vectors, acc);
#if PWJAX_TILE > 3
    case 4: return multiply<4>(w, step, stride, x, at, vectors, acc);
    case 5: return multiply<5>(w, step, stride, x, at, vectors, acc);
    case 6: return multiply<6>(w, step, stride, x, at, vectors, acc);
#endif
  }
}

// Rows one after another, `stride` elements from each to the next.
template <class E>
void multiply(int tokens, const E* w, int64_t stride, const E* const* x, int64_t at, int vectors, V* acc) {
  multiply(tokens, w, kElements<E>, stride, x, at, vectors, acc);
}

// Rows that take turns, a vector each: one stream of memory.
template <class E>
void multiply(int tokens, const E* w, const E* const* x, int64_t at, int vectors, V* acc) {
  multiply(tokens, w, kRows * kElements<E>, kElements<E>, x, at, vectors, acc);
}

}  // namespace
}  // namespace pwjax
