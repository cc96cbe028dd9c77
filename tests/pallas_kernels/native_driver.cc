// Runs the C++ kernels without Python or XLA, against plain loops, on buffers that end exactly where they must: experts
// of every width in groups of several sizes, attention over scattered pages and rings, 16-bit matrices. For sanitizers:
// tests/pallas_kernels/test_native_driver.py.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "half.h"
#include "instruction_sets.h"

namespace pwjax {
namespace {

std::mt19937 random_bits(1);

// A buffer of its own, so that a step past either end is seen.
template <typename T>
std::unique_ptr<T[]> buffer(int64_t count, T value = {}) {
  std::unique_ptr<T[]> made(new T[count]);
  std::fill(made.get(), made.get() + count, value);
  return made;
}

constexpr int kThreads = 3;

void work_together(std::shared_ptr<Team> team) {
  std::vector<std::thread> others;
  Team::run(team, kThreads - 1, [&](auto task) { others.emplace_back(std::move(task)); });
  for (std::thread& other : others) other.join();
}

struct Layer {
  Geometry geometry;
  int64_t experts, num_pages;
  std::unique_ptr<uint32_t[]> arena;
  std::unique_ptr<int32_t[]> bits, pages;

  Layer(int64_t hidden, int64_t inner, int64_t lut_rows, int64_t count) : experts(count) {
    const int64_t lut = ceil_div(lut_rows, 2) + 128;
    const int64_t widest = std::max({lut, ceil_div(hidden, 2), ceil_div(inner, 2)});
    geometry = {widest + 3, 2, 8, 1, 0, {{2 * inner, hidden, lut_rows}, {hidden, inner, lut_rows}}};
    // The arena's last row ends with the arena: no unused tail hides a step too far.
    for (int64_t slots = 1; !geometry_problem(geometry).empty(); ++slots) geometry.slots = slots;
    num_pages = experts * 2 * geometry.slots;
    arena = buffer<uint32_t>(num_pages * geometry.page_words);
    for (int64_t i = 0; i < num_pages * geometry.page_words; ++i) arena[i] = random_bits() & 0x3bff3bffu;
    bits = buffer<int32_t>(experts * 2);
    pages = buffer<int32_t>(num_pages);
    for (int64_t i = 0; i < num_pages; ++i) pages[i] = num_pages - 1 - i;
    for (int64_t i = 0; i < experts * 2; ++i) bits[i] = 2 + random_bits() % 8;
    for (int64_t i = 0; i < experts * 2; ++i) bits[i] = bits[i] == 9 ? 16 : bits[i];
  }

