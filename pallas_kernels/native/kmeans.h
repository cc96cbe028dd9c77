// The loops of nested k-means over sorted groups. calib/kmeans_loops.py says what they mean: both do the same IEEE
// operations in the same order, so finite inputs give the same bits, but here no interpreter is held up.
//
// Arrays are dense [rows, ...]; sums (mass, moment) are [rows, cols + 1]; places and borders lie within 0..cols.
#pragma once

#include <cstdint>

extern "C" {

void pwjax_prefix(const double* values, int64_t rows, int64_t cols, double* sums);

// Places [rows, count] of targets [rows, count] in sorted [rows, cols].
void pwjax_search(const double* sorted, const double* targets, int64_t rows, int64_t cols, int64_t count,
                  int64_t* places);

// Borders [rows, inner + 2]. Places are [rows, inner, count], but where they are shared by all inner borders
// [rows, count]. Scratch: (count + 6) * count doubles and inner * count choices.
void pwjax_best_path(const double* mass, const double* moment, const int64_t* places, int64_t rows, int64_t cols,
                     int64_t inner, int64_t count, bool shared, double* scratch, int64_t* choices, int64_t* borders);

// Moves borders [rows, clusters + 1]. Scratch: clusters doubles.
void pwjax_lloyd(const double* x, const double* mass, const double* moment, int64_t rows, int64_t cols,
                 int64_t clusters, int64_t steps, double* scratch, int64_t* borders);

// Cuts [rows, clusters] of clusters with these centroids and weights.
void pwjax_best_cuts(const double* x, const double* w, const double* mass, const int64_t* borders, const double* centroids,
                const double* weights, int64_t rows, int64_t cols, int64_t clusters, int64_t* cuts);
}
