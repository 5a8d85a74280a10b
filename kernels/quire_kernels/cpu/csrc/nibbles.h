// Weights in 4 bits, in groups of inputs with a scale and a zero point for each output: a number is (code - zero) * scale. Where
// the matrix has minimums, these are in the place of zero points: a number is code * scale + minimum. Codes of MXFP4 are numbers
// of e2m1: a sign, two bits of an exponent, one of a fraction. Then a number is twice that of the code, which is whole, times the scale.
//
// A panel is one group after the other, each whole: the scales of its 32 outputs and their zero points, in float16, then lines
// of codes, of eight inputs and sixteen outputs each. An output's word has inputs 0 to 3 in the low halves of its bytes and 4 to
// 7 in the high ones: each half of all bytes is a factor of products in 8 bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "codes.h"
#include "matrix.h"
#include "simd.h"

namespace quire {

constexpr int64_t IN_WORD = 8;
// Of a tile in W4A8. What is done with a group's sums needs registers too: with 10 rows or more, they do not suffice.
constexpr int ROWS_OF_NIBBLES = ROWS < 8 ? ROWS : 8;
constexpr uint32_t LOW_NIBBLES = 0x0f0f0f0f;
constexpr int64_t GROUP_HEAD = 2 * PANEL * sizeof(uint16_t);

inline int64_t nibble_group_bytes(int64_t group) { return GROUP_HEAD + group * PANEL / 2; }
inline int64_t nibble_panel_bytes(const Matrix& m) { return ceil_div(m.inputs, m.group) * nibble_group_bytes(m.group); }

// A number with the 11 bits that float16 has of it.
inline float round_to_11_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x1000) & 0xffffe000;
    std::memcpy(&x, &bits, sizeof bits);
    return x;
}

// Rounds the numbers of a group to codes, and stores its scale and zero point. Codes span the range of the numbers and 0, or a
// part of it: with smaller steps, numbers outside of it are off by more. If a number is not finite, the scale is NaN.
template <class T>
inline void quantize_to_nibbles(const T* from, int64_t count, uint8_t* codes, float* scale, float* zero) {
    constexpr int64_t MOST = 128;
    constexpr float LARGEST = 15.0f, TINY = 1e-30f;
    const Floats shift = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
    float numbers[MOST] = {};
    for (int64_t i = 0; i < count; ++i) numbers[i] = as_float(from[i]);
    const auto [low, high] = std::minmax_element(numbers, numbers + count);
    const float least = std::min(*low, 0.0f), range = std::max(*high, 0.0f) - least;
    const auto code_of = [&](Floats x, float divisor, float offset) {
        const Floats code = (x / divisor + offset + shift) - shift;
        return select(code < 0.0f, Floats{}, select(code > LARGEST, splat(LARGEST), code));
    };
    float best = std::numeric_limits<float>::infinity();
    *scale = std::numeric_limits<float>::quiet_NaN();
    *zero = 0.0f;
    for (const float part : {1.0f, 0.95f, 0.9f, 0.85f, 0.8f}) {
        const float divisor = round_to_11_bits(std::max(range * part / LARGEST, TINY));
        const float offset = round_to_11_bits(-least * part / divisor);
        Floats errors = {};
        for (int64_t i = 0; i < count; i += LANES) {
            const Floats x = load_floats(numbers + i), error = (code_of(x, divisor, offset) - offset) * divisor - x;
            errors += select(LANE < static_cast<int32_t>(std::min<int64_t>(LANES, count - i)), error * error, Floats{});
        }
        if (const float sum = total(errors); sum < best) {
            best = sum;
            *scale = divisor;
            *zero = offset;
        }
    }
    for (int64_t i = 0; i < count; i += LANES) {
        const Ints found = to_ints(code_of(load_floats(numbers + i), *scale, *zero));
        for (int64_t lane = 0; lane < std::min<int64_t>(LANES, count - i); ++lane) codes[i + lane] = static_cast<uint8_t>(found[lane]);
    }
}

// Lays out a panel of codes [outputs, inputs], and of scales and zero points [outputs, groups] in float16. Beyond the last input and
// output, codes and scales are zeros.
inline void pack_nibbles(const uint8_t* codes, const uint16_t* scales, const uint16_t* zeros, const Matrix& m, int64_t num_real,
                         int64_t panel, uint8_t* panels) {
    const int64_t num_groups = ceil_div(num_real, m.group), panel_bytes = nibble_panel_bytes(m), first_output = panel * PANEL;
    uint8_t* to = panels + panel * panel_bytes;
    std::fill_n(to, panel_bytes, uint8_t{0});
    for (int64_t output = first_output; output < std::min<int64_t>(m.outputs, first_output + PANEL); ++output) {
        const int64_t lane = output - first_output;
        for (int64_t i = 0; i < num_groups; ++i) {
            uint8_t* group = to + i * nibble_group_bytes(m.group);
            auto* head = reinterpret_cast<uint16_t*>(group);
            head[lane] = scales[output * num_groups + i];
            head[PANEL + lane] = zeros[output * num_groups + i];
            const int64_t first = i * m.group, count = std::min(m.group, num_real - first);
            for (int64_t k = 0; k < count; ++k) {
                uint8_t* word = group + GROUP_HEAD + (k / IN_WORD * PANEL + lane) * 4;
                word[k % 4] |= codes[output * num_real + first + k] << (k % IN_WORD < 4 ? 0 : 4);
            }
        }
    }
}

// Twice the numbers of e2m1: 0, 1, 2, 3, 4, 6, 8, 12, and their negatives.
inline Ints doubles_of_e2m1(Ints codes) {
#ifdef __AVX512F__
    constexpr Ints DOUBLES = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return (Ints)_mm512_permutexvar_epi32((__m512i)codes, (__m512i)DOUBLES);
#else
    const Ints size = codes & 7, normal = (size & 1) + 2, twice = normal + normal;
    const Ints number = select(size > 5, twice + twice, select(size > 3, twice, size));
    return select(codes > 7, 0 - number, number);
#endif
}

