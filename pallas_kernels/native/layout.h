// Where the rows of a block lie: pallas_kernels/pages.py in C++, read-only. No arithmetic on weights here.
#pragma once

#include <cstdint>
#include <string>

namespace pwjax {

constexpr int kMaxPlanes = 8;

// Numbers from `index` on, each as a turn of `size` and a place in it: divided once, then counted.
struct Walk {
  int64_t size, turn, place;

  Walk(int64_t index, int64_t size) : size(size), turn(index / size), place(index % size) {}
  void next() {
    if (++place == size) {
      place = 0;
      ++turn;
    }
  }
};

// Rows of equal size in pages that hold whole rows only.
struct Rows {
  const uint32_t* arena = nullptr;
  const int32_t* pages = nullptr;
  int64_t page_words = 0, row_words = 1, per_page = 1;

  const uint32_t* row(const Walk& at) const {
    return arena + int64_t{pages[at.turn]} * page_words + at.place * row_words;
  }
  const uint32_t* row(int64_t index) const { return row(Walk(index, per_page)); }
};

// One expert matrix as it is committed: `bits` planes and a LUT, or 16-bit rows.
struct Block {
  int bits = 0;
  int64_t rows = 0, cols = 0, lut_rows = 1, scale_words = 1;
  Rows plane[kMaxPlanes], lut, dense;
};

struct Shape {
  int64_t rows, cols, lut_rows;
};

struct Geometry {
  int64_t page_words, lowest, parent, fallback, slots;
  Shape matrix[2];
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Columns are padded to this many in the kernel's own copies of inputs: a whole number of chunks of every
// instruction set.
constexpr int64_t kPadding = 512;
// A cache line more from row to row: at multiples of 4096 bytes, all rows would share a few sets of the first cache.
constexpr int64_t kGap = 16;
inline int64_t padded(int64_t cols) { return ceil_div(cols, kPadding) * kPadding + kGap; }

// What is wrong with a geometry, empty if nothing: every division and row below relies on it.
inline std::string geometry_problem(const Geometry& g) {
  if (g.page_words < 1) return "a page must have words";
  if (g.lowest < 2 || g.parent > kMaxPlanes || g.lowest > g.parent) return "widths must lie within 2..8";
  int64_t needed = 0;
  for (const Shape& m : g.matrix) {
    if (m.rows < 1 || m.cols < 1 || m.lut_rows < 1 || m.rows % m.lut_rows) return "a matrix is misshapen";
    int64_t widest = ceil_div(m.cols, 32);
    int64_t lut = ceil_div(m.lut_rows, 2) + (int64_t{1} << g.parent) / 2;
    if (lut > widest) widest = lut;
    if (g.fallback && ceil_div(m.cols, 2) > widest) widest = ceil_div(m.cols, 2);
    if (widest > g.page_words) return "a row of " + std::to_string(widest) + " words does not fit in a page";
    int64_t used = g.parent * ceil_div(m.rows, g.page_words / ceil_div(m.cols, 32)) +
                   ceil_div(m.rows / m.lut_rows, g.page_words / lut);
    if (used > needed) needed = used;
    if (g.fallback) {
      used = ceil_div(m.rows, g.page_words / ceil_div(m.cols, 2));
      if (used > needed) needed = used;
    }
  }
  if (g.slots < needed) {
    return "the page table has " + std::to_string(g.slots) + " slots a block, blocks need " + std::to_string(needed);
  }
  return "";
}

// Fills in `block` from the table entries of one block; says what is wrong with them, empty if nothing. Afterwards
// every row of the block lies within the arena.
inline std::string read_block(const Geometry& g, int matrix, const uint32_t* arena, int64_t num_pages,
                              int32_t bits, const int32_t* slots, Block* block) {
  const Shape& shape = g.matrix[matrix];
  if (!(bits >= g.lowest && bits <= g.parent) && !(g.fallback && bits == 16)) {
    return std::to_string(bits) + " bits are not in this model";
  }
  block->bits = bits;
  block->rows = shape.rows;
  block->cols = shape.cols;
  block->lut_rows = shape.lut_rows;
  block->scale_words = ceil_div(shape.lut_rows, 2);
  std::string problem;
  auto rows = [&](int64_t slot, int64_t count, int64_t row_words) {
    Rows found{arena, slots + slot, g.page_words, row_words, g.page_words / row_words};
    for (int64_t i = 0; i < ceil_div(count, found.per_page); ++i) {
      if (found.pages[i] < 0 || found.pages[i] >= num_pages) {
        problem = "page " + std::to_string(found.pages[i]) + " is outside of the arena's " + std::to_string(num_pages);
      }
    }
    return found;
  };
  if (bits == 16) {
    block->dense = rows(0, shape.rows, ceil_div(shape.cols, 2));
    return problem;
  }
  int64_t words = ceil_div(shape.cols, 32), plane_pages = ceil_div(shape.rows, g.page_words / words);
  for (int p = 0; p < bits; ++p) block->plane[p] = rows(p * plane_pages, shape.rows, words);
  block->lut = rows(g.parent * plane_pages, shape.rows / shape.lut_rows,
                    block->scale_words + (int64_t{1} << bits) / 2);
  return problem;
}

}  // namespace pwjax
