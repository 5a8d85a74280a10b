// A linear map whose weights are laid out once for the processor, in panels of 32 outputs.
#pragma once

#include <cstdint>

#include "simd.h"

namespace quire {

constexpr int PANEL = 2 * LANES;
constexpr int LINE = 64;

// INT8 and W8A8: weights in 8 bits with a scale for each output. W4A16 and W4A8: in 4 bits, see nibbles.h. GROUPED_W8A16 and
// GROUPED_W8A8: in 8 bits with a scale for each output and group of inputs, see grouped_bytes.h. In W8A8, W4A8 and GROUPED_W8A8,
// activations have 8 bits too.
enum class Format : int64_t { PLAIN = 0, INT8 = 1, W8A8 = 2, W4A16 = 3, W4A8 = 4, GROUPED_W8A16 = 5, GROUPED_W8A8 = 6 };

// Panel p holds outputs 32 p to 32 p + 31, input by input (bfloat16, INT8: two inputs at a time; W8A8: four), zeros beyond the
// last one.
struct Matrix {
    int64_t outputs;
    int64_t inputs;
    Format format;
    const void* panels;
    const float* scales;    // [panels * 32], or null
    const float* bias;      // [panels * 32], or null
    int64_t group;          // inputs with one scale, in formats with groups: 16, 32, 64 or 128; in W8A8 how many inputs of a row share a scale; 0: 128
    const int32_t* order;   // [inputs], which element of a row each input is; or null: they are in order
    int64_t has_minimums;   // whether a number is code * scale + minimum, where groups have both
    int64_t is_e2m1;        // in W4A16: whether codes are numbers of e2m1, without zero points

    // Whether rows are rounded to codes before they are multiplied.
    bool takes_codes() const { return format == Format::W8A8 || format == Format::W4A8 || format == Format::GROUPED_W8A8; }
    // Whether panels are expanded to numbers of the rows' type before they are multiplied.
    bool is_expanded() const {
        return format == Format::INT8 || format == Format::W4A16 || format == Format::GROUPED_W8A16;
    }
    bool has_nibbles() const { return format == Format::W4A16 || format == Format::W4A8; }
    bool has_grouped_bytes() const { return format == Format::GROUPED_W8A16 || format == Format::GROUPED_W8A8; }
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace quire