template <bool IS_E2M1>
inline Floats steps_of(Words codes) {
    if constexpr (IS_E2M1)
        return to_floats(doubles_of_e2m1((Ints)codes));
    else
        return to_floats((Ints)codes);
}

// Stores the numbers of eight inputs and sixteen outputs, which are `words`, in a panel of T. Codes, scales and zero points have
// 4 and 11 bits: in float32 a number is exact, if its zero point is whole.
template <bool IS_E2M1>
inline void expand_words(Words words, Floats scale, Floats offset, float* to) {
    for (int i = 0; i < IN_WORD; ++i) {
        const Words codes = (words >> (i % 4 * 8 + i / 4 * 4)) & 0xf;
        store(to + i * PANEL, multiply_add(steps_of<IS_E2M1>(codes), scale, offset));
    }
}

template <bool IS_E2M1>
inline void expand_words(Words words, Floats scale, Floats offset, BFloat16* to) {
    for (int i = 0; i < IN_WORD; i += 2) {
        const auto number = [&](int input) {
            const Words codes = (words >> (input % 4 * 8 + input / 4 * 4)) & 0xf;
            return multiply_add(steps_of<IS_E2M1>(codes), scale, offset);
        };
        store(to + i * PANEL, pairs_of(number(i), number(i + 1)));
    }
}

// The numbers of a panel in T.
template <bool IS_E2M1, class T>
inline void expand_groups(const Matrix& m, const uint8_t* panel, T* to) {
    for (int64_t first = 0; first < m.inputs; first += m.group, panel += nibble_group_bytes(m.group)) {
        const int64_t steps = ceil_div(std::min(m.group, m.inputs - first), IN_WORD);
        for (int side = 0; side < 2; ++side) {
            const auto* head = reinterpret_cast<const uint16_t*>(panel) + side * LANES;
            const Floats scale = load_float16(head), zero = load_float16(head + PANEL);
            const Floats offset = m.has_minimums ? zero : -zero * scale;
            const uint8_t* words = panel + GROUP_HEAD + side * LINE;
            T* numbers = to + first * PANEL + side * LANES * Lane<T>::VALUES;
            for (int64_t k = 0; k < steps; ++k, words += 2 * LINE, numbers += IN_WORD * PANEL)
                expand_words<IS_E2M1>(load<Words>(words), scale, offset, numbers);
        }
    }
}

template <class T>
inline void expand_nibbles(const Matrix& m, const uint8_t* panel, T* to) {
    m.is_e2m1 ? expand_groups<true>(m, panel, to) : expand_groups<false>(m, panel, to);
}

// As multiply_codes() of linear.h, of rows in groups as the panel's.
template <int M, int LINES, bool MINIMUMS>
[[gnu::always_inline]] inline void multiply_nibbles(
    const Code* rows, int64_t stride, const Matrix& m, const uint8_t* panel, const void* ahead, float* totals) {
    const char* next = static_cast<const char*>(ahead);
    const int64_t group_bytes = nibble_group_bytes(m.group);
    const Code* groups = code_groups(m, rows);
    for (int i = 0; i < M * PANEL; i += LANES) store(totals + i, Floats{});
    for (int64_t first = 0; first < m.inputs; first += m.group, panel += group_bytes, groups += sizeof(CodeGroup)) {
        const uint8_t* words = panel + GROUP_HEAD;
        const Code* codes = rows + first;
        Ints sums[M][2];
        for (int i = 0; i < M; ++i) sums[i][0] = sums[i][1] = splat(0);
        const auto multiply = [&](Words left, Words right, const Code* from) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int i = 0; i < M; ++i) {
                const Words x = Lane<Code>::broadcast(from + i * stride);
                sums[i][0] = multiply_nibbles(left, x, sums[i][0]);
                sums[i][1] = multiply_nibbles(right, x, sums[i][1]);
            }
        };
        const int64_t steps = ceil_div(std::min(m.group, m.inputs - first), IN_WORD);
        for (int64_t k = 0; k < steps; ++k, words += 2 * LINE, codes += IN_WORD, next += LINES * LINE) {
            for (int line = 0; line < LINES; ++line) __builtin_prefetch(next + line * LINE, 0, 2);
            multiply(load<Words>(words) & LOW_NIBBLES, load<Words>(words + LINE) & LOW_NIBBLES, codes);
            // Loaded again: all registers have sums.
            const uint8_t* again = words;
            asm("" : "+r"(again));
            multiply((load<Words>(again) >> 4) & LOW_NIBBLES, (load<Words>(again + LINE) >> 4) & LOW_NIBBLES, codes + 4);
        }
        if constexpr (LINES > 1) {
            for (int64_t i = 0; i < GROUP_HEAD; i += LINE, next += LINE) __builtin_prefetch(next, 0, 2);
        }
        for (int side = 0; side < 2; ++side) {
            const auto* head = reinterpret_cast<const uint16_t*>(panel) + side * LANES;
            const Floats scale = load_float16(head), zero = load_float16(head + PANEL);
            for (int i = 0; i < M; ++i) {
                const Code* row = groups + i * stride;
                const Floats sum = sum_of(row);
                float* total = totals + i * PANEL + side * LANES;
                if constexpr (MINIMUMS)
                    add_with_minimum(total, sums[i][side], scale, zero, sum, scale_of(row));
                else
                    add_scaled(total, sums[i][side], zero, sum, scale, scale_of(row));
            }
        }
    }
}

}  // namespace quire
