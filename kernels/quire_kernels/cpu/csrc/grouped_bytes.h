// Weights in 8 bits, in groups of inputs with a scale for each output, and a minimum where the matrix has them: a number is
// code * scale, or code * scale + minimum, of a code from -128 to 127.
//
// A panel is one group after the other, each whole: the scales of its 32 outputs and their minimums, in float16, then lines of
// codes, of four inputs and sixteen outputs each. They are stored with 128 added, as in W8A8.
#pragma once

#include <algorithm>
#include <cstdint>

#include "codes.h"
#include "matrix.h"
#include "simd.h"

namespace quire {

// Of a tile in GROUPED_W8A8, as in W4A8.
constexpr int ROWS_OF_BYTES = ROWS < 8 ? ROWS : 8;
constexpr int BYTES_IN_WORD = 4;

inline int64_t byte_group_head(const Matrix& m) { return (m.has_minimums ? 2 : 1) * PANEL * sizeof(uint16_t); }
inline int64_t byte_group_bytes(const Matrix& m) { return byte_group_head(m) + m.group * PANEL; }
inline int64_t byte_panel_bytes(const Matrix& m) { return ceil_div(m.inputs, m.group) * byte_group_bytes(m); }

// Lays out a panel of codes [outputs, inputs], and of scales and minimums [outputs, groups] in float16. Beyond the last input and
// output, codes and scales are zeros.
inline void pack_grouped_bytes(const int8_t* codes, const uint16_t* scales, const uint16_t* minimums, const Matrix& m,
                               int64_t num_real, int64_t panel, uint8_t* panels) {
    const int64_t num_groups = ceil_div(num_real, m.group), head_bytes = byte_group_head(m), first_output = panel * PANEL;
    uint8_t* to = panels + panel * byte_panel_bytes(m);
    for (int64_t first = 0; first < m.inputs; first += m.group) {
        uint8_t* group = to + first / m.group * byte_group_bytes(m);
        std::fill_n(group, head_bytes, uint8_t{0});
        std::fill_n(group + head_bytes, m.group * PANEL, uint8_t{CODE_OFFSET});
    }
    for (int64_t output = first_output; output < std::min<int64_t>(m.outputs, first_output + PANEL); ++output) {
        const int64_t lane = output - first_output;
        for (int64_t i = 0; i < num_groups; ++i) {
            uint8_t* group = to + i * byte_group_bytes(m);
            auto* head = reinterpret_cast<uint16_t*>(group);
            head[lane] = scales[output * num_groups + i];
            if (m.has_minimums) head[PANEL + lane] = minimums[output * num_groups + i];
            const int64_t first = i * m.group, count = std::min(m.group, num_real - first);
            const int8_t* from = codes + output * num_real + first;
            for (int64_t k = 0; k < count; ++k)
                group[head_bytes + (k / BYTES_IN_WORD * PANEL + lane) * BYTES_IN_WORD + k % BYTES_IN_WORD] =
                    static_cast<uint8_t>(from[k] + CODE_OFFSET);
        }
    }
}

// The numbers of input i of those in `words`, of sixteen outputs.
inline Floats number_in(Words words, int i, Floats scale, Floats minimum) {
    const Ints code = (Ints)((words >> (i * 8)) & 0xff) - CODE_OFFSET;
    return multiply_add(to_floats(code), scale, minimum);
}

// Stores the numbers of four inputs and sixteen outputs, which are `words`, in a panel of T, each rounded once.
inline void expand_bytes(Words words, Floats scale, Floats minimum, float* to) {
    for (int i = 0; i < BYTES_IN_WORD; ++i) store(to + i * PANEL, number_in(words, i, scale, minimum));
}

inline void expand_bytes(Words words, Floats scale, Floats minimum, BFloat16* to) {
    for (int i = 0; i < BYTES_IN_WORD; i += 2)
        store(to + i * PANEL, pairs_of(number_in(words, i, scale, minimum), number_in(words, i + 1, scale, minimum)));
}

// The numbers of a panel in T.
template <class T>
inline void expand_grouped_bytes(const Matrix& m, const uint8_t* panel, T* to) {
    for (int64_t first = 0; first < m.inputs; first += m.group, panel += byte_group_bytes(m)) {
        const int64_t steps = ceil_div(std::min(m.group, m.inputs - first), BYTES_IN_WORD);
        for (int side = 0; side < 2; ++side) {
            const auto* head = reinterpret_cast<const uint16_t*>(panel) + side * LANES;
            const Floats scale = load_float16(head), minimum = m.has_minimums ? load_float16(head + PANEL) : Floats{};
            const uint8_t* words = panel + byte_group_head(m) + side * LINE;
            T* numbers = to + first * PANEL + side * LANES * Lane<T>::VALUES;
            for (int64_t k = 0; k < steps; ++k, words += 2 * LINE, numbers += BYTES_IN_WORD * PANEL)
                expand_bytes(load<Words>(words), scale, minimum, numbers);
        }
    }
}

// As multiply_codes() of linear.h, of rows in groups as the panel's.
template <int M, int LINES, bool MINIMUMS>
[[gnu::always_inline]] inline void multiply_grouped_bytes(
    const Code* rows, int64_t stride, const Matrix& m, const uint8_t* panel, const void* ahead, float* totals) {
    constexpr int64_t HEAD = (MINIMUMS ? 2 : 1) * PANEL * sizeof(uint16_t);
    const char* next = static_cast<const char*>(ahead);
    const int64_t group_bytes = HEAD + m.group * PANEL;
    const Code* groups = code_groups(m, rows);
    for (int i = 0; i < M * PANEL; i += LANES) store(totals + i, Floats{});
    for (int64_t first = 0; first < m.inputs; first += m.group, panel += group_bytes, groups += sizeof(CodeGroup)) {
        const uint8_t* words = panel + HEAD;
        const Code* codes = rows + first;
        Ints sums[M][2];
        for (int i = 0; i < M; ++i) sums[i][0] = sums[i][1] = start_of(groups + i * stride);
        const int64_t steps = ceil_div(std::min(m.group, m.inputs - first), BYTES_IN_WORD);
        for (int64_t k = 0; k < steps; ++k, words += 2 * LINE, codes += BYTES_IN_WORD, next += LINES * LINE) {
            const Words left = load<Words>(words), right = load<Words>(words + LINE);
            for (int line = 0; line < LINES; ++line) __builtin_prefetch(next + line * LINE, 0, 2);
#pragma GCC unroll 16
            for (int i = 0; i < M; ++i) {
                const Words x = Lane<Code>::broadcast(codes + i * stride);
                sums[i][0] = multiply_bytes(left, x, sums[i][0]);
                sums[i][1] = multiply_bytes(right, x, sums[i][1]);
            }
        }
        if constexpr (LINES > 1) {
            for (int64_t i = 0; i < HEAD; i += LINE, next += LINE) __builtin_prefetch(next, 0, 2);
        }
        for (int side = 0; side < 2; ++side) {
            const auto* head = reinterpret_cast<const uint16_t*>(panel) + side * LANES;
            const Floats scale = load_float16(head);
            for (int i = 0; i < M; ++i) {
                const Code* row = groups + i * stride;
                float* total = totals + i * PANEL + side * LANES;
                if constexpr (MINIMUMS)
                    add_with_minimum(total, sums[i][side], scale, load_float16(head + PANEL), sum_of(row), scale_of(row));
                else
                    add_scaled(total, sums[i][side], scale, scale_of(row));
            }
        }
    }
}

}  // namespace quire
