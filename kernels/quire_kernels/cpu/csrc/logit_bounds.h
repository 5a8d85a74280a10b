// Which panels of a head may have the largest logit of a row, by bounds from products in 8 bits. Of the others no logit is computed.
//
// Rows and weights are rotated by one orthogonal matrix, which leaves products as they are and spreads what is much larger than the rest. Then
// both are rounded to codes. With x, w before rounding and x', w' after it, and by the inequality of Cauchy and Schwarz,
//     |x w - x' w'| = |(x - x') w + x' (w - w')| <= |x - x'| |w| + |x'| |w - w'|,
// so a logit is at most x' w' plus that: its upper bound. A panel whose bounds are all below a logit that is known has none that is larger.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "codes.h"
#include "matrix.h"
#include "panel_peaks.h"
#include "simd.h"

namespace quire {

constexpr int MOST_ROTATED = 4 * LANES;

// The head's weights in 8 bits. Logits have no bias and no soft cap.
struct HeadBounds {
    Matrix codes;           // W8A8, of rotated weights
    const float* rotation;  // [rotated, rotated], orthogonal and symmetric, of each `rotated` inputs
    int64_t rotated;        // LANES or MOST_ROTATED, of which the inputs are a multiple
    const float* norms;     // [panels * 32], of the weights of each output
    const float* errors;    // [panels * 32], norms of what rounding has changed of them
    float scale;            // of logits, above 0
};

class LogitBounds {
public:
    explicit LogitBounds(const HeadBounds* head) {
        if (!head) return;
        head_ = *head;
        num_panels_ = ceil_div(head_.codes.outputs, PANEL);
        stride_ = (ceil_div(num_panels_, LANES) | 1) * LANES;  // an odd number of lines: not a multiple of a page
        slack_ = static_cast<float>(head_.codes.inputs + SLACK) * 0x1p-22f;
    }

    bool exist() const { return num_panels_ > 0; }
    const Matrix& codes() const { return head_.codes; }
    const CodeRows& code_rows() const { return code_rows_; }

    // For a step with so many rows.
    void reserve(int64_t rows) {
        num_rows_ = rows;
        num_open_ = 0;
        code_rows_.reserve(rows, code_row_bytes(head_.codes));
        turned_.reserve(rows * head_.codes.inputs);
        rows_.resize(rows);
        bounds_.reserve(rows * stride_);
    }

    // A row [inputs], for the product with codes().
    template <class T>
    void set_row(int64_t row, const T* from) {
        const int64_t inputs = head_.codes.inputs;
        float* turned = &turned_[row * inputs];
        for (int64_t first = 0; first < inputs; first += head_.rotated)
            head_.rotated == LANES ? turn<1>(from + first, turned + first) : turn<MOST_ROTATED / LANES>(from + first, turned + first);
        code_rows_.set(row, turned, head_.codes);
        Floats squares = {}, errors = {};
        const Code* codes = code_rows_.row(row);
        const Code* groups = code_groups(head_.codes, codes);
        for (int64_t i = 0, group = code_group_of(head_.codes); i < inputs; i += LANES) {
            const Floats x = load_floats(turned + i), error = x - to_floats(load<Bytes>(codes + i)) * scale_of(groups + i / group * sizeof(CodeGroup));
            squares += x * x;
            errors += error * error;
        }
        const float norm = std::sqrt(total(squares)) + LEAST, error = std::sqrt(total(errors)) + LEAST;
        rows_[row].of_errors = norm + error;
        rows_[row].of_norms = error + slack_ * (norm + error);
    }

    // Results of the product. Several threads may call it, each for other panels and rows.
    void put(int64_t row, int64_t panel, Floats left, Floats right) {
        const Row& of = rows_[row];
        const auto bound = [&](Floats logits, int64_t output) {
            const Floats error = multiply_add(load_floats(head_.errors + output), splat(of.of_errors), logits);
            return multiply_add(load_floats(head_.norms + output), splat(of.of_norms), error);
        };
        left = bound(left, panel * PANEL);
        right = bound(right, panel * PANEL + LANES);
        bounds_[row * stride_ + panel] = largest(select(left > right, left, right)) * head_.scale;
    }

