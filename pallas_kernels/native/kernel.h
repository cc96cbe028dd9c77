// expert_ffn for one instruction set. Included once by each of portable.cc, avx2.cc, avx512.cc and avx512_bf16.cc, after
// `Isa` is defined there; everything is in an unnamed namespace, so that no function compiled for one processor can be
// linked into the code for another.
//
// Isa: V, a vector of kLanes floats, what sums are made in; Element, what inputs and decoded weights are multiplied as,
// and W, a vector of those; kTile, the tokens of a register tile; kChunk = 32 * kLanes columns, which it decodes as 8
// groups of kGroup vectors W in a column order of its own. Inputs are put into that order once, weights never.
//
// Every sum over columns has one order, chunk by chunk and group by group in one accumulator, whatever path it is
// computed on and whatever else is computed beside it. A result so depends on its own row and token alone.

#include "exponential.h"
#include "multiply.h"

namespace pwjax {
namespace {

constexpr int64_t kStreamed = 8;  // up to so many tokens, decoded weights stay in registers or the first cache
constexpr int64_t kStreamBand = 32, kMostStreamBand = 128;
constexpr int64_t kTableAhead = 16;  // tables are asked for so many before their own
constexpr int64_t kBandBytes = 384 * 1024;  // decoded rows that stay in the second cache
constexpr int64_t kBandRows = 48;
// Chunks of a tile's tokens that stay in the first cache.
constexpr int64_t kDepth = ceil_div(12 * 1024, Isa::kChunk * Isa::kTile * static_cast<int64_t>(sizeof(Isa::Element)));

using Element = Isa::Element;
using W = Isa::W;
constexpr int kGroup = Isa::kChunk / 8 / kElements<Element>;
static_assert(sizeof(Element) <= sizeof(float), "rows of inputs are measured in floats");

// Elements from one row of inputs to the next: a cache line more than they need, see kGap.
inline int64_t row_elements(int64_t cols) { return padded(cols) - kGap + 64 / static_cast<int64_t>(sizeof(Element)); }

// Four rows of a block at a compile-time width, 16 for bfloat16 rows.
template <int B>
struct Tile {
  static constexpr int kStreams = B == 16 ? 1 : B;
  static constexpr int64_t kWords = B == 16 ? Isa::kChunk / 2 : Isa::kChunk / 32;
  const uint32_t* words[kRows][kStreams];
  int64_t row_words, at = 0;  // at: the word of a row that the chunk begins with
  float scale[kRows];
  const typename Isa::Table* table[kRows];
  typename Isa::Table tables[kRows];
  uint32_t tail[kRows][kStreams][kWords];

  // Rows past `limit` repeat the last one; their results are not used.
  Tile(const Block& block, int64_t first, int64_t limit) {
    const Rows& rows = B == 16 ? block.dense : block.plane[0];  // planes lie alike, each in its own pages
    row_words = rows.row_words;
    Walk row(first, rows.per_page);
    Walk member(first, block.lut_rows), group(member.turn, block.lut.per_page);
    for (int i = 0; i < kRows; ++i) {
      const bool fresh = i == 0 || member.place == 0;
      if constexpr (B == 16) {
        words[i][0] = block.dense.row(row);
        scale[i] = 1.0f;
      } else {
        for (int p = 0; p < B; ++p) words[i][p] = block.plane[p].row(row);
        const uint32_t* record = block.lut.row(group);
        if (fresh) __builtin_prefetch(record + kTableAhead * block.lut.row_words, 0, 3);
        scale[i] = half(record[member.place / 2] >> (16 * (member.place % 2)));
        if (fresh) Isa::template make_table<B>(record + block.scale_words, &tables[i]);
        table[i] = fresh ? &tables[i] : table[i - 1];
      }
      if (first + i + 1 < limit) {
        row.next();
        member.next();
        if (member.place == 0) group.next();
      }
    }
  }

