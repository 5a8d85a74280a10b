// Operations of lanes.h and simd.h, and what is made of them alone, for test_lanes.py: `count` is a multiple of LANES.
#include "buffer.h"
#include "linear.h"
#include "panel_peaks.h"

using namespace quire;

namespace {

template <class T>
void multiply(const T* rows, int64_t count, int64_t inputs, int64_t stride, const T* panel, float* sums) {
    const Matrix matrix{PANEL, inputs, Format::PLAIN, panel, nullptr, nullptr, 0, nullptr, 0};
    Buffer<T> scratch(VectorFactors<T>::scratch_size(inputs));
    multiply_panel<T, 1>({count, rows, stride, inputs, scratch.data()}, matrix, panel, panel, sums);
}

}  // namespace

extern "C" {

void to_bfloat16(const float* from, int64_t count, BFloat16* to) {
    for (int64_t i = 0; i < count; i += LANES) store_floats(to + i, load_floats(from + i));
}
void exactly_to_bfloat16(const float* from, int64_t count, BFloat16* to) {
    for (int64_t i = 0; i < count; i += LANES) store_exact(to + i, load_floats(from + i));
}
void from_bfloat16(const BFloat16* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += LANES) store(to + i, load_floats(from + i));
}
void from_float16(const uint16_t* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += LANES) store(to + i, load_float16(from + i));
}
void from_bytes(const int8_t* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += LANES) store(to + i, floats_of(from + i));
}
void to_bytes(const int32_t* from, int64_t count, int8_t* to) {
    for (int64_t i = 0; i < count; i += LANES) store(to + i, to_bytes(load<Ints>(from + i)));
}
// The same numbers in both types; `count` is a multiple of 64.
void lines_of_bytes(const int8_t* from, int64_t count, float* floats, BFloat16* halves) {
    for (int64_t i = 0; i < count; i += 4 * LANES) {
        store_line(floats + i, from + i);
        store_line(halves + i, from + i);
    }
}
// Pairs [2 * count] of neighbours: the first of each from `low`, the second from `high`.
void pairs(const float* low, const float* high, int64_t count, BFloat16* to) {
    for (int64_t i = 0; i < count; i += LANES) store(to + 2 * i, pairs_of(load_floats(low + i), load_floats(high + i)));
}
void transpose_words(uint32_t* words) {
    Words rows[LANES];
    for (int i = 0; i < LANES; ++i) rows[i] = load<Words>(words + i * LANES);
    transpose(rows);
    for (int i = 0; i < LANES; ++i) store(words + i * LANES, rows[i]);
}
// The largest of sixteen numbers, their sum, whether some is above the bound, and whether some equals it.
void summarize(const float* from, float bound, float* to) {
    const Floats v = load_floats(from);
    to[0] = largest(v);
    to[1] = total(v);
    to[2] = any_above(v, bound);
    to[3] = any(v == bound);
}
// The argmax of each row of logits [rows, vocab], from panels that begin every PANEL logits; a multiple of PANEL is readable.
void argmax_of_panels(const float* logits, int64_t rows, int64_t vocab, int64_t stride, int64_t* tokens) {
    PanelPeaks peaks;
    const int64_t panels = ceil_div(vocab, PANEL);
    peaks.reserve(panels, rows);
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t row = 0; row < rows; ++row) {
            const float* from = logits + row * stride + panel * PANEL;
            peaks.put(row, panel, vocab - panel * PANEL, load_floats(from), load_floats(from + LANES));
        }
    for (int64_t group = 0; group < ceil_div(rows, LANES); ++group)
        peaks.find_argmax(group, rows, [&](int64_t row, int64_t token) { tokens[row] = token; });
}
// Sums [count, PANEL] of rows [count, stride] and weights [inputs, PANEL], packed.
void products(const float* rows, int64_t count, int64_t inputs, int64_t stride, const float* panel, float* sums) {
    multiply<float>(rows, count, inputs, stride, panel, sums);
}
void products_of_bfloat16(const BFloat16* rows, int64_t count, int64_t inputs, int64_t stride, const BFloat16* panel, float* sums) {
    multiply<BFloat16>(rows, count, inputs, stride, panel, sums);
}
int64_t most_rows() { return Lane<float>::MOST_ROWS; }

}  // extern "C"
