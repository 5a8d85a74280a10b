// Rotary positions (arXiv:2104.09864), the halves of a head's rotated part against each other.
#pragma once

#include <cmath>
#include <cstdint>

namespace quire {

// The first 2 * num_pairs dimensions of a head are rotated; the others stay.
struct Rope {
    const float* frequencies;  // [num_pairs], radians per position
    int64_t num_pairs;
    float factor;  // of rotated dimensions
    const float* query_factors;  // by position, of whole queries after their rotation; null: they stay
};

// The rotation by a position: cosines and sines [num_pairs].
inline void compute_angles(const Rope& rope, int64_t position, float* cosines, float* sines) {
    for (int64_t i = 0; i < rope.num_pairs; ++i) {
        // One by one, by the C library: vector code could compute the last ones differently.
        const float angle = static_cast<float>(position) * rope.frequencies[i];
        cosines[i] = std::cos(angle) * rope.factor;
        sines[i] = std::sin(angle) * rope.factor;
    }
}

// In place.
inline void rotate(float* head, const float* cosines, const float* sines, int64_t num_pairs) {
    for (int64_t i = 0; i < num_pairs; ++i) {
        const float left = head[i], right = head[i + num_pairs];
        head[i] = left * cosines[i] - right * sines[i];
        head[i + num_pairs] = right * cosines[i] + left * sines[i];
    }
}

}  // namespace quire