  // Goes to a chunk, in ascending order. A part of one is copied and filled up with zeros, so that nothing is read past
  // a row's end.
  PWJAX_INLINE void go_to(int64_t chunk) {
    at = chunk * kWords;
    const int64_t left = row_words - at;
    if (left >= kWords) return;
    for (int i = 0; i < kRows; ++i) {
      for (int p = 0; p < kStreams; ++p) {
        for (int64_t w = 0; w < kWords; w += Isa::kLanes) Isa::copy_part(words[i][p] + at + w, left - w, tail[i][p] + w);
        words[i][p] = tail[i][p];
      }
    }
    at = 0;
  }

  // Rows of a page lie one after another: the next tile's words are a tile's size further on. One of planes is done
  // before memory answers, so theirs are asked for three tiles ahead, into the second cache: the first can wait for
  // fewer lines at a time.
  PWJAX_INLINE void prefetch() const {
    constexpr int64_t kAhead = B == 16 ? kRows : 3 * kRows;
    for (int i = 0; i < kRows; ++i) {
      for (int p = 0; p < kStreams; ++p) {
        const char* next = reinterpret_cast<const char*>(words[i][p] + at + kAhead * row_words);
        for (int64_t byte = 0; byte < kWords * 4; byte += 64) __builtin_prefetch(next + byte, 0, 2);
      }
    }
  }

  PWJAX_INLINE void decode(Element* out) const {
    for (int i = 0; i < kRows; ++i) {
      typename Isa::Codes codes;
      if constexpr (B != 16) Isa::template unpack<B>(words[i], at, &codes);
      PWJAX_UNROLL
      for (int g = 0; g < 8; ++g) {
        W w[kGroup];
        values(codes, i, g, w);
        for (int u = 0; u < kGroup; ++u) Isa::store(out + ((g * kGroup + u) * kRows + i) * kElements<Element>, w[u]);
      }
    }
  }

  // One token, planes: decoded weights never leave the registers. The rows take turns, so that their sums overlap.
  PWJAX_INLINE void dot(const Element* x, V* sum) const {
    typename Isa::Codes codes[kRows];
    for (int i = 0; i < kRows; ++i) Isa::template unpack<B>(words[i], at, &codes[i]);
    PWJAX_UNROLL
    for (int g = 0; g < 8; ++g) {
      for (int i = 0; i < kRows; ++i) {
        W w[kGroup];
        values(codes[i], i, g, w);
        for (int u = 0; u < kGroup; ++u) {
          sum[i] = Isa::fma(w[u], Isa::load(x + (g * kGroup + u) * kElements<Element>), sum[i]);
        }
      }
    }
  }

 private:
  PWJAX_INLINE void values(const typename Isa::Codes& codes, int i, int g, W* w) const {
    if constexpr (B == 16) {
      Isa::dense_values(words[i][0] + at + g * 2 * Isa::kLanes, w);
    } else {
      Isa::template values<B>(codes, *table[i], g, w);
    }
  }
};

// Products of rows [first, limit) with n tokens: out[t * stride + row - first].
struct Rect {
  const Block& block;
  int64_t first, limit;
  const Element* const* x;
  int64_t n;
  float* out;
  int64_t stride;

