// The tokens of the largest logits, found while the logits are computed.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "buffer.h"
#include "matrix.h"
#include "simd.h"

namespace quire {

// The largest logit of a panel, and which of its outputs it is. NaN, where one is not finite.
struct PanelPeak {
    float logit;
    int32_t place;

    bool is_finite() const { return logit == logit; }
};

// Of a panel, of which the first `count` outputs are logits: all of them, if `count` is PANEL or more.
inline PanelPeak peak_of_panel(int64_t count, Floats left, Floats right) {
    const float most = std::numeric_limits<float>::max();
    if (count < PANEL) {
        left = select(LANE < splat(static_cast<int32_t>(count)), left, splat(-most));
        right = select(LANE + LANES < splat(static_cast<int32_t>(count)), right, splat(-most));
    }
    const Floats low = select(left < right, left, right), high = select(left < right, right, left);
    const float peak = largest(high);
    // A comparison with NaN is false. A lane that is not finite precedes all others.
    const Ints is_finite = (left == left) & (right == right) & (low >= -most) & (high <= most);
    const Floats places = select(left == peak, to_floats(LANE), select(right == peak, to_floats(LANE + LANES), splat(static_cast<float>(PANEL))));
    const float first = -largest(-select(is_finite, places, splat(-1.0f)));
    return {first < 0 ? NAN : peak, static_cast<int32_t>(first)};
}

// The argmax of rows of logits, from the peaks of the panels of a product that computes them. The logits need not be in memory.
class PanelPeaks {
public:
    void reserve(int64_t panels, int64_t rows) {
        num_panels_ = panels;
        stride_ = round_up(rows, LANES);
        logits_.reserve(panels * stride_);
        tokens_.reserve(panels * stride_);
    }

    // As peak_of_panel(). Several threads may call it, each for other panels and rows.
    void put(int64_t row, int64_t panel, int64_t count, Floats left, Floats right) {
        const PanelPeak peak = peak_of_panel(count, left, right);
        logits_[panel * stride_ + row] = peak.logit;
        tokens_[panel * stride_ + row] = static_cast<int32_t>(panel * PANEL) + peak.place;
    }

    // Of LANES rows from group * LANES on, below `rows`: calls put(row, token) with what find_argmax<false>() of sample.h returns.
    template <class F>
    void find_argmax(int64_t group, int64_t rows, F&& put) const {
        const int64_t first = group * LANES;
        Floats top = splat(-INFINITY);
        Ints found = {}, faults = {};
        for (int64_t place = first; place < num_panels_ * stride_; place += stride_) {
            const Floats peaks = load_floats(&logits_[place]);
            const Ints is_more = peaks > top;
            top = select(is_more, peaks, top);
            found = select(is_more, load<Ints>(&tokens_[place]), found);
            faults |= ~(peaks == peaks);
        }
        for (int64_t row = first; row < std::min(rows, first + LANES); ++row) put(row, faults[row - first] ? -1 : found[row - first]);
    }

private:
    int64_t num_panels_ = 0, stride_ = 0;
    Buffer<float> logits_;  // [panels, stride], NaN where a panel has a logit that is not finite
    Buffer<int32_t> tokens_;
};

}  // namespace quire
