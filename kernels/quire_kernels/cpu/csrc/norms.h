// Norms of rows, computed in float32.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd.h"

namespace quire {

enum class NormKind : int64_t { RMS = 0, LAYER = 1 };

// Weight and bias are of the size of a row, padded with zeros to a multiple of LANES.
struct Norm {
    NormKind kind;
    const float* weight;  // null: rows stay as they are
    const float* bias;    // of a LAYER norm only
    float epsilon;

    bool exists() const { return weight != nullptr; }
};

// x / sqrt(mean of x**2) * weight (arXiv:1910.07467); as normalize().
template <class F>
inline void normalize_by_rms(const float* from, const Norm& norm, int64_t size, F&& put) {
    Floats squares = {};
    for (int64_t i = 0; i < size; i += LANES) {
        const Floats x = load_floats(from + i);
        squares = multiply_add(x, x, squares);
    }
    const float factor = 1.0f / std::sqrt(total(squares) / static_cast<float>(size) + norm.epsilon);
    for (int64_t i = 0; i < size; i += LANES) put(i, load_floats(from + i) * factor * load_floats(norm.weight + i));
}

// (x - mean) / deviation * weight + bias (arXiv:1607.06450); as normalize().
template <class F>
inline void normalize_layer(const float* from, const Norm& norm, int64_t size, F&& put) {
    Floats sum = {}, squares = {};
    for (int64_t i = 0; i < size; i += LANES) sum += load_floats(from + i);
    const float mean = total(sum) / static_cast<float>(size);
    const int64_t whole = size / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        const Floats x = load_floats(from + i) - mean;
        squares = multiply_add(x, x, squares);
    }
    if (whole < size) {
        const Floats x = select(LANE < static_cast<int32_t>(size - whole), load_floats(from + whole) - mean, Floats{});
        squares = multiply_add(x, x, squares);
    }
    const float factor = 1.0f / std::sqrt(total(squares) / static_cast<float>(size) + norm.epsilon);
    for (int64_t i = 0; i < size; i += LANES) {
        const Floats x = (load_floats(from + i) - mean) * factor;
        put(i, multiply_add(x, load_floats(norm.weight + i), load_floats(norm.bias + i)));
    }
}

// Calls put(i, values) for each vector of the result, which may overwrite the row. Beyond `size`, the row has zeros up to a
// multiple of LANES, and so has the result.
template <class F>
inline void normalize(const float* from, const Norm& norm, int64_t size, F&& put) {
    if (norm.kind == NormKind::LAYER) return normalize_layer(from, norm, size, put);
    normalize_by_rms(from, norm, size, put);
}

}  // namespace quire
