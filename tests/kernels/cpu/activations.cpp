// Functions of activations.h, for test_activations.py: `count` is a multiple of LANES.
#include "activations.h"

namespace {

template <class F>
void apply(const float* from, int64_t count, float* to, F&& activation) {
    for (int64_t i = 0; i < count; i += quire::LANES)
        quire::store_floats(to + i, activation(quire::load_floats(from + i)));
}

}  // namespace

extern "C" {

void gelu(const float* from, int64_t count, float* to) { apply(from, count, to, quire::gelu); }
void gelu_tanh(const float* from, int64_t count, float* to) { apply(from, count, to, quire::gelu_tanh); }
void silu(const float* from, int64_t count, float* to) { apply(from, count, to, quire::silu); }

void relu(const float* from, int64_t count, float* to) { apply(from, count, to, quire::relu); }
void soft_cap(const float* from, int64_t count, float* to) {
    apply(from, count, to, [](quire::Floats v) { return quire::soft_cap(v, 30.0f); });
}

void swiglu_oai(const float* gate, const float* up, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += quire::LANES)
        quire::store_floats(to + i, quire::gated(quire::Activation::SWIGLU_OAI, quire::load_floats(gate + i), quire::load_floats(up + i)));
}

}  // extern "C"