    // The largest bound of each panel.
    const float* of_row(int64_t row) const { return &bounds_[row * stride_]; }

    // Of a row whose bounds are all there: computes the panel with the largest of them, and counts those that are still to be computed.
    // peak_of(panel) returns the PanelPeak of a panel's logits.
    template <class F>
    void begin(int64_t row, F&& peak_of) {
        const float* bounds = of_row(row);
        int64_t first = 0;
        for (int64_t panel = 1; panel < num_panels_; ++panel)
            if (bounds[panel] > bounds[first]) first = panel;
        rows_[row].first = first;
        rows_[row].peak = peak_of(first);
        int64_t count = 0;
        for (int64_t panel = 0; panel < num_panels_; ++panel) count += panel != first && !(bounds[panel] < rows_[row].peak.logit);
        num_open_.fetch_add(count, std::memory_order_relaxed);
    }

    // Whether so many panels are left, of all rows that have begun, that a product of all is faster.
    bool leave_many() const { return num_open_.load(std::memory_order_relaxed) > num_rows_ * num_panels_ / MOST_SHARE; }

    // The token of the largest logit of a row that has begun; -1 where one is not finite.
    template <class F>
    int64_t argmax(int64_t row, F&& peak_of) const {
        const float* bounds = of_row(row);
        const int64_t first = rows_[row].first;
        PanelPeak most = rows_[row].peak;
        int64_t found = first;
        if (!most.is_finite()) return -1;
        // A comparison with NaN is false: where bounds are not finite, all logits are computed.
        for (int64_t panel = 0; panel < num_panels_; ++panel) {
            if (panel == first || bounds[panel] < most.logit) continue;
            const PanelPeak peak = peak_of(panel);
            if (!peak.is_finite()) return -1;
            if (peak.logit < most.logit || (peak.logit == most.logit && found < panel)) continue;
            most = peak;
            found = panel;
        }
        return found * PANEL + most.place;
    }

private:
    // Of the product of both norms, in units of 2**-22: more than the arithmetic of a logit, of rotations and of the bound itself may be wrong,
    // whose sums have at most `inputs` terms of 2**-24 each, or those of a rotation.
    static constexpr int64_t SLACK = 512;
    // Of a norm: squares of smaller numbers are 0.
    static constexpr float LEAST = 1e-16f;
    // One row's product with a panel takes about four times its share of a product of many rows.
    static constexpr int64_t MOST_SHARE = 8;

    struct Row {
        float of_norms, of_errors;  // what norms and errors of outputs are multiplied by
        int64_t first;              // the panel with the largest bound
        PanelPeak peak;             // its own
    };

    // Of N vectors.
    template <int N, class T>
    void turn(const T* from, float* to) const {
        float numbers[N * LANES];
        for (int n = 0; n < N; ++n) store(numbers + n * LANES, load_floats(from + n * LANES));
        Floats sums[N] = {};
        const float* row = head_.rotation;
        for (int i = 0; i < N * LANES; ++i, row += N * LANES)
            for (int n = 0; n < N; ++n) sums[n] = multiply_add(splat(numbers[i]), load_floats(row + n * LANES), sums[n]);
        for (int n = 0; n < N; ++n) store(to + n * LANES, sums[n]);
    }

    HeadBounds head_{};
    int64_t num_panels_ = 0, stride_ = 0, num_rows_ = 0;
    float slack_ = 0.0f;
    CodeRows code_rows_;
    Buffer<float> turned_;  // [rows, inputs]
    Buffer<float> bounds_;  // [rows, stride], the largest one of each panel
    std::vector<Row> rows_;
    std::atomic<int64_t> num_open_{0};
};

}  // namespace quire
