// Planes to codes, 32 columns a word, as two rounds of bit transposition on vectors of words. For instruction sets whose
// `Isa` has I, a vector of words, with at(words), all(word), both(a, b), select(mask, yes, no), left<n> and right<n>.
#pragma once

#include <cstdint>

#include "inline.h"

namespace pwjax {
namespace {

// N planes (1..4, MSB first) to four vectors of nibbles.
template <class Isa, int N, class I = typename Isa::I>
PWJAX_INLINE void nibbles(const I* plane, I* out) {
  const I even = Isa::all(0x55555555), pairs = Isa::all(0x33333333);
  I low[2], high[2];
  // Fields of two bits: columns 2k of planes 2 and 3 (1 and 2, ...) in low[0], columns 2k + 1 in low[1].
  const I last = plane[N - 1];
  if constexpr (N == 1) {
    low[0] = Isa::both(last, even);
    low[1] = Isa::both(Isa::template right<1>(last), even);
  } else {
    const I before = plane[N - 2];
    low[0] = Isa::select(even, last, Isa::template left<1>(before));
    low[1] = Isa::select(even, Isa::template right<1>(last), before);
  }
  if constexpr (N <= 2) {
    PWJAX_UNROLL
    for (int k = 0; k < 2; ++k) {
      out[k] = Isa::both(low[k], pairs);
      out[k + 2] = Isa::both(Isa::template right<2>(low[k]), pairs);
    }
    return;
  } else {
    const I second = plane[N - 3];
    if constexpr (N == 3) {
      high[0] = Isa::both(second, even);
      high[1] = Isa::both(Isa::template right<1>(second), even);
    } else {
      high[0] = Isa::select(even, second, Isa::template left<1>(plane[0]));
      high[1] = Isa::select(even, Isa::template right<1>(second), plane[0]);
    }
    PWJAX_UNROLL
    for (int k = 0; k < 2; ++k) {
      out[k] = Isa::select(pairs, low[k], Isa::template left<2>(high[k]));
      out[k + 2] = Isa::select(pairs, Isa::template right<2>(low[k]), high[k]);
    }
  }
}

// B planes to the last four bits of every code in `codes->low`, and to those above in `codes->high` where B > 4.
template <class Isa, int B>
PWJAX_INLINE void unpack_nibbles(const typename Isa::I* plane, typename Isa::Codes* codes) {
  nibbles<Isa, (B < 4 ? B : 4)>(plane + (B < 4 ? 0 : B - 4), codes->low);
  if constexpr (B > 4) nibbles<Isa, B - 4>(plane, codes->high);
}

}  // namespace
}  // namespace pwjax
