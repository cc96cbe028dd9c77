// The kernels for AVX2, FMA and F16C: tables are looked up by pshufb, 32 weights at a time.
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
#pragma GCC target("avx2,fma,f16c")
#include "half.h"
#include "mode.h"
#include "nibbles.h"

namespace pwjax {
namespace {

struct Isa {
  using V = __m256;
  using W = V;
  using I = __m256i;
  using Element = float;
  using Mode = FlushSubnormals;
  static constexpr int kLanes = 8, kTile = 3, kChunk = 32 * kLanes;

  static V zero() { return _mm256_setzero_ps(); }
  static const float* elements(const float* in, float*) { return in; }
  static V spread(float x) { return _mm256_set1_ps(x); }
  static V load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, V v) { _mm256_storeu_ps(to, v); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  // Sums of four vectors.
  static void sums(const V* v, float* to) {
    __m128 s[4];
    for (int i = 0; i < 4; ++i) s[i] = _mm_add_ps(_mm256_castps256_ps128(v[i]), _mm256_extractf128_ps(v[i], 1));
    const __m128 a = _mm_add_ps(_mm_unpacklo_ps(s[0], s[1]), _mm_unpackhi_ps(s[0], s[1]));
    const __m128 b = _mm_add_ps(_mm_unpacklo_ps(s[2], s[3]), _mm_unpackhi_ps(s[2], s[3]));
    _mm_storeu_ps(to, _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a)));
  }

  // Byte j of group g is column 8j + g of a chunk: what two rounds of bit transposition leave.
  static int plane_column(int at) { return at % 32 * 8 + at / 32; }
  // Even columns of 8 words, then odd ones.
  static int pair_column(int at) { return at / 16 * 16 + at % 8 * 2 + at % 16 / 8; }

  // Low and high bytes of float16 entries, 16 entries a vector, the same in both halves of the vector.
  struct Table {
    I low[16], high[16];
  };
  // Nibble 2n + h of word i of vector q is the code of column 32i + 8n + 4h + q: `low` its last four bits, `high`
  // those before.
  struct Codes {
    I low[4], high[4];
  };

  static I at(const uint32_t* words) { return _mm256_loadu_si256(reinterpret_cast<const I*>(words)); }

  template <int B>
  static PWJAX_INLINE void make_table(const uint32_t* lut, Table* table) {
    const I bytes = _mm256_set1_epi16(0xff);
    for (int i = 0; i < (B < 4 ? 1 : 1 << (B - 4)); ++i) {
      I entries;
      if constexpr (B < 4) {
        uint32_t few[8] = {};
        for (int w = 0; w < (1 << B) / 2; ++w) few[w] = lut[w];
        entries = at(few);
      } else {
        entries = at(lut + 8 * i);
      }
      I low = _mm256_and_si256(entries, bytes), high = _mm256_srli_epi16(entries, 8);
      // packus works in halves of a vector: bring the two low quarters together, then repeat them.
      low = _mm256_permute4x64_epi64(_mm256_packus_epi16(low, low), 0x88);
      high = _mm256_permute4x64_epi64(_mm256_packus_epi16(high, high), 0x88);
      table->low[i] = low;
      table->high[i] = high;
    }
  }

  static I select(I mask, I yes, I no) { return _mm256_or_si256(_mm256_and_si256(mask, yes), _mm256_andnot_si256(mask, no)); }

  static I all(uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }
  static I both(I a, I b) { return _mm256_and_si256(a, b); }
  template <int N>
  static I left(I words) {
    return _mm256_slli_epi32(words, N);
  }
  template <int N>
  static I right(I words) {
    return _mm256_srli_epi32(words, N);
  }

  // Up to 8 words, the others 0.
  static void copy_part(const uint32_t* from, int64_t count, uint32_t* to) {
    const I number = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const I limit = _mm256_set1_epi32(static_cast<int>(count < 0 ? 0 : count > 8 ? 8 : count));
    const I words = _mm256_maskload_epi32(reinterpret_cast<const int*>(from), _mm256_cmpgt_epi32(limit, number));
    _mm256_storeu_si256(reinterpret_cast<I*>(to), words);
  }

  template <int B>
  static PWJAX_INLINE void unpack(const uint32_t* const* planes, int64_t word, Codes* codes) {
    I plane[B];
    for (int p = 0; p < B; ++p) plane[p] = at(planes[p] + word);
    unpack_nibbles<Isa, B>(plane, codes);
  }

  // Entry `index` of the 2^N tables that begin at `table`, chosen by the last N bits of `high`, whose bit j is moved to
  // the sign of its byte by a shift of 7 - j.
  template <int N>
  static PWJAX_INLINE I lookup(const I* table, I index, I high) {
    if constexpr (N == 0) {
      return _mm256_shuffle_epi8(*table, index);
    } else {
      I zero = lookup<N - 1>(table, index, high), one = lookup<N - 1>(table + (1 << (N - 1)), index, high);
      return _mm256_blendv_epi8(zero, one, _mm256_slli_epi32(high, 8 - N));
    }
  }

  template <int B>
  static PWJAX_INLINE void values(const Codes& codes, const Table& table, int g, V* out) {
    constexpr int kUpper = B > 4 ? B - 4 : 0;
    I index = codes.low[g % 4], high = B > 4 ? codes.high[g % 4] : index;
    if (g >= 4) {
      index = _mm256_srli_epi32(index, 4);
      if constexpr (B > 4) high = _mm256_srli_epi32(high, 4);
    }
    index = _mm256_and_si256(index, _mm256_set1_epi8(15));
    I low_bytes = lookup<kUpper>(table.low, index, high), high_bytes = lookup<kUpper>(table.high, index, high);
    I first = _mm256_unpacklo_epi8(low_bytes, high_bytes), second = _mm256_unpackhi_epi8(low_bytes, high_bytes);
    out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(first));
    out[1] = _mm256_cvtph_ps(_mm256_castsi256_si128(second));
    out[2] = _mm256_cvtph_ps(_mm256_extracti128_si256(first, 1));
    out[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(second, 1));
  }

  static PWJAX_INLINE void dense_values(const uint32_t* words, V* out) {
    const I upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    for (int u = 0; u < 4; u += 2) {
      I pair = at(words + 4 * u);
      out[u] = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
      out[u + 1] = _mm256_castsi256_ps(_mm256_and_si256(pair, upper));
    }
  }
};

}  // namespace
}  // namespace pwjax

#define PWJAX_TILE 3
#define PWJAX_NAME(op) op##_avx2
#include "kernel.h"
#include "linear_kernel.h"
#include "attention_kernel.h"
#pragma GCC pop_options
#endif
