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
#include "half.h"
#include "mode.h"
#include "nibbles.h"

namespace pwjax {
namespace {

struct Isa {
  using V = __m512;
  using I = __m512i;
  using Mode = FlushSubnormals;
  static constexpr int kLanes = 16, kTile = 6, kChunk = 32 * kLanes;

  static V zero() { return _mm512_setzero_ps(); }
  static V spread(float x) { return _mm512_set1_ps(x); }
  static V load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, V v) { _mm512_storeu_ps(to, v); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  // Sums of four vectors.
  static void sums(const V* v, float* to) {
    const V a = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const V b = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    const V quarters = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
    const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
  }

  // Vector u of group g has column 8u + g of all 16 words of a chunk.
  static int plane_column(int at) { return at % 16 * 32 + at / 16 % 4 * 8 + at / 64; }
  // Even columns of 16 words, then odd ones.
  static int pair_column(int at) { return at / 32 * 32 + at % 16 * 2 + at % 32 / 16; }

  // Up to 32 entries as floats, 16 a vector; more as float16, 32 a vector.
  template <int B>
  static constexpr bool kWide = B > 5;
  union Table {
    V single[2];
    I half[8];
  };
  // Nibble 2n + h of word i of vector q is the code of column 8n + 4h + q of word i: `low` its last four bits, `high`
  // those before. Where the table is wide, halves of words stand for words: first the low ones of all, then the high
  // ones, so that 16 neighbours of float16 are one column of all words too.
  struct Codes {
    I low[4], high[4];
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

  static I at(const uint32_t* words) { return _mm512_loadu_si512(words); }

  static I select(I mask, I yes, I no) { return _mm512_ternarylogic_epi32(mask, yes, no, 0xca); }

  static I all(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }
  static I both(I a, I b) { return _mm512_and_si512(a, b); }
  template <int N>
  static I left(I words) {
    return _mm512_slli_epi32(words, N);
  }
  template <int N>
  static I right(I words) {
    return _mm512_srli_epi32(words, N);
  }

  // Up to 16 words, the others 0.
  static void copy_part(const uint32_t* from, int64_t count, uint32_t* to) {
    const __mmask16 present = count >= 16 ? 0xffff : count > 0 ? (1 << count) - 1 : 0;
    _mm512_storeu_si512(to, _mm512_maskz_loadu_epi32(present, from));
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

  // Entries that the last N bits of every half of a word choose.
  template <int N>
  static PWJAX_INLINE I lookup(const I* table, I code) {
    if constexpr (N == 6) {
      return _mm512_permutex2var_epi16(table[0], code, table[1]);
    } else {
      const __mmask32 one = _mm512_test_epi16_mask(code, _mm512_set1_epi16(1 << (N - 1)));
      return _mm512_mask_blend_epi16(one, lookup<N - 1>(table, code), lookup<N - 1>(table + (1 << (N - 6)), code));
    }
  }

  // Entries that the last B bits of every word choose, B up to 5.
  template <int B>
  static PWJAX_INLINE V choose(const Table& table, I code) {
    return B < 5 ? _mm512_permutexvar_ps(code, table.single[0])
                 : _mm512_permutex2var_ps(table.single[0], code, table.single[1]);
  }

  // Group g: bytes of codes whatever the width; what is above a code's bits in its byte or word chooses nothing.
  template <int B>
  static PWJAX_INLINE void values(const Codes& codes, const Table& table, int g, V* out) {
    I code = g < 4 ? codes.low[g % 4] : right<4>(codes.low[g % 4]);
    if constexpr (B > 4) code = select(all(0x0f0f0f0f), code, g < 4 ? left<4>(codes.high[g % 4]) : codes.high[g % 4]);
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
