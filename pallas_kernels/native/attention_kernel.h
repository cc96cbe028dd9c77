// paged_attention for one instruction set; included as kernel.h is, whose conventions hold here.
//
// Isa: also spread(x), a vector of x. Vectors run along the columns of a head. Every sum has one order, of columns in a
// product and of positions in a softmax, tile by tile; a result depends on its own query and what that sees alone.

#include "exponential.h"
#include "multiply.h"

namespace pwjax {
namespace {

// Row t of `acc` += sum over keys [from, to) of weights[t][key] times the key's row of `values`; N vectors of columns.
template <int T, int N>
inline void combine(const float* weights, const float* values, int64_t from, int64_t to, int64_t stride, int64_t width,
                    float* acc) {
  V sum[T][N];
  for (int t = 0; t < T; ++t) {
    for (int n = 0; n < N; ++n) sum[t][n] = Isa::load(acc + t * width + n * Isa::kLanes);
  }
  for (int64_t key = from; key < to; ++key) {
    V row[N];
    for (int n = 0; n < N; ++n) row[n] = Isa::load(values + key * stride + n * Isa::kLanes);
    for (int t = 0; t < T; ++t) {
      V weight = Isa::spread(weights[t * kTileKeys + key]);
      for (int n = 0; n < N; ++n) sum[t][n] = Isa::fma(weight, row[n], sum[t][n]);
    }
  }
  for (int t = 0; t < T; ++t) {
    for (int n = 0; n < N; ++n) Isa::store(acc + t * width + n * Isa::kLanes, sum[t][n]);
  }
}

template <int T>
inline void combine(const float* weights, const float* values, int64_t from, int64_t to, int64_t stride, int64_t width,
                    float* acc) {
  int64_t at = 0;
  for (; at + 4 * Isa::kLanes <= width; at += 4 * Isa::kLanes) {
    combine<T, 4>(weights, values + at, from, to, stride, width, acc + at);
  }
  for (; at < width; at += Isa::kLanes) combine<T, 1>(weights, values + at, from, to, stride, width, acc + at);
}

inline void combine(int rows, const float* weights, const float* values, int64_t from, int64_t to, int64_t stride,
                    int64_t width, float* acc) {
  static_assert(Isa::kTile <= 6, "add the missing cases");
  switch (rows) {
    case 1: return combine<1>(weights, values, from, to, stride, width, acc);
    case 2: return combine<2>(weights, values, from, to, stride, width, acc);
    case 3: return combine<3>(weights, values, from, to, stride, width, acc);
#if PWJAX_TILE > 3
    case 4: return combine<4>(weights, values, from, to, stride, width, acc);
    case 5: return combine<5>(weights, values, from, to, stride, width, acc);
    case 6: return combine<6>(weights, values, from, to, stride, width, acc);
#endif
  }
}

inline void widen(const char* from, int64_t count, int64_t element_bytes, float* to) {
  if (element_bytes == 4) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint16_t half;
    __builtin_memcpy(&half, from + 2 * i, 2);
    uint32_t whole = static_cast<uint32_t>(half) << 16;
    __builtin_memcpy(to + i, &whole, 4);
  }
}

// Scores to softmax weights of keys [from, to), 0 for the others; what was summed under a lower peak is scaled down.
inline void weigh(float* scores, int64_t from, int64_t to, float* peak, float* total, float* acc, int64_t width) {
  float most = -std::numeric_limits<float>::infinity();
  for (int64_t i = from; i < to; ++i) most = scores[i] > most ? scores[i] : most;
  if (most > *peak) {
    const float keep = exponential(*peak - most);
    *peak = most;
    *total *= keep;
    for (int64_t i = 0; i < width; ++i) acc[i] *= keep;
  }
  const float base = *peak;
  std::fill(scores, scores + from, base);
  std::fill(scores + to, scores + kTileKeys, base);
  for (int64_t i = 0; i < kTileKeys; ++i) scores[i] = exponential(scores[i] - base);
  std::fill(scores, scores + from, 0.0f);
  std::fill(scores + to, scores + kTileKeys, 0.0f);
  float sums[8] = {};
  for (int64_t at = 0; at < kTileKeys; at += 8) {
    for (int i = 0; i < 8; ++i) sums[i] += scores[at + i];
  }
  *total += ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// The items of a call: a slot, a few KV heads and a block of queries each. A seat is the scratch of one thread.
struct Attend {
  const Attention a;
  const int64_t width, shared, bundle, stride;
  std::atomic<int64_t> next{0};

  explicit Attend(const Attention& call)
      : a(call), width(Room::width(a.dim)), shared(a.shared()), bundle(a.bundle()), stride(bundle * width) {}

  void seat(int64_t index) {
    Room room(a.scratch + index * Room(nullptr, a).floats, a);
    const int64_t items = a.items();
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) attend(item, room);
  }

  void attend(int64_t item, const Room& room) {
    // The last queries see most: theirs is the first work to be given out.
    const int64_t bundles = a.kv_heads / bundle, block = a.blocks() - 1 - item / (a.slots * bundles);
    const int64_t slot = item / bundles % a.slots, head = item % bundles * bundle;
    const int64_t begin = block * a.block_queries(), end = std::min(begin + a.block_queries(), a.queries);
    const int64_t own = (end - begin) * shared, rows = bundle * own;  // rows of a head, of all
    auto at = [&](int64_t row) {
      const int64_t t = begin + row % own / shared, h = (head + row / own) * shared + row % shared;
      return ((slot * a.queries + t) * a.heads + h) * a.dim;
    };
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(room.q + row * width, a.q + at(row), a.dim * sizeof(float));
      std::fill(room.q + row * width + a.dim, room.q + (row + 1) * width, 0.0f);
    }
    std::fill(room.acc, room.acc + rows * width, 0.0f);
    std::fill(room.peak, room.peak + rows, -std::numeric_limits<float>::infinity());
    std::fill(room.total, room.total + rows, 0.0f);
    const int64_t first = a.first(slot, begin), limit = a.limit(slot, end - 1);
    for (int64_t base = first / kTileKeys * kTileKeys; base < limit; base += kTileKeys) {
      const int64_t from = std::max(base, first), to = std::min(base + kTileKeys, limit);
      // Neighbours that see the same part of the tile, a register tile of them at most.
      auto groups = [&](auto take) {
        auto seen = [&](int64_t row) {
          const int64_t t = begin + row % own / shared;
          return std::make_pair(std::max(a.first(slot, t), base) - base,
                                std::min(a.limit(slot, t), base + kTileKeys) - base);
        };
        for (int64_t row = 0, count; row < rows; row += count) {
          const int64_t last = (row / own + 1) * own;
          const auto range = seen(row);
          for (count = 1; count < Isa::kTile && row + count < last && seen(row + count) == range;) ++count;
          if (range.first < range.second) {
            take(room.tile + row / own * width, row, static_cast<int>(count), range.first, range.second);
          }
        }
      };
      fill(0, slot, head, from, to, room.tile + (from - base) * stride);
      groups([&](const float* keys, int64_t row, int count, int64_t from, int64_t to) {
        score(room, keys, row, count, from, to);
      });
      fill(1, slot, head, from, to, room.tile + (from - base) * stride);
      groups([&](const float* values, int64_t row, int count, int64_t from, int64_t to) {
        combine(count, room.scores + row * kTileKeys, values, from, to, stride, width, room.acc + row * width);
      });
    }
    for (int64_t row = 0; row < rows; ++row) {
      const float* acc = room.acc + row * width;
      float* out = a.out + at(row);
      for (int64_t i = 0; i < a.dim; ++i) out[i] = acc[i] / room.total[row];
    }
  }

