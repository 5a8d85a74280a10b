// Products of a step's activations with weights that are laid out once, in panels of 32 outputs.
//
// Each output is one sum over the inputs in their order, however many rows there are: what a token comes to does not
// depend on what else is in its step.
#pragma once

#include <algorithm>

#include "simd.h"
#include "team.h"

namespace quire {

constexpr int PANEL = 2 * LANES;
constexpr int LINE = 64;

enum class Format : int64_t { PLAIN = 0, INT8 = 1 };

// A linear map. Panel p holds outputs 32 p to 32 p + 31, input by input (bfloat16, int8: pair of inputs by pair), those
// beyond the last zero. INT8 values are times the scale of their output.
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

// Sums of M rows and one panel. Meanwhile a line of `ahead` is fetched for each step: what is multiplied next.
template <class T, int M>
[[gnu::always_inline]] inline void multiply_panel(
    const T* rows, int64_t stride, const T* panel, int64_t steps, const void* ahead, Floats (&sums)[M][2]) {
    constexpr int V = Lane<T>::VALUES;
    const char* next = static_cast<const char*>(ahead);
    for (int m = 0; m < M; ++m) sums[m][0] = sums[m][1] = Floats{};
    for (int64_t k = 0; k < steps; ++k, panel += PANEL * V, rows += V, next += LINE) {
        const Words left = load<Words>(panel), right = load<Words>(panel + LANES * V);
        __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const Words x = Lane<T>::broadcast(rows + m * stride);
            sums[m][0] = Lane<T>::multiply_add(x, left, sums[m][0]);
            sums[m][1] = Lane<T>::multiply_add(x, right, sums[m][1]);
        }
    }
}

// The values of an int8 panel in T: no more than 127, so exact.
template <class T>
inline void expand_panel(const int8_t* from, T* to, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store_floats(to + i, floats_of(from + i));
}

// How a product is cut: `panels` panels and `tiles` tiles of rows are one piece of work. A thread goes through its
// panels once for each tile, which stays in its first cache; what a piece takes of the weights stays in its second.
struct Cut {
    int64_t rows;  // of a tile, the last one's may be fewer
    int64_t tiles, panels;

    Cut(int64_t num_rows, int64_t num_panels, int64_t panel_bytes, int threads) {
        const int64_t all_tiles = std::max<int64_t>(1, ceil_div(num_rows, ROWS)), wanted = PIECES * threads;
        rows = ceil_div(num_rows, all_tiles);
        // The more tiles, the more it pays to keep one for many panels.
        const int64_t fewest = all_tiles < TILES ? num_panels / wanted : num_panels;
        panels = std::clamp<int64_t>(fewest, 1, std::max<int64_t>(1, PIECE_BYTES / panel_bytes));
        const int64_t down = ceil_div(wanted, ceil_div(num_panels, panels));
        tiles = std::max(ceil_div(all_tiles, down), std::min(all_tiles, TILES));
    }

    // Enough for threads to end at about the same time, though each may be held up.
    static constexpr int64_t PIECES = 4;
    static constexpr int64_t PIECE_BYTES = 256 * 1024;
    // Fewer would load weights too often.
    static constexpr int64_t TILES = 8;
};

// For all threads of a team: for each row and each panel, calls finish(row, panel, left sums, right sums).
// `scratch` is this thread's own, of the size of an expanded panel.
template <class T, class F>
inline void multiply(
    Team& team, const Matrix& matrix, const T* rows, int64_t num_rows, int64_t stride, T* scratch, F&& finish) {
    const int64_t steps = panel_steps<T>(matrix), panel_size = steps * PANEL * Lane<T>::VALUES;
    const int64_t num_panels = ceil_div(matrix.outputs, PANEL);
    const Cut cut(num_rows, num_panels, panel_size * sizeof(T), team.size());
    const int64_t across = ceil_div(num_panels, cut.panels), block = cut.tiles * cut.rows;

    const auto tile = [&](int64_t first, int64_t count, int64_t p, const T* panel, const void* ahead) {
        with_count<ROWS>(count, [&]<int M>() {
            Floats sums[M][2];
            multiply_panel<T, M>(rows + first * stride, stride, panel, steps, ahead, sums);
            for (int m = 0; m < M; ++m) {
                for (int side = 0; side < 2; ++side) {
                    const int64_t output = p * PANEL + side * LANES;
                    if (matrix.scales) sums[m][side] *= load_floats(matrix.scales + output);
                    if (matrix.bias) sums[m][side] += load_floats(matrix.bias + output);
                }
                finish(first + m, p, sums[m][0], sums[m][1]);
            }
        });
    };
    team.share(num_rows ? across * ceil_div(num_rows, block) : 0, [&](int64_t i) {
        const int64_t first_panel = i % across * cut.panels, last_panel = std::min(num_panels, first_panel + cut.panels);
        const int64_t first_row = i / across * block, last_row = std::min(num_rows, first_row + block);
        if (matrix.format == Format::INT8) {
            for (int64_t p = first_panel; p < last_panel; ++p) {
                const int8_t* packed = static_cast<const int8_t*>(matrix.panels) + p * panel_size;
                expand_panel(packed, scratch, panel_size);
                for (int64_t row = first_row; row < last_row; row += cut.rows)
                    tile(row, std::min(cut.rows, last_row - row), p, scratch, packed + panel_size);
            }
            return;
        }
        const T* panels = static_cast<const T*>(matrix.panels);
        // Pieces come in order: this thread's next one is probably so far on. Half a panel is fetched with each.
        const char* next = reinterpret_cast<const char*>(panels + (last_panel + (team.size() - 1) * cut.panels) * panel_size);
        for (int64_t row = first_row; row < last_row; row += cut.rows) {
            for (int64_t p = first_panel; p < last_panel; ++p) {
                const bool turns = p == last_panel - 1 && row + cut.rows < last_row;
                const void* ahead = turns ? static_cast<const void*>(rows + (row + cut.rows) * stride) : next;
                tile(row, std::min(cut.rows, last_row - row), p, panels + p * panel_size, ahead);
                if (!turns) next += steps * LINE;
            }
        }
    });
}

}  // namespace quire
