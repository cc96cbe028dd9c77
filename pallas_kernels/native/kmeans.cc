#include "kmeans.h"

#include <algorithm>
#include <limits>

namespace pwjax {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// No branch: vectors of these are divided at once.
inline double gain(double mass, double moment) {
  double explained = moment * moment / (mass != 0 ? mass : 1.0);
  return mass < 0 ? -kInfinity : explained;
}

// What lies before each place that a border may take.
struct Before {
  double *mass, *moment;

  void read(const double* masses, const double* moments, const int64_t* places, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      mass[i] = masses[places[i]];
      moment[i] = moments[places[i]];
    }
  }
};

void best_path(const double* mass, const double* moment, const int64_t* places, int64_t cols, int64_t inner,
               int64_t count, bool shared, double* scratch, int64_t* choices, int64_t* borders) {
  const int64_t stride = shared ? 0 : count;
  double *gains = scratch, *best = gains + count * count, *top = best + count;
  Before from{top + count, top + 2 * count}, to{top + 3 * count, top + 4 * count};
  from.read(mass, moment, places, count);
  for (int64_t i = 0; i < count; ++i) best[i] = gain(from.mass[i], from.moment[i]);
  for (int64_t j = 1; j < inner; ++j) {
    if (j == 1 || !shared) {
      to.read(mass, moment, places + j * stride, count);
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t t = 0; t < count; ++t) {
          gains[i * count + t] = gain(to.mass[t] - from.mass[i], to.moment[t] - from.moment[i]);
        }
      }
    }
    int64_t* choice = choices + (j - 1) * count;
    std::fill(top, top + count, -kInfinity);
    std::fill(choice, choice + count, 0);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t t = 0; t < count; ++t) {
        double sum = gains[i * count + t] + best[i];
        bool better = sum > top[t];
        top[t] = better ? sum : top[t];
        choice[t] = better ? i : choice[t];
      }
    }
    std::swap(best, top);
    std::swap(from, to);
  }
  for (int64_t i = 0; i < count; ++i) best[i] += gain(mass[cols] - from.mass[i], moment[cols] - from.moment[i]);
  borders[0] = 0;
  borders[inner + 1] = cols;
  int64_t at = std::max_element(best, best + count) - best;
  for (int64_t j = inner - 1; j >= 0; --j) {
    borders[j + 1] = places[j * stride + at];
    if (j) at = choices[(j - 1) * count + at];
  }
}

void lloyd(const double* x, const double* mass, const double* moment, int64_t cols, int64_t clusters, int64_t steps,
           double* means, int64_t* borders) {
  for (bool moved = true; moved && steps > 0; --steps) {
    double mean = -kInfinity;
    for (int64_t c = 0; c < clusters; ++c) {
      double weight = mass[borders[c + 1]] - mass[borders[c]];
      if (weight > 0) mean = std::max(mean, (moment[borders[c + 1]] - moment[borders[c]]) / weight);
      means[c] = std::min(std::max(mean, x[0]), x[cols - 1]);
    }
    moved = false;
    for (int64_t c = 1; c < clusters; ++c) {
      int64_t place = std::lower_bound(x, x + cols, (means[c] + means[c - 1]) / 2) - x;
      moved |= place != borders[c];
      borders[c] = place;
    }
  }
}

void best_cuts(const double* x, const double* w, const double* mass, const int64_t* borders, const double* centroids,
          const double* weights, int64_t clusters, int64_t* cuts) {
  double moment = 0;
  for (int64_t c = 0; c < clusters; ++c) {
    const int64_t end = borders[c + 1];
    const double total = mass[end], before = total - weights[c];
    double top = -kInfinity;
    cuts[c] = end;
    for (int64_t i = borders[c]; i < end; ++i) {
      moment += (x[i] - centroids[c]) * w[i];
      double gain = i + 1 < end ? moment * moment / ((mass[i + 1] - before) * (total - mass[i + 1])) : -1.0;
      if (gain > top) {
        top = gain;
        cuts[c] = i + 1;
      }
    }
  }
}

}  // namespace
}  // namespace pwjax

extern "C" {

void pwjax_prefix(const double* values, int64_t rows, int64_t cols, double* sums) {
  for (int64_t r = 0; r < rows; ++r, values += cols, sums += cols + 1) {
    sums[0] = 0;
    if (cols) sums[1] = values[0];  // not added to 0, which would lose the sign of -0
    for (int64_t c = 1; c < cols; ++c) sums[c + 1] = sums[c] + values[c];
  }
}

void pwjax_search(const double* sorted, const double* targets, int64_t rows, int64_t cols, int64_t count,
                  int64_t* places) {
  for (int64_t r = 0; r < rows; ++r, sorted += cols) {
    for (int64_t i = 0; i < count; ++i) *places++ = std::lower_bound(sorted, sorted + cols, *targets++) - sorted;
  }
}

void pwjax_best_path(const double* mass, const double* moment, const int64_t* places, int64_t rows, int64_t cols,
                     int64_t inner, int64_t count, bool shared, double* scratch, int64_t* choices, int64_t* borders) {
  for (int64_t r = 0; r < rows; ++r) {
    pwjax::best_path(mass + r * (cols + 1), moment + r * (cols + 1), places + r * (shared ? 1 : inner) * count, cols,
                     inner, count, shared, scratch, choices, borders + r * (inner + 2));
  }
}

void pwjax_lloyd(const double* x, const double* mass, const double* moment, int64_t rows, int64_t cols,
                 int64_t clusters, int64_t steps, double* scratch, int64_t* borders) {
  for (int64_t r = 0; r < rows; ++r) {
    pwjax::lloyd(x + r * cols, mass + r * (cols + 1), moment + r * (cols + 1), cols, clusters, steps, scratch,
                 borders + r * (clusters + 1));
  }
}

void pwjax_best_cuts(const double* x, const double* w, const double* mass, const int64_t* borders, const double* centroids,
                const double* weights, int64_t rows, int64_t cols, int64_t clusters, int64_t* cuts) {
  for (int64_t r = 0; r < rows; ++r) {
    pwjax::best_cuts(x + r * cols, w + r * cols, mass + r * (cols + 1), borders + r * (clusters + 1),
                centroids + r * clusters, weights + r * clusters, clusters, cuts + r * clusters);
  }
}
}
