// The functions between products of an MLP, and the soft cap of logits.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "simd.h"

namespace quire {

enum class Activation : int64_t { GELU = 0, GELU_TANH = 1, SILU = 2, RELU = 3, RELU2 = 4, SWIGLU_OAI = 5 };

inline Floats silu(Floats v) { return v / (1.0f + exp2(v * -LOG2_E)); }

// x * (1 + erf(x / sqrt 2)) / 2 (arXiv:1606.08415). Measured over [-40, 40] with fused operations: the
// error is at most 2.9e-7 below 0, and 3.1 units in the last place above it.
inline Floats gelu(Floats x) {
    constexpr float END = 5.5f;  // below -END the result is within 1.1e-7 of 0, above END of x
    const Floats u = multiply_add(x * x, splat(2.0f / (END * END)), splat(-1.0f));
    // The polynomial in u with the least error of the result for the density's integral from 0 to x, divided by x
    Floats slope = splat(-1.90655366e-4f);
    for (const float term :
         {5.92047698e-4f, -6.73303555e-4f, 8.4115495e-4f, -2.24018074e-3f, 4.47751582e-3f, -6.92995777e-3f,
          1.03121176e-2f, -1.49637489e-2f, 2.03396212e-2f, -2.60538682e-2f, 3.20737176e-2f, -3.87924127e-2f,
          4.77374494e-2f, -6.41723424e-2f, 1.2855193e-1f})
        slope = multiply_add(slope, u, splat(term));
    const Floats inside = x * multiply_add(slope, x, splat(0.5f));
    const Floats above = select(x > END, x, inside);
    return select(x < -END, Floats{}, above);
}

// Its approximation x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x**3))) / 2.
inline Floats gelu_tanh(Floats x) {
    const Floats y = x * multiply_add(x * x, splat(0.044715f), splat(1.0f));
    return x / (1.0f + exp2(y * (-2.0f * 0.7978845608028654f * LOG2_E)));
}

// NaN stays.
inline Floats relu(Floats v) { return select(v < 0.0f, Floats{}, v); }

// (up + 1) * gate * sigmoid(1.702 * gate), of a gate of at most 7 and up from -7 to 7: gpt-oss's. NaN stays.
inline Floats swiglu_oai(Floats gate, Floats up) {
    constexpr float LIMIT = 7.0f;
    gate = select(gate > LIMIT, splat(LIMIT), gate);
    up = select(up > LIMIT, splat(LIMIT), up);
    up = select(up < -LIMIT, splat(-LIMIT), up);
    return (up + 1.0f) * (gate / (1.0f + exp2(gate * (-1.702f * LOG2_E))));
}

// Of a single product: not SWIGLU_OAI.
inline Floats activate(Activation activation, Floats v) {
    switch (activation) {
        case Activation::GELU: return gelu(v);
        case Activation::GELU_TANH: return gelu_tanh(v);
        case Activation::RELU: return relu(v);
        case Activation::RELU2: return relu(v) * relu(v);
        default: return silu(v);
    }
}

// The activation of a gate, times up.
inline Floats gated(Activation activation, Floats gate, Floats up) {
    return activation == Activation::SWIGLU_OAI ? swiglu_oai(gate, up) : activate(activation, gate) * up;
}

// cap * tanh(v / cap)
inline Floats soft_cap(Floats v, float cap) {
    // tanh(y) = 1 - 2 / (1 + e**2y)
    return cap * (1.0f - 2.0f / (1.0f + exp2(v * (2.0f * LOG2_E / cap))));
}

}  // namespace quire