  // Keys or values [from, to) of a bundle in float32.
  void fill(int which, int64_t slot, int64_t head, int64_t from, int64_t to, float* out) const {
    while (from < to) {
      const KvRun run = kv_run(a, which, slot, from, to);
      for (int64_t i = 0; i < run.count; ++i) {
        const char* row = run.at + i * run.stride + head * a.dim * a.element_bytes;
        for (int64_t h = 0; h < bundle; ++h, row += a.dim * a.element_bytes, out += width) {
          widen(row, a.dim, a.element_bytes, out);
          std::fill(out + a.dim, out + width, 0.0f);
        }
      }
      from += run.count;
    }
  }

  // Softmax weights of keys [from, to) of the tile for a few rows.
  void score(const Room& room, const float* keys, int64_t row, int count, int64_t from, int64_t to) const {
    const float* q[Isa::kTile];
    for (int t = 0; t < count; ++t) q[t] = room.q + (row + t) * width;
    float* scores = room.scores + row * kTileKeys;
    for (int64_t key = from / kRows * kRows; key < to; key += kRows) {
      V acc[Isa::kTile * kRows];
      for (V& sum : acc) sum = Isa::zero();
      multiply(count, keys + key * stride, stride, q, 0, static_cast<int>(width / Isa::kLanes), acc);
      for (int t = 0; t < count; ++t) Isa::sums(acc + t * kRows, scores + t * kTileKeys + key);
    }
    for (int t = 0; t < count; ++t) {
      weigh(scores + t * kTileKeys, from, to, room.peak + row + t, room.total + row + t,
            room.acc + (row + t) * width, width);
    }
  }
};

}  // namespace

// Fills in `team` with the work of a call. The returned object must live until the team is done.
std::shared_ptr<void> PWJAX_NAME(paged_attention)(const Attention& call, Team* team) {
  auto work = std::make_shared<Attend>(call);
  Attend* w = work.get();
  team->phase(call.seats, [w](int64_t index) {
    Isa::Mode mode;
    w->seat(index);
  });
  return work;
}

}  // namespace pwjax
