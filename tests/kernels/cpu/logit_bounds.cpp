// Upper bounds of logits, as test_logit_bounds.py calls them.
#include "logit_bounds.h"

#include "linear.h"

using namespace quire;

// The largest bound of each panel [count, panels], of rows [count, inputs].
extern "C" void find_bounds(const float* rows, int64_t count, const HeadBounds* head, float* largest_bounds) {
    LogitBounds bounds(head);
    bounds.reserve(count, 1);
    const Matrix& m = bounds.codes();
    const int64_t panels = ceil_div(m.outputs, PANEL), bytes = panel_bytes<Code>(m);
    for (int64_t row = 0; row < count; ++row) {
        bounds.set_row(row, rows + row * m.inputs);
        const TileRows<Code> tile{1, bounds.code_rows().row(row), 0, m.inputs, nullptr};
        for (int64_t panel = 0; panel < panels; ++panel) {
            alignas(LINE) float sums[PANEL];
            const char* codes = static_cast<const char*>(m.panels) + panel * bytes;
            multiply_panel<Code, 1>(tile, m, codes, codes, sums);
            finish_panel(m, panel, row, 1, sums, [&](int64_t, int64_t, Floats left, Floats right) { bounds.put(row, panel, left, right); });
            largest_bounds[row * panels + panel] = bounds.of_row(row)[panel];
        }
    }
}