  PWJAX_INLINE void put(int64_t t, int64_t row, const V* acc, const float* scale) const {
    float sums[kRows];
    Isa::sums(acc, sums);
    for (int i = 0; i < kRows; ++i) sums[i] *= scale[i];
    float* to = out + t * stride + row - first;
    if (row + kRows <= limit) {
      std::memcpy(to, sums, sizeof sums);
    } else {
      for (int i = 0; row + i < limit; ++i) to[i] = sums[i];
    }
  }
};

// 16-bit rows and one token: nothing is decoded, and memory is fastest when it is read from one end to the other, so the
// rows that take turns are as few as hide the latency of a sum.
inline void stream_dense(const Rect& r) {
  constexpr int kTurns = ceil_div(16, Isa::kLanes);
  static_assert(kTurns <= kRows);
  constexpr int64_t kStep = 2 * Isa::kLanes, kAhead = 2048;  // words: of a group, and until memory answers
  const int64_t words = r.block.dense.row_words;
  for (int64_t row = r.first; row < r.limit; row += kTurns) {
    const uint32_t* from[kTurns];
    for (int i = 0; i < kTurns; ++i) from[i] = r.block.dense.row(row + i < r.limit ? row + i : row);
    V sum[kRows];
    for (V& s : sum) s = Isa::zero();
    for (int64_t at = 0; at < words; at += kStep) {
      for (int i = 0; i < kTurns; ++i) {
        const uint32_t* pairs = from[i] + at;
        uint32_t part[kStep];
        for (int64_t w = 0; w < kStep; w += 16) __builtin_prefetch(pairs + kAhead + w, 0, 3);
        if (at + kStep > words) {
          Isa::copy_part(pairs, words - at, part);
          Isa::copy_part(pairs + Isa::kLanes, words - at - Isa::kLanes, part + Isa::kLanes);
          pairs = part;
        }
        W w[kGroup];
        Isa::dense_values(pairs, w);
        for (int u = 0; u < kGroup; ++u) {
          sum[i] = Isa::fma(w[u], Isa::load(r.x[0] + 2 * at + u * kElements<Element>), sum[i]);
        }
      }
    }
    float sums[kRows];
    Isa::sums(sum, sums);
    for (int i = 0; i < kTurns && row + i < r.limit; ++i) r.out[row + i - r.first] = sums[i];
  }
}

template <int B>
void stream_one(const Rect& r) {
  const int64_t chunks = ceil_div(r.block.cols, Isa::kChunk);
  for (int64_t row = r.first; row < r.limit; row += kRows) {
    Tile<B> tile(r.block, row, r.limit);
    V sum[kRows];
    for (V& s : sum) s = Isa::zero();
    for (int64_t c = 0; c < chunks; ++c) {
      tile.go_to(c);
      tile.prefetch();
      tile.dot(r.x[0] + c * Isa::kChunk, sum);
    }
    r.put(0, row, sum, tile.scale);
  }
}

template <int B>
void stream(const Rect& r) {
  const int64_t chunks = ceil_div(r.block.cols, Isa::kChunk);
  for (int64_t row = r.first; row < r.limit; row += kRows) {
    Tile<B> tile(r.block, row, r.limit);
    V acc[kStreamed * kRows];
    for (int64_t i = 0; i < r.n * kRows; ++i) acc[i] = Isa::zero();
    for (int64_t c = 0; c < chunks; ++c) {
      alignas(64) Element weights[kRows * Isa::kChunk];
      tile.go_to(c);
      tile.prefetch();
      tile.decode(weights);
      for (int64_t t = 0; t < r.n; t += Isa::kTile) {
        int count = static_cast<int>(r.n - t < Isa::kTile ? r.n - t : Isa::kTile);
        multiply(count, weights, r.x + t, c * Isa::kChunk, 8 * kGroup, acc + t * kRows);
      }
    }
    for (int64_t t = 0; t < r.n; ++t) r.put(t, row, acc + t * kRows, tile.scale);
  }
}

// Rows that are decoded together for many tokens.
inline int64_t band_rows(int64_t cols) {
  int64_t rows = kBandBytes / static_cast<int64_t>(sizeof(Element)) / row_elements(cols) / kRows * kRows;
  return rows < kRows ? kRows : rows > kBandRows ? kBandRows : rows;
}

template <int B>
void band(const Rect& r) {
  int64_t chunks = ceil_div(r.block.cols, Isa::kChunk), width = chunks * Isa::kChunk;
  int64_t most = band_rows(r.block.cols);
  static thread_local std::vector<Element> room;
  room.resize(most * width + 64 / sizeof(Element));
  Element* weights = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64 / sizeof(Element);
  for (int64_t first = r.first; first < r.limit; first += most) {
    int64_t limit = first + most < r.limit ? first + most : r.limit;
    float scale[kBandRows];
    for (int64_t row = first; row < limit; row += kRows) {
      Tile<B> tile(r.block, row, limit);
      for (int64_t c = 0; c < chunks; ++c) {
        tile.go_to(c);
        tile.prefetch();
        tile.decode(weights + (row - first) * width + c * kRows * Isa::kChunk);
      }
      for (int i = 0; i < kRows; ++i) scale[row - first + i] = tile.scale[i];
    }
    for (int64_t t = 0; t < r.n; t += Isa::kTile) {
      int count = static_cast<int>(r.n - t < Isa::kTile ? r.n - t : Isa::kTile);
      V acc[kBandRows * Isa::kTile];
      for (int64_t i = 0; i < (limit - first + kRows - 1) / kRows * kRows * Isa::kTile; ++i) acc[i] = Isa::zero();
      // Some chunks of the tokens stay in the first cache while all rows of the band pass.
      for (int64_t c = 0; c < chunks; c += kDepth) {
        const int64_t depth = chunks - c < kDepth ? chunks - c : kDepth;
        for (int64_t row = first; row < limit; row += kRows) {
          multiply(count, weights + (row - first) * width + c * kRows * Isa::kChunk, r.x + t, c * Isa::kChunk,
                   static_cast<int>(depth * 8 * kGroup), acc + (row - first) * Isa::kTile);
        }
      }
      for (int64_t row = first; row < limit; row += kRows) {
        for (int j = 0; j < count; ++j) {
          r.put(t + j, row, acc + (row - first) * Isa::kTile + j * kRows, scale + row - first);
        }
      }
    }
  }
}

template <int B>
void rows_at(const Rect& r) {
  if (r.n > kStreamed) return band<B>(r);
  if (r.n > 1) return stream<B>(r);
  if constexpr (B == 16) return stream_dense(r);
  if constexpr (B != 16) return stream_one<B>(r);
}

inline void rows(const Rect& r) {
  switch (r.block.bits) {
    case 2: return rows_at<2>(r);
    case 3: return rows_at<3>(r);
    case 4: return rows_at<4>(r);
    case 5: return rows_at<5>(r);
    case 6: return rows_at<6>(r);
    case 7: return rows_at<7>(r);
    case 8: return rows_at<8>(r);
    case 16: return rows_at<16>(r);
  }
}

// Columns of a chunk in the order that the weights of planes, or of 16-bit rows, are decoded in.
struct Order {
  int32_t column[Isa::kChunk];

