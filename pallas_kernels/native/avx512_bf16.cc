// The kernels for AVX-512 with BF16: inputs and the entries of tables are rounded to bfloat16, one vpermw looks up 32
// weights, one vdpbf16ps multiplies 32; sums are float32.
#include "bfloat16.h"
#if PWJAX_BF16
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "call.h"
#include "linear.h"
#include "team.h"

#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#include "avx512.h"
#include "half.h"

namespace pwjax {
namespace {

struct Isa : Avx512 {
  using W = I;
  using Element = uint16_t;

  using Avx512::fma;
  using Avx512::load;
  using Avx512::store;
  static W load(const Element* from) { return _mm512_loadu_si512(from); }
  static void store(Element* to, W v) { _mm512_storeu_si512(to, v); }
  static V fma(W a, W b, V c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }

  static const Element* elements(const float* in, Element* room) {
    for (int at = 0; at < kChunk; at += kLanes) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(room + at), (__m256i)_mm512_cvtneps_pbh(load(in + at)));
    }
    return room;
  }

  // The halves of word i in vector u of group g have columns 8u + g and 8u + g + 16 of word i of a chunk.
  static int plane_column(int at) { return at % 32 / 2 * 32 + at % 2 * 16 + at / 32 % 2 * 8 + at / 64; }
  static int pair_column(int at) { return at; }

  // Entries 32 a vector; fewer are repeated, so that what is above a code chooses nothing.
  struct Table {
    I half[8];
  };

  template <int B>
  static PWJAX_INLINE void make_table(const uint32_t* lut, Table* table) {
    constexpr int kWords = B < 5 ? (1 << B) / 2 : 16;
    for (int i = 0; i < (B < 5 ? 1 : 1 << (B - 5)); ++i) {
      uint32_t entries[16];
      for (int at = 0; at < 16; at += kWords) std::memcpy(entries + at, lut + 16 * i, kWords * sizeof(uint32_t));
      const I both = at(entries);
      const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(both));
      const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1));
      table->half[i] = (I)_mm512_cvtne2ps_pbh(high, low);
    }
  }

  template <int B>
  static PWJAX_INLINE void unpack(const uint32_t* const* planes, int64_t word, Codes* codes) {
    I plane[B];
    for (int p = 0; p < B; ++p) plane[p] = at(planes[p] + word);
    unpack_nibbles<Isa, B>(plane, codes);
  }

  template <int B>
  static PWJAX_INLINE void values(const Codes& codes, const Table& table, int g, W* out) {
    const I code = bytes<B>(codes, g);
    out[0] = lookup<(B < 5 ? 5 : B)>(table.half, code);
    out[1] = lookup<(B < 5 ? 5 : B)>(table.half, right<8>(code));
  }

  static PWJAX_INLINE void dense_values(const uint32_t* words, W* out) {
    out[0] = at(words);
    out[1] = at(words + 16);
  }
};

}  // namespace
}  // namespace pwjax

#define PWJAX_TILE 6
#define PWJAX_NAME(op) op##_avx512_bf16
#include "kernel.h"
#include "linear_kernel.h"
#pragma GCC pop_options
#endif