  Group group(int64_t expert, std::vector<int64_t> choices) const {
    Group made{expert, {}, std::move(choices)};
    for (int m = 0; m < 2; ++m) {
      std::string problem = read_block(geometry, m, arena.get(), num_pages, bits[2 * expert + m],
                                       pages.get() + (2 * expert + m) * geometry.slots, &made.block[m]);
      if (!problem.empty()) {
        std::printf("%s\n", problem.c_str());
        std::exit(1);
      }
    }
    return made;
  }
};

float weight(const Block& block, int64_t row, int64_t col) {
  if (block.bits == 16) {
    uint32_t bits = block.dense.row(row)[col / 2] >> (16 * (col % 2)) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  int64_t code = 0;
  for (int p = 0; p < block.bits; ++p) code = 2 * code + (block.plane[p].row(row)[col / 32] >> (col % 32) & 1);
  const uint32_t* record = block.lut.row(row / block.lut_rows);
  int64_t member = row % block.lut_rows;
  return half(record[member / 2] >> (16 * (member % 2)) & 0xffff) *
         half(record[block.scale_words + code / 2] >> (16 * (code % 2)) & 0xffff);
}

struct Job {
  std::unique_ptr<float[]> x, gates, y, stats, outer, inner, scratch;
  std::unique_ptr<int32_t[]> experts_of;
  std::unique_ptr<bool[]> valid;
  std::vector<Group> groups;
  Call call{};

  Job(const Layer& layer, int64_t tokens, int64_t top_k) {
    const int64_t hidden = layer.geometry.matrix[1].rows, inner_size = layer.geometry.matrix[1].cols;
    x = buffer<float>(tokens * hidden);
    gates = buffer<float>(tokens * top_k, 0.5f);
    valid = buffer<bool>(tokens, true);
    experts_of = buffer<int32_t>(tokens * top_k);
    y = buffer<float>(tokens * hidden, NAN);
    stats = buffer<float>(tokens * top_k * 2, NAN);
    outer = buffer<float>(layer.experts * hidden, NAN);
    inner = buffer<float>(layer.experts * inner_size, NAN);
    scratch = buffer<float>(Scratch(nullptr, tokens, top_k, hidden, inner_size).floats, NAN);
    std::normal_distribution<float> normal(0.0f, 1.0f / std::sqrt(static_cast<float>(hidden)));
    for (int64_t i = 0; i < tokens * hidden; ++i) x[i] = normal(random_bits);
    if (tokens > 2) valid[1] = false;
    std::vector<std::vector<int64_t>> choices(layer.experts);
    for (int64_t i = 0; i < tokens * top_k; ++i) {
      // Uneven: expert 0 gets half of the tokens.
      experts_of[i] = i % top_k ? 1 + random_bits() % (layer.experts - 1) : i / top_k % 2 % layer.experts;
      if (valid[i / top_k]) choices[experts_of[i]].push_back(i);
    }
    for (int64_t e = 0; e < layer.experts; ++e) {
      if (!choices[e].empty()) groups.push_back(layer.group(e, choices[e]));
    }
    call = {tokens, top_k, hidden, inner_size, layer.experts, Activation::kSilu, x.get(), experts_of.get(), gates.get(),
            valid.get(), y.get(), stats.get(), {outer.get(), inner.get()}, scratch.get()};
  }

  void run(ExpertFFN fill) {
    auto team = std::make_shared<Team>();
    std::shared_ptr<void> work = fill(call, groups, team.get());
    work_together(team);
  }

  // Largest difference of y from plain loops, over the largest value.
  double error() const {
    const int64_t hidden = call.hidden, inner_size = call.inner;
    std::vector<double> want(call.tokens * hidden), h(inner_size);
    for (const Group& group : groups) {
      for (int64_t choice : group.choices) {
        int64_t t = choice / call.top_k;
        for (int64_t i = 0; i < inner_size; ++i) {
          double gate = 0, up = 0;
          for (int64_t c = 0; c < hidden; ++c) {
            gate += static_cast<double>(weight(group.block[0], i, c)) * x[t * hidden + c];
            up += static_cast<double>(weight(group.block[0], inner_size + i, c)) * x[t * hidden + c];
          }
          h[i] = gate / (1 + std::exp(-gate)) * up;
        }
        for (int64_t r = 0; r < hidden; ++r) {
          double sum = 0;
          for (int64_t i = 0; i < inner_size; ++i) sum += weight(group.block[1], r, i) * h[i];
          want[t * hidden + r] += gates[choice] * sum;
        }
      }
    }
    double worst = 0, largest = 1e-30;
    for (int64_t i = 0; i < call.tokens * hidden; ++i) {
      if (!(std::fabs(y[i] - want[i]) <= worst)) worst = std::fabs(y[i] - want[i]);
      largest = std::max(largest, std::fabs(want[i]));
    }
    return worst / largest;
  }
};

// Attention of random queries over a past of `length` tokens in slot 0 and none in slot 1.
struct Sequences {
  std::unique_ptr<float[]> q, out, scratch;
  std::unique_ptr<char[]> fresh[2];
  std::unique_ptr<uint32_t[]> arena;
  std::unique_ptr<int32_t[]> table, length;
  Attention call{};

  Sequences(int64_t queries, int64_t heads, int64_t kv_heads, int64_t dim, int64_t past, int64_t window, int64_t bytes) {
    call.slots = 2;
    call.queries = queries;
    call.fresh = queries + 2;
    call.start = 2;
    call.heads = heads;
    call.kv_heads = kv_heads;
    call.dim = dim;
    call.layers = 2;
    call.layer = 1;
    call.element_bytes = bytes;
    call.window = window;
    // The last row of the arena ends with it.
    call.page_words = 5 * call.row_words();
    call.columns = window ? ceil_div(window - 1, 5) + 1 : ceil_div(past, 5) + 1;
    call.num_pages = 8 * call.columns;
    const int64_t words = call.num_pages * call.page_words, rows = call.slots * call.fresh * call.row_words() * 4;
    arena = buffer<uint32_t>(words);
    // Halves of words are small numbers, and so are words.
    for (int64_t i = 0; i < words; ++i) arena[i] = random_bits() & 0x3fff3fffu;
    table = buffer<int32_t>(call.num_pages);
    for (int64_t i = 0; i < call.num_pages; ++i) table[i] = call.num_pages - 1 - i;
    length = buffer<int32_t>(2);
    length[0] = past;
    for (int which = 0; which < 2; ++which) {
      fresh[which] = buffer<char>(rows);
      for (int64_t i = 0; i < rows; i += 2) {
        uint16_t half = random_bits() & 0x3fff;
        std::memcpy(fresh[which].get() + i, &half, 2);
      }
      call.fresh_kv[which] = fresh[which].get();
    }
    const int64_t numbers = call.slots * queries * heads * dim;
    q = buffer<float>(numbers);
    out = buffer<float>(numbers, NAN);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    for (int64_t i = 0; i < numbers; ++i) q[i] = normal(random_bits);
    call.q = q.get();
    call.out = out.get();
    call.arena = arena.get();
    call.table = table.get();
    call.length = length.get();
    call.threads = kThreads;
    call.seats = std::min<int64_t>(kThreads, call.items());
    const int64_t floats = call.seats * Room(nullptr, call).floats;
    scratch = buffer<float>(floats, NAN);
    call.scratch = scratch.get();
  }

  bool refused(int64_t at, int32_t page) {
    std::swap(table[at], page);
    bool refused = !attention_problem(call).empty();
    std::swap(table[at], page);
    return refused;
  }

  // Every page that is read is checked: a wrong id anywhere in use is refused.
  bool guarded() {
    if (!attention_problem(call).empty()) return false;
    if (call.first(0, 0) >= length[0]) return true;
    const int64_t newest = (length[0] - 1) / 5 % call.columns, own = 2 * call.columns;
    return refused(own + newest, -1) && refused(own + call.columns + newest, static_cast<int32_t>(call.num_pages));
  }

  void run(PagedAttention fill) {
    auto team = std::make_shared<Team>();
    std::shared_ptr<void> work = fill(call, team.get());
    work_together(team);
  }

  double number(int which, int64_t slot, int64_t position, int64_t column) const {
    const char* row = fresh[which].get() + (slot * call.fresh + position - length[slot]) * call.row_words() * 4;
    if (position < length[slot]) {
      int64_t page = table[((slot * 2 + 1) * 2 + which) * call.columns + position / 5 % call.columns];
      row = reinterpret_cast<const char*>(arena.get() + page * call.page_words + position % 5 * call.row_words());
    }
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<char*>(&bits) + 4 - call.element_bytes, row + column * call.element_bytes,
                call.element_bytes);
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }

  // Largest difference from plain loops, over the largest value.
  double error() const {
    double worst = 0, largest = 1e-30;
    for (int64_t row = 0; row < call.slots * call.queries * call.heads; ++row) {
      const int64_t slot = row / call.heads / call.queries, last = length[slot] + 2 + row / call.heads % call.queries;
      const int64_t column = row % call.heads / (call.heads / call.kv_heads) * call.dim;
      std::vector<double> sum(call.dim), weights;
      double total = 0;
      for (int64_t p = call.window ? std::max<int64_t>(0, last + 1 - call.window) : 0; p <= last; ++p) {
        double score = 0;
        for (int64_t i = 0; i < call.dim; ++i) score += q[row * call.dim + i] * number(0, slot, p, column + i);
        total += std::exp(score);
        for (int64_t i = 0; i < call.dim; ++i) sum[i] += std::exp(score) * number(1, slot, p, column + i);
      }
      for (int64_t i = 0; i < call.dim; ++i) {
        const double difference = std::fabs(out[row * call.dim + i] - sum[i] / total);
        if (!(difference <= worst)) worst = difference;
        largest = std::max(largest, std::fabs(sum[i] / total));
      }
    }
    return worst / largest;
  }
};

int check_attention(const InstructionSet& set) {
  const int64_t heads[][3] = {{4, 2, 8}, {3, 3, 18}, {12, 2, 40}, {2, 1, 130}};
  int failures = 0;
  for (const auto& [count, kv_heads, dim] : heads) {
    for (int64_t queries : {1, 3, 40}) {
      for (int64_t past : {0, 1, 63, 70}) {
        for (int64_t window : {0, 1, 9, 50}) {
          for (int64_t bytes : {2, 4}) {
            Sequences job(queries, count, kv_heads, dim, past, window, bytes);
            if (job.guarded()) job.run(set.paged_attention);
            if (double error = job.error(); !(error < 1e-5)) {
              std::printf("%s, %d queries, %d heads of %d, past %d, window %d, %d bytes: error %g\n", set.name,
                          static_cast<int>(queries), static_cast<int>(count), static_cast<int>(dim),
                          static_cast<int>(past), static_cast<int>(window), static_cast<int>(bytes), error);
              ++failures;
            }
          }
        }
      }
    }
  }
  return failures;
}

// Products with bfloat16 rows that end where the buffer does.
int check_linear(const InstructionSet& set) {
  int failures = 0;
  for (int64_t tokens : {1, 3, 40}) {
    for (int64_t rows : {1, 6, 331}) {
      for (int64_t cols : {2, 34, 300, 1100}) {
        auto x = buffer<float>(tokens * cols), y = buffer<float>(tokens * rows, NAN);
        auto weights = buffer<uint32_t>(rows * cols / 2);
        std::normal_distribution<float> normal(0.0f, 1.0f);
        for (int64_t i = 0; i < tokens * cols; ++i) x[i] = normal(random_bits);
        for (int64_t i = 0; i < rows * cols / 2; ++i) weights[i] = random_bits() & 0xbfffbfffu;
        Linear call{tokens, rows, cols, x.get(), weights.get(), y.get(), nullptr};
        auto scratch = buffer<float>(call.scratch_floats(), NAN);
        call.scratch = scratch.get();
        auto team = std::make_shared<Team>();
        std::shared_ptr<void> work = set.linear(call, team.get());
        work_together(team);
        for (int64_t i = 0; i < tokens * rows; ++i) {
          double sum = 0, size = 0;
          for (int64_t c = 0; c < cols; ++c) {
            uint32_t bits = weights[i % rows * cols / 2 + c / 2] >> (16 * (c % 2)) << 16;
            float weight;
            std::memcpy(&weight, &bits, 4);
            sum += static_cast<double>(weight) * x[i / rows * cols + c];
            size += std::fabs(static_cast<double>(weight) * x[i / rows * cols + c]);
          }
          if (!(std::fabs(y[i] - sum) <= (set.rounds ? 4e-3 : 1e-5) * size + 1e-30)) {  // subnormal numbers count as zero
            std::printf("%s, linear of %d tokens with %d x %d: %g, not %g\n", set.name, static_cast<int>(tokens),
                        static_cast<int>(rows), static_cast<int>(cols), static_cast<double>(y[i]), sum);
            ++failures;
          }
        }
      }
    }
  }
  return failures;
}

int check() {
  int failures = 0;
  for (const InstructionSet& set : instruction_sets()) {
    if (!set.available) continue;
    for (int64_t tokens : {1, 3, 40}) {
      for (int64_t hidden : {33, 300, 520}) {
        for (int64_t lut_rows : {1, 3}) {
          Layer layer(hidden, 39, hidden % lut_rows ? 1 : lut_rows, 4);
          Job job(layer, tokens, 2);
          job.run(set.expert_ffn);
          double error = job.error();
          if (!(error < (set.rounds ? 2e-2 : 1e-5))) {
            std::printf("%s, %d tokens, hidden %d: error %g\n", set.name, static_cast<int>(tokens),
                        static_cast<int>(hidden), error);
            ++failures;
          }
        }
      }
    }
    failures += check_attention(set) + check_linear(set);
    std::printf("%s checked\n", set.name);
  }
  return failures != 0;
}

}  // namespace
}  // namespace pwjax

int main() { return pwjax::check(); }
