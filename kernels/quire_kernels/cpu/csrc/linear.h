// Products of a step's activations with packed weights, in panels of 32 outputs.
//
// Each output is one sum over the inputs in their order, for any number of rows: a token's bits do not depend on the
// rest of its step.
#pragma once

#include <algorithm>

#include "simd.h"
#include "thread_pool.h"

namespace quire {

constexpr int PANEL = 2 * LANES;
constexpr int LINE = 64;
// How far ahead a stream is prefetched.
constexpr int PREFETCH_BYTES = 8192;

enum class Format : int64_t { PLAIN = 0, INT8 = 1 };

// A linear map. Panel p holds outputs 32 p to 32 p + 31, input by input (bfloat16, int8: pair of inputs by pair), zeros
// beyond the last one. INT8 values are multiplied by the scale of their output.
struct Matrix {
    int64_t outputs;
    int64_t inputs;
    Format format;
    const void* panels;
    const float* scales;  // [panels * 32], or null
    const float* bias;    // [panels * 32], or null
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

template <class T>
inline int64_t panel_steps(const Matrix& m) {
    return ceil_div(m.inputs, Lane<T>::VALUES);
}

// Sums of M rows and one panel. Prefetches `ahead`, which is multiplied next, LINES lines for each step.
template <class T, int M, int LINES>
[[gnu::always_inline]] inline void multiply_panel(
    const T* rows, int64_t stride, const T* panel, int64_t steps, const void* ahead, Floats (&totals)[M][2]) {
    constexpr int V = Lane<T>::VALUES;
    const char* next = static_cast<const char*>(ahead);
    Sums sums[M][2] = {};
    for (int64_t k = 0; k < steps; ++k, panel += PANEL * V, rows += V, next += LINES * LINE) {
        const Factors left = load_factors(panel), right = load_factors(panel + LANES * V);
        for (int line = 0; line < LINES; ++line) __builtin_prefetch(next + line * LINE, 0, 2);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const Factors x = Lane<T>::broadcast(rows + m * stride);
            sums[m][0] = Lane<T>::multiply_add(x, left, sums[m][0]);
            sums[m][1] = Lane<T>::multiply_add(x, right, sums[m][1]);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int side = 0; side < 2; ++side) totals[m][side] = floats_of(sums[m][side]);
}

// The values of an int8 panel in T: at most 127, so exact.
template <class T>
inline void expand_panel(const int8_t* from, T* to, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store_floats(to + i, floats_of(from + i));
}

// The pieces of a product: `across` ranges of panels times `down` blocks of tiles of rows, of about the same size. A
// thread reads a piece's panels once for each tile, which stays in its first-level cache; the piece's weights stay in the
// second-level cache.
struct TaskGrid {
    int64_t num_panels, across;
    int64_t num_tiles, down;
    int64_t rows;  // of a tile, the last one's may be fewer

    TaskGrid(int64_t num_rows, int64_t tile_rows, int64_t all_panels, int64_t panel_bytes, int threads,
             int64_t task_bytes = TASK_BYTES)
        : num_panels(all_panels), rows(tile_rows) {
        const int64_t wanted = TASKS_PER_THREAD * threads, most = std::max<int64_t>(1, task_bytes / panel_bytes);
        num_tiles = std::max<int64_t>(1, ceil_div(num_rows, rows));
        // With more tiles it pays more to keep one for many panels.
        const int64_t panels = num_tiles < TILES ? std::clamp<int64_t>(num_panels / wanted, 1, most) : most;
        across = std::min(num_panels, round_up(ceil_div(num_panels, panels), threads));
        down = std::clamp<int64_t>(num_tiles / TILES, 1, ceil_div(wanted, across));
    }

    int64_t num_tasks() const { return across * down; }
    int64_t first_panel(int64_t range) const { return begin(range, num_panels, across); }
    int64_t first_row(int64_t block) const { return begin(block, num_tiles, down) * rows; }

    // The size of a part, where `count` items are cut into `parts` that differ by at most one, larger ones first.
    static int64_t begin(int64_t part, int64_t count, int64_t parts) {
        return part * (count / parts) + std::min(part, count % parts);
    }