  explicit Order(int (*column_at)(int)) {
    for (int at = 0; at < Isa::kChunk; ++at) column[at] = column_at(at);
  }
};

// `in` [cols] in one of these orders, filled up with zeros to whole chunks.
inline void reorder(const float* in, int64_t cols, bool pairs, Element* out) {
  static const Order orders[2] = {Order(Isa::plane_column), Order(Isa::pair_column)};
  const int32_t* column = orders[pairs].column;
  for (; cols > 0; cols -= Isa::kChunk, in += Isa::kChunk, out += Isa::kChunk) {
    float filled[Isa::kChunk];
    if (cols < Isa::kChunk) {
      std::memcpy(filled, in, cols * sizeof(float));
      std::fill(filled + cols, filled + Isa::kChunk, 0.0f);
      in = filled;
    }
    Element room[Isa::kChunk];
    const Element* from = Isa::elements(in, room);
    for (int at = 0; at < Isa::kChunk; ++at) out[at] = from[column[at]];
  }
}

// Eight sums that take turns: one fixed order that also vectorizes.
inline float square_norm(const float* in, int64_t count) {
  float sums[8] = {};
  int64_t at = 0;
  for (; at + 8 <= count; at += 8) {
    for (int i = 0; i < 8; ++i) sums[i] += in[at + i] * in[at + i];
  }
  for (int i = 0; at + i < count; ++i) sums[i] += in[at + i] * in[at + i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// gate * sigmoid(s) * up into `gate`: silu with s = gate; the tanh form of gelu is g * sigmoid(2u).
inline void activate(Activation activation, float* gate, const float* up, int64_t count) {
  if (activation == Activation::kSilu) {
    for (int64_t i = 0; i < count; ++i) gate[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
  } else {
    for (int64_t i = 0; i < count; ++i) {
      float g = gate[i], u = 0.7978845608f * (g + 0.044715f * g * g * g);
      gate[i] = g / (1.0f + exponential(-2.0f * u)) * up[i];
    }
  }
}

// Rows that a thread reads one after another, of so many in all: many, for each new place is read slowly at first, but
// few enough that all threads have work to the end.
inline int64_t stream_band(int64_t rows) {
  const int64_t even = rows / (4 * processors()) / kStreamBand * kStreamBand;
  return even < kStreamBand ? kStreamBand : even > kMostStreamBand ? kMostStreamBand : even;
}

// Items of a phase over bands of `total` rows of every group.
struct Bands {
  std::vector<std::pair<size_t, int64_t>> items;  // group, first row
  std::vector<int64_t> size;                      // of each group's bands

  Bands(const std::vector<Group>& groups, int matrix, int64_t total) {
    for (size_t g = 0; g < groups.size(); ++g) {
      bool streamed = static_cast<int64_t>(groups[g].choices.size()) <= kStreamed;
      size.push_back(streamed ? stream_band(total * groups.size()) : band_rows(groups[g].block[matrix].cols));
      for (int64_t row = 0; row < total; row += size[g]) items.emplace_back(g, row);
    }
  }
};

// Everything that the phases of a call share; lives on the caller's stack until the last phase is done.
struct Run {
  const Call& call;
  const std::vector<Group>& groups;
  Scratch scratch;
  Bands gate_up, down;
  bool planes = false, pairs = false;  // which orders of x are read
  std::vector<std::vector<const Element*>> outer, inner;  // of each group: what its choices read
  std::vector<size_t> group_of;                           // of each choice; groups.size() where masked

  Run(const Call& c, const std::vector<Group>& g)
      : call(c), groups(g), scratch(c.scratch, c.tokens, c.top_k, c.hidden, c.inner), gate_up(g, 0, c.inner),
        down(g, 1, c.hidden), outer(g.size()), inner(g.size()), group_of(c.choices(), g.size()) {
    for (size_t i = 0; i < groups.size(); ++i) {
      bool dense = groups[i].block[0].bits == 16;
      (dense ? pairs : planes) = true;
      for (int64_t choice : groups[i].choices) {
        group_of[choice] = i;
        outer[i].push_back(row(dense ? scratch.x_pairs : scratch.x_planes, choice / call.top_k, call.hidden));
        inner[i].push_back(row(scratch.inner_ordered, choice, call.inner));
      }
    }
  }

  static Element* row(float* part, int64_t index, int64_t cols) {
    return reinterpret_cast<Element*>(part) + index * row_elements(cols);
  }

  void token_in(int64_t t) {
    float norm = 0.0f;
    if (call.valid[t]) {
      const float* x = call.x + t * call.hidden;
      norm = square_norm(x, call.hidden);
      if (planes) reorder(x, call.hidden, false, row(scratch.x_planes, t, call.hidden));
      if (pairs) reorder(x, call.hidden, true, row(scratch.x_pairs, t, call.hidden));
    }
    for (int64_t j = 0; j < call.top_k; ++j) {
      float* stats = call.stats + (t * call.top_k + j) * 2;
      stats[0] = norm;
      stats[1] = 0.0f;
    }
  }

  void gate_up_band(int64_t item) {
    auto [g, first] = gate_up.items[item];
    const Group& group = groups[g];
    int64_t limit = first + gate_up.size[g] < call.inner ? first + gate_up.size[g] : call.inner;
    int64_t n = group.choices.size(), count = limit - first;
    static thread_local std::vector<float> room;
    room.resize(2 * n * count);
    float *gate = room.data(), *up = gate + n * count;
    rows(Rect{group.block[0], first, limit, outer[g].data(), n, gate, count});
    rows(Rect{group.block[0], call.inner + first, call.inner + limit, outer[g].data(), n, up, count});
    for (int64_t t = 0; t < n; ++t) {
      activate(call.activation, gate + t * count, up + t * count, count);
      std::memcpy(scratch.inner + group.choices[t] * call.inner + first, gate + t * count, count * sizeof(float));
    }
  }

  void choice_between(int64_t choice) {
    size_t g = group_of[choice];
    if (g == groups.size()) return;
    const float* in = scratch.inner + choice * call.inner;
    call.stats[choice * 2 + 1] = square_norm(in, call.inner);
    reorder(in, call.inner, groups[g].block[1].bits == 16, row(scratch.inner_ordered, choice, call.inner));
  }

  void down_band(int64_t item) {
    auto [g, first] = down.items[item];
    const Group& group = groups[g];
    int64_t limit = first + down.size[g] < call.hidden ? first + down.size[g] : call.hidden;
    int64_t n = group.choices.size(), count = limit - first;
    static thread_local std::vector<float> room;
    room.resize(n * count);
    rows(Rect{group.block[1], first, limit, inner[g].data(), n, room.data(), count});
    for (int64_t t = 0; t < n; ++t) {
      float* out = scratch.out + group.choices[t] * call.hidden + first;
      std::memcpy(out, room.data() + t * count, count * sizeof(float));
    }
  }

  void token_out(int64_t t) {
    float* y = call.y + t * call.hidden;
    std::memset(y, 0, call.hidden * sizeof(float));
    if (!call.valid[t]) return;
    for (int64_t j = 0; j < call.top_k; ++j) {
      float gate = call.gates[t * call.top_k + j];
      const float* out = scratch.out + (t * call.top_k + j) * call.hidden;
      for (int64_t i = 0; i < call.hidden; ++i) y[i] += gate * out[i];
    }
  }

  void moments_of(int64_t item) {
    const Group& group = groups[item / 2];
    bool second = item % 2;
    int64_t cols = second ? call.inner : call.hidden;
    float* sums = call.moments[second] + group.expert * cols;
    for (int64_t choice : group.choices) {
      const float* in = second ? scratch.inner + choice * cols : call.x + choice / call.top_k * cols;
      float gate = call.gates[choice];
      for (int64_t i = 0; i < cols; ++i) sums[i] += gate * gate * (in[i] * in[i]);
    }
  }
};

}  // namespace

// Fills in `team` with the work of a call. The returned object must live until the team is done.
std::shared_ptr<void> PWJAX_NAME(expert_ffn)(const Call& call, const std::vector<Group>& groups, Team* team) {
  auto run = std::make_shared<Run>(call, groups);
  Run* r = run.get();
  auto phase = [team, r](int64_t items, void (Run::*what)(int64_t)) {
    team->phase(items, [r, what](int64_t item) {
      Isa::Mode mode;
      (r->*what)(item);
    });
  };
  phase(call.tokens, &Run::token_in);
  phase(r->gate_up.items.size(), &Run::gate_up_band);
  phase(call.choices(), &Run::choice_between);
  phase(r->down.items.size(), &Run::down_band);
  phase(call.tokens, &Run::token_out);
  if (call.moments[0]) {
    std::memset(call.moments[0], 0, call.experts * call.hidden * sizeof(float));
    std::memset(call.moments[1], 0, call.experts * call.inner * sizeof(float));
    phase(2 * groups.size(), &Run::moments_of);
  }
  return run;
}

}  // namespace pwjax
