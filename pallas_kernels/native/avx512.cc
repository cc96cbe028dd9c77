// The kernels for AVX-512 (F, BW, DQ, VL): one vpermps looks up 16 weights among 16 floats.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "attention.h"
#include "call.h"
#include "linear.h"
#include "team.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#include "avx512.h"
#include "half.h"

namespace pwjax {
namespace {

struct Isa : Avx512 {
  using W = V;
  using Element = float;

  static const float* elements(const float* in, float*) { return in; }

  // Vector u of group g has column 8u + g of all 16 words of a chunk.
  static int plane_column(int at) { return at % 16 * 32 + at / 16 % 4 * 8 + at / 64; }
  // Even columns of 16 words, then odd ones.
  static int pair_column(int at) { return at / 32 * 32 + at % 16 * 2 + at % 32 / 16; }

  // Up to 32 entries as floats, 16 a vector; more as float16, 32 a vector. For these, halves of words stand for words:
  // first the low ones of all, then the high ones, so that 16 neighbours of float16 are one column of all words too.
  template <int B>
  static constexpr bool kWide = B > 5;
  union Table {
    V single[2];
    I half[8];
  };

  template <int B>
  static PWJAX_INLINE void make_table(const uint32_t* lut, Table* table) {
    constexpr int kEntries = 1 << B;
    if constexpr (kWide<B>) {
      for (int i = 0; i < kEntries / 32; ++i) table->half[i] = at(lut + 16 * i);
    } else {
      for (int i = 0; i < (kEntries + 15) / 16; ++i) {
        const __mmask8 present = kEntries < 16 ? (1 << kEntries / 2) - 1 : 255;
        table->single[i] = _mm512_cvtph_ps(_mm256_maskz_loadu_epi32(present, lut + 8 * i));
      }
    }
  }

  template <int B>
  static PWJAX_INLINE void unpack(const uint32_t* const* planes, int64_t word, Codes* codes) {
    I plane[B];
    for (int p = 0; p < B; ++p) {
      plane[p] = at(planes[p] + word);
      if constexpr (kWide<B>) plane[p] = _mm512_permutexvar_epi16(halves(), plane[p]);
    }
    unpack_nibbles<Isa, B>(plane, codes);
  }

  // Numbers 0, 2, ... 30, then 1, 3, ... 31.
  static PWJAX_INLINE I halves() {
    const I low = _mm512_set_epi32(0x1e001c, 0x1a0018, 0x160014, 0x120010, 0xe000c, 0xa0008, 0x60004, 0x20000,
                                   0x1e001c, 0x1a0018, 0x160014, 0x120010, 0xe000c, 0xa0008, 0x60004, 0x20000);
    return _mm512_mask_or_epi32(low, 0xff00, low, all(0x10001));
  }

  // Entries that the last B bits of every word choose, B up to 5.
  template <int B>
  static PWJAX_INLINE V choose(const Table& table, I code) {
    return B < 5 ? _mm512_permutexvar_ps(code, table.single[0])
                 : _mm512_permutex2var_ps(table.single[0], code, table.single[1]);
  }

  template <int B>
  static PWJAX_INLINE void values(const Codes& codes, const Table& table, int g, V* out) {
    const I code = bytes<B>(codes, g);
    if constexpr (kWide<B>) {
      const I even = lookup<B>(table.half, code), odd = lookup<B>(table.half, right<8>(code));
      out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(even));
      out[1] = _mm512_cvtph_ps(_mm512_castsi512_si256(odd));
      out[2] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1));
      out[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1));
    } else {
      out[0] = choose<B>(table, code);
      out[1] = choose<B>(table, right<8>(code));
      out[2] = choose<B>(table, right<16>(code));
      out[3] = choose<B>(table, right<24>(code));
    }
  }

  static PWJAX_INLINE void dense_values(const uint32_t* words, V* out) {
    const I upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    for (int u = 0; u < 4; u += 2) {
      I pair = at(words + 8 * u);
      out[u] = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
      out[u + 1] = _mm512_castsi512_ps(_mm512_and_si512(pair, upper));
    }
  }
};

}  // namespace
}  // namespace pwjax

#define PWJAX_TILE 6
#define PWJAX_NAME(op) op##_avx512
#include "kernel.h"
#include "linear_kernel.h"
#include "attention_kernel.h"
#pragma GCC pop_options
#endif