    // Enough pieces for threads to end at about the same time, even if one is delayed.
    static constexpr int64_t TASKS_PER_THREAD = 4;
    static constexpr int64_t TASK_BYTES = 256 * 1024;
    // Smaller pieces would load weights too often.
    static constexpr int64_t TILES = 8;
};

// For all threads of the thread pool: for each row and each panel, calls finish(row, panel, left sums, right sums).
// `scratch` is this thread's own, of the size of an expanded panel.
template <class T, class F>
inline void multiply(
    ThreadPool& pool, const Matrix& matrix, const T* rows, int64_t num_rows, int64_t stride, T* scratch, F&& finish) {
    const int64_t steps = panel_steps<T>(matrix), panel_size = steps * PANEL * Lane<T>::VALUES;
    // Tiles of about the same size
    const int64_t tile_rows = ceil_div(num_rows, std::max<int64_t>(1, ceil_div(num_rows, ROWS)));
    const int64_t num_all = ceil_div(matrix.outputs, PANEL);
    const TaskGrid grid(num_rows, std::max<int64_t>(1, tile_rows), num_all, panel_size * sizeof(T), pool.size());

    // Computes one unit of a piece, a tile and a panel. Returns whether the piece is still this thread's.
    const auto tile = [&]<int LINES>(TaskClaim& task_claim, int64_t first, int64_t p, const T* panel, const void* ahead) {
        bool is_owned = true;
        with_count<ROWS>(std::min(grid.rows, num_rows - first), [&]<int M>() {
            Floats sums[M][2];
            multiply_panel<T, M, LINES>(rows + first * stride, stride, panel, steps, ahead, sums);
            is_owned = task_claim.write([&] {
                for (int m = 0; m < M; ++m) {
                    for (int side = 0; side < 2; ++side) {
                        const int64_t output = p * PANEL + side * LANES;
                        if (matrix.scales) sums[m][side] *= load_floats(matrix.scales + output);
                        if (matrix.bias) sums[m][side] += load_floats(matrix.bias + output);
                    }
                    finish(first + m, p, sums[m][0], sums[m][1]);
                }
            });
        });
        return is_owned;
    };
    pool.parallel_for_tasks(num_rows ? grid.num_tasks() : 0, [&](int64_t i, TaskClaim& task_claim) {
        const int64_t range = i % grid.across, first_panel = grid.first_panel(range), last_panel = grid.first_panel(range + 1);
        const int64_t first_row = grid.first_row(i / grid.across), last_row = std::min(num_rows, grid.first_row(i / grid.across + 1));
        int64_t units = task_claim.next();  // to be skipped
        if (matrix.format == Format::INT8) {
            const int64_t tiles = ceil_div(last_row - first_row, grid.rows);
            for (int64_t p = first_panel + units / tiles; p < last_panel; ++p, units = 0) {
                const int8_t* packed = static_cast<const int8_t*>(matrix.panels) + p * panel_size;
                expand_panel(packed, scratch, panel_size);
                for (int64_t row = first_row + units % tiles * grid.rows; row < last_row; row += grid.rows)
                    if (!tile.template operator()<1>(task_claim, row, p, scratch, packed + panel_size)) return;
            }
            return;
        }
        const T* panels = static_cast<const T*>(matrix.panels);
        if (last_row - first_row <= grid.rows) {
            // The only use of the panel, which takes less time than loading it.
            for (int64_t p = first_panel + units; p < last_panel; ++p) {
                const T* panel = panels + p * panel_size;
                if (!tile.template operator()<2>(task_claim, first_row, p, panel, panel + PREFETCH_BYTES / sizeof(T))) return;
            }
            return;
        }
        // Pieces are handed out in order: this thread's next one is probably at this distance, perhaps in the next matrix,
        // which follows in memory. Half a panel is prefetched with each.
        const char* next = reinterpret_cast<const char*>(panels + grid.first_panel(range + pool.size()) * panel_size);
        const char* next_end = reinterpret_cast<const char*>(panels + grid.first_panel(range + pool.size() + 1) * panel_size);
        const int64_t num_panels = last_panel - first_panel;
        for (int64_t row = first_row + units / num_panels * grid.rows; row < last_row; row += grid.rows, units = 0) {
            for (int64_t p = first_panel + units % num_panels; p < last_panel; ++p) {
                const bool turns = p == last_panel - 1 && row + grid.rows < last_row;
                const bool fetches = !turns && next < next_end;
                const void* ahead = turns     ? static_cast<const void*>(rows + (row + grid.rows) * stride)
                                    : fetches ? next
                                              : static_cast<const void*>(rows + row * stride);
                if (!tile.template operator()<1>(task_claim, row, p, panels + p * panel_size, ahead)) return;
                if (fetches) next += steps * LINE;
            }
        }
    });
}

}  // namespace quire
