// Products in 8 bits, as test_codes.py calls them.
#include "linear.h"

using namespace quire;

// Sums [count, PANEL] of rows [count, stride], of which `inputs` numbers count, and one panel of weights.
extern "C" void products(const float* rows, int64_t count, int64_t inputs, int64_t stride, const Code* panel, float* sums) {
    CodeRows code_rows;
    code_rows.reserve(count, inputs);
    for (int64_t row = 0; row < count; ++row) code_rows.set(row, rows + row * stride, inputs);
    for (int64_t first = 0; first < count; first += ROWS)
        multiply_panel<Code, 1>(std::min<int64_t>(ROWS, count - first), code_rows.row(first), code_rows.stride(), panel,
                                ceil_div(inputs, Lane<Code>::VALUES), panel, sums + first * PANEL);
}
