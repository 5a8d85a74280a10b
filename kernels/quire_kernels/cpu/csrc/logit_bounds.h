// Which panels of a head may have the largest logit of a row, by bounds from products in 8 bits. Of the others no logit is computed.
//
// Rows and weights are rotated by one orthogonal matrix, which leaves products as they are and spreads what is much larger than the rest. Then
// both are rounded to codes. With x, w before rounding and x', w' after it, and by the inequality of Cauchy and Schwarz,
//     |x w - x' w'| = |(x - x') w + x' (w - w')| <= |x - x'| |w| + |x'| |w - w'|,
// so a logit is at most x' w' plus that: its upper bound. A panel whose bounds are all below a logit that is known has none that is larger.
#pragma once

#include <algorithm>
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
        slack_ = static_cast<float>(head_.codes.inputs + ROUNDINGS) * 0x1p-22f;
    }

    bool exist() const { return num_panels_ > 0; }
    const Matrix& codes() const { return head_.codes; }
    const CodeRows& code_rows() const { return code_rows_; }

    // For a step with so many rows.
    void reserve(int64_t rows, int threads) {
        num_rows_ = rows;
        num_open_ = 0;
        parts_ = std::max(ceil_div(num_panels_, MOST_PANELS), ceil_div(PARTS_PER_THREAD * threads, std::max<int64_t>(1, rows)));
        found_.resize(rows * parts_);
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
    // peak_of(row, panel) returns the PanelPeak of a panel's logits.
    template <class F>
    void begin(int64_t row, F&& peak_of) {
        const float* bounds = of_row(row);
        int64_t first = 0;
        for (int64_t panel = 1; panel < num_panels_; ++panel)
            if (bounds[panel] > bounds[first]) first = panel;
        rows_[row].most = {first, peak_of(row, first)};
        int64_t count = 0;
        for (int64_t panel = 0; panel < num_panels_; ++panel) count += panel != first && !(bounds[panel] < rows_[row].most.peak.logit);
        num_open_.fetch_add(count, std::memory_order_relaxed);
    }

    // Whether so many panels are left, of all rows that have begun, that a product of all is faster.
    bool leave_many() const { return num_open_.load(std::memory_order_relaxed) > num_rows_ * num_panels_ / LEAST_SHARE; }

    // Rows are searched in parts, so that threads share what is left of few rows, or of one with most of it.
    int64_t num_parts() const { return num_rows_ * parts_; }

    // Computes the panels that are left of a part of a row that has begun.
    template <class F>
    void search(int64_t part, F&& peak_of) {
        const int64_t row = part / parts_, begin = part % parts_ * num_panels_ / parts_, end = (part % parts_ + 1) * num_panels_ / parts_;
        const float* bounds = of_row(row);
        const int64_t first = rows_[row].most.panel;
        Most most = rows_[row].most;
        // A comparison with NaN is false: where bounds are not finite, all logits are computed. A panel whose bound is as large as a known
        // logit may have the same one, of an earlier token.
        for (int64_t panel = begin; panel < end && most.peak.is_finite(); ++panel)
            if (panel != first && !(bounds[panel] < most.peak.logit)) most = larger(most, {panel, peak_of(row, panel)});
        found_[part] = most;
    }

    // The token of the largest logit of a row whose parts are searched; -1 where one is not finite.
    int64_t argmax(int64_t row) const {
        Most most = found_[row * parts_];
        for (int64_t part = 1; part < parts_; ++part) most = larger(most, found_[row * parts_ + part]);
        return most.peak.is_finite() ? most.panel * PANEL + most.peak.place : -1;
    }

private:
    // What is added to the number of inputs for the room that roundings get, in units of 2**-22 of the product of both norms: that of a
    // logit's sum takes a quarter of the inputs at most, those of both rotations 130 each.
    static constexpr int64_t ROUNDINGS = 512;
    // Added to each norm: squares of numbers below 1e-19 lose bits or become 0, and the norm of as many such numbers as a row may have is
    // less than this.
    static constexpr float LEAST = 1e-16f;
    // Where more than one panel in so many is left, all are computed: one row's product with a panel takes about four times its share
    // of a product of many rows, and few panels of many rows are read more often.
    static constexpr int64_t LEAST_SHARE = 8;
    static constexpr int64_t PARTS_PER_THREAD = 4, MOST_PANELS = 256;  // of a part

    // The largest logit found of a row, and its panel.
    struct Most {
        int64_t panel;
        PanelPeak peak;
    };

    struct Row {
        float of_norms, of_errors;  // what norms and errors of outputs are multiplied by
        Most most;                  // of the panel with the largest bound
    };

    // The first one of equal logits, and whatever is not finite.
    static const Most& larger(const Most& a, const Most& b) {
        if (!a.peak.is_finite() || !b.peak.is_finite()) return a.peak.is_finite() ? b : a;
        if (a.peak.logit == b.peak.logit) return a.panel < b.panel ? a : b;
        return a.peak.logit > b.peak.logit ? a : b;
    }

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
    int64_t num_panels_ = 0, stride_ = 0, num_rows_ = 0, parts_ = 1;  // parts of each row
    float slack_ = 0.0f;
    CodeRows code_rows_;
    Buffer<float> turned_;  // [rows, inputs]
    Buffer<float> bounds_;  // [rows, stride], the largest one of each panel
    std::vector<Row> rows_;
    std::vector<Most> found_;  // of each part
    std::atomic<int64_t> num_open_{0};
};

}  // namespace quire
