// Products in 8 bits, as test_codes.py calls them.
#include "linear.h"

using namespace quire;

namespace {

// Sums [count, PANEL] of rows [count, stride] and the only panel of a matrix.
void multiply(const float* rows, int64_t count, int64_t stride, const Matrix& m, float* sums) {
    CodeRows code_rows;
    code_rows.reserve(count, code_row_bytes(m));
    for (int64_t row = 0; row < count; ++row) code_rows.set(row, rows + row * stride, m);
    const int64_t most = rows_of_tile<Code>(m, count);
    for (int64_t first = 0; first < count; first += most)
        multiply_panel<Code, 1>({std::min(most, count - first), code_rows.row(first), code_rows.stride(), m.inputs, nullptr}, m, m.panels,
                                m.panels, sums + first * PANEL);
}

}  // namespace

// Sums [count, PANEL] of rows [count, stride], of which `inputs` numbers count, and one panel of weights.
extern "C" void products(const float* rows, int64_t count, int64_t inputs, int64_t stride, const uint8_t* panel, float* sums) {
    multiply(rows, count, stride, {PANEL, inputs, Format::W8A8, panel, nullptr, nullptr, 0, nullptr, 0}, sums);
}

// The same, of weights in 4 bits: codes [PANEL, inputs], scales and zero points [PANEL, groups] in float16.
extern "C" void products_of_nibbles(const float* rows, int64_t count, int64_t inputs, int64_t stride, const uint8_t* codes,
                                    const uint16_t* scales, const uint16_t* zeros, int64_t group, int64_t has_minimums, float* sums) {
    Matrix m{PANEL, inputs, Format::W4A8, nullptr, nullptr, nullptr, group, nullptr, has_minimums};
    Buffer<uint8_t> panel(nibble_panel_bytes(m));
    pack_nibbles(codes, scales, zeros, m, inputs, 0, panel.data());
    m.panels = panel.data();
    multiply(rows, count, stride, m, sums);
}

// The same, of weights in groups of 8 bits: codes [PANEL, inputs], scales and minimums [PANEL, groups] in float16, or null; and the
// numbers [inputs, PANEL].
extern "C" void products_of_bytes(const float* rows, int64_t count, int64_t inputs, int64_t stride, const int8_t* codes,
                                  const uint16_t* scales, const uint16_t* minimums, int64_t group, float* sums, float* numbers) {
    Matrix m{PANEL, inputs, Format::GROUPED_W8A8, nullptr, nullptr, nullptr, group, nullptr, minimums != nullptr};
    Buffer<uint8_t> panel(byte_panel_bytes(m));
    pack_grouped_bytes(codes, scales, minimums, m, inputs, 0, panel.data());
    m.panels = panel.data();
    multiply(rows, count, stride, m, sums);
    m.format = Format::GROUPED_W8A16;
    expand_panel(m, panel.data(), numbers);
}

// The numbers [inputs, PANEL] of such weights, inputs a multiple of 8.
extern "C" void expanded_nibbles(int64_t inputs, const uint8_t* codes, const uint16_t* scales, const uint16_t* zeros, int64_t group,
                                 int64_t has_minimums, float* numbers) {
    const Matrix m{PANEL, inputs, Format::W4A16, nullptr, nullptr, nullptr, group, nullptr, has_minimums};
    Buffer<uint8_t> panel(nibble_panel_bytes(m));
    pack_nibbles(codes, scales, zeros, m, inputs, 0, panel.data());
    expand_panel(m, panel.data(), numbers);
}
