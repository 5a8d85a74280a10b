// The tokens of the largest logits, found while the logits are computed.
#pragma once

#include <algorithm>
#include <limits>

#include "buffer.h"
#include "matrix.h"
#include "simd.h"

namespace quire {

// The argmax of rows of logits, from the peaks of the panels of a product that computes them. The logits need not be in memory.
class PanelPeaks {
public:
    void reserve(int64_t panels, int64_t rows) {
        num_panels_ = panels;
        stride_ = round_up(rows, LANES);
        logits_.reserve(panels * stride_);
        tokens_.reserve(panels * stride_);
    }

    // Of a panel, of which the first `count` outputs are logits: all of them, if `count` is PANEL or more. Several threads may call it,
    // each for other panels and rows.
    void put(int64_t row, int64_t panel, int64_t count, Floats left, Floats right) {
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
        logits_[panel * stride_ + row] = first < 0 ? NAN : peak;
        tokens_[panel * stride_ + row] = static_cast<int32_t>(panel * PANEL + static_cast<int64_t>(first));
    }

    int64_t num_groups() const { return stride_ / LANES; }

    // Of LANES rows from group * LANES on: as find_argmax<false>() of sample.h. `tokens` are those of row 0 on.
    void find_argmax(int64_t group, int64_t rows, int64_t* tokens) const {
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
        for (int64_t row = first; row < std::min(rows, first + LANES); ++row) tokens[row] = faults[row - first] ? -1 : found[row - first];
    }

private:
    int64_t num_panels_ = 0, stride_ = 0;
    Buffer<float> logits_;  // [panels, stride], NaN where a panel has a logit that is not finite
    Buffer<int32_t> tokens_;
};

}  // namespace quire
