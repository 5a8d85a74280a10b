// Numbers in 8 bits: activations, for products with weights in 8 bits (W8A8, GROUPED_W8A8) or 4 (W4A8); keys and values.
//
// The numbers of a row are in groups, each with a scale of its own: a row often has a few numbers much larger than all others,
// whose scale would leave these few steps. Only rows that are rotated first, which spreads such numbers, have one scale
// (logit_bounds.h). Products of a group are added in int32, which is exact, and groups as floats, in their order. So a row's bits do
// not depend on other rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "buffer.h"
#include "matrix.h"
#include "simd.h"
#include "thread_pool.h"

namespace quire {

// Instructions multiply signed bytes by unsigned ones, so codes of weights have an offset.
constexpr int CODE_OFFSET = 128;

// Of each group of a row. Sums of its products with codes that have the offset begin at `start`, which makes up for it.
struct CodeGroup {
    float scale;
    int32_t start;
    float sum;  // of its codes

    CodeGroup(float scale, int32_t sum) : scale(scale), start(-CODE_OFFSET * sum), sum(static_cast<float>(sum)) {}
};

// Each in all lanes. A load from memory does that; of a number in another register it takes an instruction of its own.
inline Floats scale_of(const Code* group) { return splat(load<float>(group + offsetof(CodeGroup, scale))); }
inline Ints start_of(const Code* group) { return splat(load<int32_t>(group + offsetof(CodeGroup, start))); }
inline Floats sum_of(const Code* group) { return splat(load<float>(group + offsetof(CodeGroup, sum))); }

// The inputs of a group, of rows that a matrix is multiplied by.
inline int64_t code_group_of(const Matrix& m) { return m.group ? m.group : 128; }

// A row for a matrix is its codes in whole lines, one byte each, then its groups.
inline int64_t code_bytes(const Matrix& m) { return round_up(m.inputs, LINE); }
inline int64_t code_row_bytes(const Matrix& m) {
    return m.takes_codes() ? round_up(code_bytes(m) + ceil_div(m.inputs, code_group_of(m)) * sizeof(CodeGroup), LINE) : 0;
}
inline const Code* code_groups(const Matrix& m, const Code* row) { return row + code_bytes(m); }

// Codes of `count` numbers, of which load(i) has LANES from i on, zeros beyond the last one. Calls put(i, codes) for each LANES of
// them. The scale is NaN where a number is not finite, and the sum 0.
template <class L, class P>
inline CodeGroup quantize_group(int64_t count, L&& load, P&& put) {
    constexpr float LEAST = 1e-30f;           // of a divisor: the quotient is finite
    constexpr int32_t INFINITE = 0x7f800000;  // the bits of infinity
    const Floats shift = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer, in the lowest bits
    const Ints integers = (Ints)shift;
    Ints peaks = {};  // bits of magnitudes, which are in the order of what they stand for, with NaN above all numbers
    for (int64_t i = 0; i < count; i += LANES) {
        const Ints magnitude = (Ints)load(i) & 0x7fffffff;
        peaks = select(magnitude > peaks, magnitude, peaks);
    }
    const bool is_finite = !any(peaks >= splat(INFINITE));
    const float peak = largest((Floats)peaks), factor = 127.0f / std::max(peak, LEAST);
    Words sums = {};  // what is not finite has codes of any size
    for (int64_t i = 0; i < count; i += LANES) {
        const Ints codes = (Ints)(load(i) * factor + shift) - integers;
        sums += (Words)codes;
        put(i, to_bytes(codes));
    }
    if (!is_finite) return {std::numeric_limits<float>::quiet_NaN(), 0};
    return {peak / 127.0f, static_cast<int32_t>(total(sums))};
}

// Writes a row for a matrix, of which load(i) has the numbers from i on, zeros up to a multiple of LANES.
template <class F>
inline void quantize(const Matrix& m, F&& load, Code* to) {
    const int64_t inputs = m.inputs, size = code_group_of(m);
    Code* groups = to + code_bytes(m);
    for (int64_t first = 0; first < inputs; first += size, to += size, groups += sizeof(CodeGroup)) {
        const auto load_group = [&](int64_t i) { return load(first + i); };
        store(groups, quantize_group(std::min(size, inputs - first), load_group, [&](int64_t i, Bytes codes) { store(to + i, codes); }));
    }
}

// Numbers of a row from input i on, in the order of a matrix.
template <class T>
inline Floats load_in_order(const Matrix& m, const T* from, int64_t i) {
    if (!m.order) return load_floats(from + i);
    float numbers[LANES] = {};
    const int count = static_cast<int>(std::min<int64_t>(LANES, m.inputs - i));
    for (int lane = 0; lane < count; ++lane) numbers[lane] = as_float(from[m.order[i + lane]]);
    return load<Floats>(numbers);
}

// The rows of a step in codes, which are those of one matrix's inputs after the other's.
class CodeRows {
public:
    // Memory for rows of at most so many bytes, see code_row_bytes().
    void reserve(int64_t rows, int64_t row_bytes) {
        stride_ = row_bytes;
        codes_.reserve((rows + TILE) * stride_);
    }

    // A row [inputs] for a matrix.
    template <class T>
    void set(int64_t row, const T* from, const Matrix& m) {
        Code* to = &codes_[row * stride_];
        if (m.order)
            quantize(m, [&](int64_t i) { return load_in_order(m, from, i); }, to);
        else
            quantize(m, [&](int64_t i) { return load_floats(from + i); }, to);
    }

    // For all threads of the pool.
    template <class T>
    void set_all(ThreadPool& pool, int64_t num_rows, const T* from, int64_t from_stride, const Matrix& m) {
        pool.parallel_for_ranges(num_rows, [&](int64_t row) { set(row, from + row * from_stride, m); });
    }

    // A row, and the distance to the next one, as products take them.
    const Code* row(int64_t row) const { return codes_.data() + row * stride_; }
    int64_t stride() const { return stride_; }

private:
    static constexpr int64_t TILE = 32;  // rows that a product may read beyond the last one

    int64_t stride_ = 0;
    Buffer<Code> codes_;
};

}  // namespace quire
