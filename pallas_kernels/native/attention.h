// One call of paged_attention: its buffers, the checks that every address relies on, and where keys and values lie.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <string>

#include "layout.h"

namespace pwjax {

// Keys and values are widened so many at a time. Tiles begin at multiples of it in a sequence, wherever its past ends:
// how a sequence is cut into past and fresh tokens changes no bit.
constexpr int64_t kTileKeys = 32;
// Query rows that pass over a tile while it is in the cache, and columns of a tile's row, about.
constexpr int64_t kBlockRows = 48, kTileColumns = 1024;

// B slots, T queries each, F fresh tokens, H heads, G KV heads, D columns a head; L layers, P columns of the table.
struct Attention {
  int64_t slots, queries, fresh, heads, kv_heads, dim, layers, columns;
  int64_t num_pages, page_words, element_bytes;  // 2: bfloat16, 4: float32
  int64_t window;                                // tokens that a query sees at most, itself included; 0: all
  const float* q;                                // [B, T, H, D]
  const char *fresh_kv[2];                       // [B, F, G, D]
  int64_t start;                                 // fresh tokens before the first query's own
  const uint32_t* arena;                         // [num_pages, page_words]
  const int32_t *table, *length;                 // [B, L, 2, P], [B]
  int64_t layer;
  float* out;                                    // [B, T, H, D]
  float* scratch;                                // seats times Room::floats
  int64_t threads, seats;                        // that there may be, that the scratch has room for

  int64_t shared() const { return heads / kv_heads; }  // queries of a token that share a KV head
  int64_t block_queries() const { return std::max<int64_t>(1, kBlockRows / shared()); }
  int64_t blocks() const { return ceil_div(queries, block_queries()); }
  // KV heads of an item. They lie side by side in a row: a few queries read them together, where a thread has enough to
  // do. No bit depends on it.
  int64_t bundle() const {
    const int64_t rows = shared() * std::min(queries, block_queries());
    int64_t best = 1;
    for (int64_t heads = 2; heads <= kv_heads; ++heads) {
      if (kv_heads % heads == 0 && heads * rows <= kBlockRows && heads * dim <= kTileColumns &&
          slots * blocks() * (kv_heads / heads) >= 2 * threads) {
        best = heads;
      }
    }
    return best;
  }
  int64_t items() const { return slots * blocks() * (kv_heads / bundle()); }
  int64_t row_words() const { return kv_heads * dim * element_bytes / 4; }
  int64_t page_tokens() const { return page_words / row_words(); }
  const int32_t* pages(int64_t slot, int which) const { return table + ((slot * layers + layer) * 2 + which) * columns; }

  // Positions that query t of a slot sees: [first, limit).
  int64_t limit(int64_t slot, int64_t t) const { return length[slot] + start + t + 1; }
  int64_t first(int64_t slot, int64_t t) const { return window ? std::max<int64_t>(0, limit(slot, t) - window) : 0; }
};

// Positions that lie one after another in a page or among the fresh tokens.
struct KvRun {
  const char* at;
  int64_t stride, count;
};

// Rows of keys (0) or values (1) from `position` on, at most up to `limit`.
inline KvRun kv_run(const Attention& a, int which, int64_t slot, int64_t position, int64_t limit) {
  const int64_t stride = a.row_words() * 4, past = a.length[slot];
  if (position >= past) {
    return {a.fresh_kv[which] + (slot * a.fresh + position - past) * stride, stride, limit - position};
  }
  int64_t turn = position / a.page_tokens(), row = position % a.page_tokens();
  const uint32_t* page = a.arena + int64_t{a.pages(slot, which)[turn % a.columns]} * a.page_words;
  return {reinterpret_cast<const char*>(page) + row * stride, stride,
          std::min({a.page_tokens() - row, past - position, limit - position})};
}

// What a thread works in, in floats.
struct Room {
  float* tile;                // [kTileKeys, bundle, width]: keys, then values; zeros up to whole vectors
  float *q, *acc, *scores;    // [rows, width], [rows, width], [rows, kTileKeys]
  float *peak, *total;        // [rows]
  int64_t floats;

  static int64_t width(int64_t dim) { return ceil_div(dim, 16) * 16; }

  Room(float* at, const Attention& a) : floats(0) {
    const int64_t w = width(a.dim), queries = std::min(a.queries, a.block_queries());
    const int64_t rows = ceil_div(a.bundle() * queries * a.shared(), 16) * 16;
    auto take = [&](int64_t count) {
      float* part = at ? at + floats : nullptr;
      floats += count;
      return part;
    };
    tile = take(kTileKeys * a.bundle() * w);
    q = take(rows * w);
    acc = take(rows * w);
    scores = take(rows * kTileKeys);
    peak = take(rows);
    total = take(rows);
  }
};

// What is wrong with a call, empty if nothing. Afterwards every row that a query sees lies within the arena or the
// fresh tokens, and every query sees itself at least.
inline std::string attention_problem(const Attention& a) {
  auto text = [](int64_t number) { return std::to_string(number); };
  if (a.kv_heads < 1 || a.heads < 1 || a.heads % a.kv_heads || a.dim < 1) return "the heads are misshapen";
  if (a.row_words() * 4 != a.kv_heads * a.dim * a.element_bytes) return "a KV row is not a whole number of words";
  if (a.window < 0) return "a window of " + text(a.window) + " tokens";
  if (a.start < 0 || a.start > a.fresh - a.queries) {
    return text(a.queries) + " queries from fresh token " + text(a.start) + " on, and there are " + text(a.fresh);
  }
  if (a.layer < 0 || a.layer >= a.layers) return "layer " + text(a.layer) + " is not one of " + text(a.layers);
  for (int64_t slot = 0; slot < a.slots; ++slot) {
    const int64_t past = a.length[slot];
    if (past == 0) continue;
    if (past < 0) return "a past of " + text(past) + " tokens";
    if (a.page_words < a.row_words()) return "a KV row of " + text(a.row_words()) + " words does not fit in a page";
    const int64_t first = a.first(slot, 0) / a.page_tokens(), turns = ceil_div(past, a.page_tokens());
    if (turns - first > a.columns) {
      return "a past of " + text(past) + " tokens needs " + text(turns - first) + " columns of the page table's " +
             text(a.columns);
    }
    for (int which = 0; which < 2; ++which) {
      for (int64_t turn = first; turn < turns; ++turn) {
        int32_t page = a.pages(slot, which)[turn % a.columns];
        if (page < 0 || page >= a.num_pages) {
          return "page " + text(page) + " is outside of the arena's " + text(a.num_pages);
        }
      }
    }
  }
  return "";
}

}  // namespace pwjax
