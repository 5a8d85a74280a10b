// Activations in 8 bits, for products with weights in 8 bits (W8A8).
//
// The numbers of a row are in groups, each with a scale of its own: a row often has a few numbers much larger than all others,
// whose scale would leave these few steps. Products of a group are added in int32, which is exact, and groups as floats, in
// their order. So a row's bits do not depend on other rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "buffer.h"
#include "simd.h"
#include "thread_pool.h"

namespace quire {

constexpr int64_t GROUP = 128;

// A group of a row. Instructions multiply signed bytes by unsigned ones, so weights are kept as their code + 128.
struct CodeGroup {
    float scale;
    int32_t start;  // of the sums of products: -128 times the sum of the codes, for what the weights have too much
    int8_t codes[GROUP];
};

// Writes the groups of a row of `inputs` numbers, which has zeros up to a multiple of LANES. A scale is NaN where a number of
// its group is not finite.
template <class T>
inline void quantize(const T* from, int64_t inputs, CodeGroup* groups) {
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    constexpr float LEAST = 1e-30f;           // of a divisor: the quotient is finite
    const Floats shift = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer, in the lowest bits
    const Ints integers = (Ints)shift;
    for (int64_t first = 0; first < inputs; first += GROUP, from += GROUP, ++groups) {
        const int64_t count = std::min(GROUP, inputs - first);
        Floats peaks = {}, poison = {};
        for (int64_t i = 0; i < count; i += LANES) {
            const Floats x = load_floats(from + i), size = x < 0.0f ? -x : x;
            peaks = size > peaks ? size : peaks;
            poison += x * 0.0f;  // NaN, if x is not finite
        }
        const float peak = largest(peaks), factor = 127.0f / std::max(peak, LEAST);
        Ints sums = {};
        for (int64_t i = 0; i < count; i += LANES) {
            const Ints codes = (Ints)(load_floats(from + i) * factor + shift) - integers;
            sums += codes;
            store(groups->codes + i, __builtin_convertvector(codes, Bytes));
        }
        int32_t sum = 0;
        for (int i = 0; i < LANES; ++i) sum += sums[i];
        groups->start = -128 * sum;
        groups->scale = peak / 127.0f + total(poison);
    }
}

// The groups of a step's rows, which are those of one matrix's inputs after the other's.
class CodeRows {
public:
    // Memory for rows of at most so many numbers.
    void reserve(int64_t rows, int64_t inputs) {
        num_groups_ = (inputs + GROUP - 1) / GROUP;
        groups_.reserve(rows * num_groups_);
    }

    template <class T>
    void set(int64_t row, const T* from, int64_t inputs) {
        quantize(from, inputs, &groups_[row * num_groups_]);
    }

    // For all threads of the pool.
    template <class T>
    void set_all(ThreadPool& pool, int64_t num_rows, const T* from, int64_t from_stride, int64_t inputs) {
        pool.parallel_for_ranges(num_rows, [&](int64_t row) { set(row, from + row * from_stride, inputs); });
    }

    // A row, and the distance to the next one, as products take them.
    const Code* row(int64_t row) const { return reinterpret_cast<const Code*>(groups_.data() + row * num_groups_); }
    int64_t stride() const { return num_groups_ * static_cast<int64_t>(sizeof(CodeGroup)); }

private:
    int64_t num_groups_ = 0;
    Buffer<CodeGroup> groups_;
};

}  // namespace quire
