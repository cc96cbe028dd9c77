// Runs the loops of k-means in C++ without Python: buffers that end exactly where they must, tiny and long groups, ties,
// empty clusters. What the loops compute is compared with NumPy by tests/calib/test_kmeans_loops.py.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>

#include "kmeans.h"

namespace {

constexpr int64_t kRows = 2;
std::mt19937 random_bits(1);

template <typename T>
std::unique_ptr<T[]> buffer(int64_t count) {
  return std::unique_ptr<T[]>(new T[count]());
}

// Ascending numbers within 0..most in each row; borders begin and end there.
std::unique_ptr<int64_t[]> ascending(int64_t count, int64_t most, bool ends) {
  auto made = buffer<int64_t>(kRows * count);
  for (int64_t r = 0; r < kRows; ++r) {
    int64_t* row = made.get() + r * count;
    for (int64_t i = 0; i < count; ++i) row[i] = random_bits() % (most + 1);
    if (ends) row[0] = 0, row[1] = most;
    std::sort(row, row + count);
  }
  return made;
}

bool ascend(const int64_t* row, int64_t count, int64_t most) {
  return row[0] == 0 && row[count - 1] == most && std::is_sorted(row, row + count);
}

bool check(int64_t cols, int64_t clusters, int64_t count, int values) {
  const int64_t inner = clusters - 1;
  auto x = buffer<double>(kRows * cols), w = buffer<double>(kRows * cols), wx = buffer<double>(kRows * cols);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t i = 0; i < cols; ++i) x[r * cols + i] = random_bits() % values - values / 2.0;
    std::sort(x.get() + r * cols, x.get() + (r + 1) * cols);
  }
  for (int64_t i = 0; i < kRows * cols; ++i) wx[i] = x[i] * (w[i] = random_bits() % 3 ? 1.0 : 1e-8);
  auto mass = buffer<double>(kRows * (cols + 1)), moment = buffer<double>(kRows * (cols + 1));
  pwjax_prefix(w.get(), kRows, cols, mass.get());
  pwjax_prefix(wx.get(), kRows, cols, moment.get());

  auto found = buffer<int64_t>(kRows * cols);
  pwjax_search(x.get(), x.get(), kRows, cols, cols, found.get());
  bool good = true;
  for (int64_t i = 0; i < kRows * cols; ++i) good &= x[i / cols * cols + found[i]] == x[i];

  auto borders = buffer<int64_t>(kRows * (clusters + 1));
  for (bool shared : {false, true}) {
    auto places = buffer<int64_t>(kRows * (shared ? 1 : inner) * count);
    for (int64_t j = 0; j < (shared ? 1 : inner); ++j) {
      auto some = ascending(count, cols, false);
      for (int64_t r = 0; r < kRows; ++r) {
        std::copy_n(some.get() + r * count, count, places.get() + (r * (shared ? 1 : inner) + j) * count);
      }
    }
    auto scratch = buffer<double>((count + 6) * count);
    auto choices = buffer<int64_t>(inner * count);
    pwjax_best_path(mass.get(), moment.get(), places.get(), kRows, cols, inner, count, shared, scratch.get(),
                    choices.get(), borders.get());
    // With shared places some path runs forwards, so the best one does.
    for (int64_t r = 0; shared && r < kRows; ++r) good &= ascend(&borders[r * (clusters + 1)], clusters + 1, cols);
  }

  borders = ascending(clusters + 1, cols, true);
  auto centroids = buffer<double>(kRows * clusters), weights = buffer<double>(kRows * clusters);
  auto cuts = buffer<int64_t>(kRows * clusters);
  for (int64_t i = 0; i < kRows * clusters; ++i) {
    const int64_t r = i / clusters, at = r * (clusters + 1) + i % clusters;
    weights[i] = mass[r * (cols + 1) + borders[at + 1]] - mass[r * (cols + 1) + borders[at]];
  }
  pwjax_best_cuts(x.get(), w.get(), mass.get(), borders.get(), centroids.get(), weights.get(), kRows, cols, clusters,
                  cuts.get());
  for (int64_t i = 0; i < kRows * clusters; ++i) {
    const int64_t at = i / clusters * (clusters + 1) + i % clusters;
    good &= borders[at] <= cuts[i] && cuts[i] <= borders[at + 1];
  }
  auto means = buffer<double>(clusters);
  pwjax_lloyd(x.get(), mass.get(), moment.get(), kRows, cols, clusters, 6, means.get(), borders.get());
  for (int64_t r = 0; r < kRows; ++r) good &= ascend(&borders[r * (clusters + 1)], clusters + 1, cols);
  return good;
}

}  // namespace

int main() {
  for (int64_t cols : {1, 2, 7, 300}) {
    for (int64_t clusters : {2, 4, 256}) {
      for (int64_t count : {1, 2, 65}) {
        for (int values : {1, 3, 1000000}) {
          if (check(cols, clusters, count, values)) continue;
          std::printf("%d values, %d clusters, %d places: wrong\n", int(cols), int(clusters), int(count));
          return 1;
        }
      }
    }
  }
  std::printf("kmeans checked\n");
}
