// Sampling: the argmax of a row of logits, or a token by the uniform number of its seed among those that top-k, top-p and
// min-p keep; and log-probabilities. One thread processes a row; no vocabulary is sorted.
#pragma once

#include <algorithm>
#include <vector>

#include "buffer.h"
#include "simd.h"

namespace quire {

struct SamplingParams {
    double number;  // uniform in [0, 1)
    double top_p;
    float temperature;
    float min_p;
    int64_t top_k;  // 0: all
};

// The largest of a row and the first token that has it. The token is -1 where some logit is NaN or infinite, or, with
// SUPPRESSED, where all are minus infinity, of which some may be.
struct Argmax {
    float logit;
    int64_t token;
};

template <bool SUPPRESSED>
inline Argmax find_argmax(const float* logits, int64_t vocab) {
    const Floats least = splat(-std::numeric_limits<float>::max()), most = -least;
    Floats top = splat(-INFINITY);
    Ints faults = {};
    int64_t i = 0;
    for (; i + LANES <= vocab; i += LANES) {
        const Floats x = load_floats(logits + i);
        top = select(x > top, x, top);
        faults |= ~((SUPPRESSED ? (x <= most) : (x <= most) & (x >= least)));
    }
    float peak = largest(top);
    bool is_faulty = false;
    for (int lane = 0; lane < LANES; ++lane) is_faulty |= faults[lane] != 0;
    for (; i < vocab; ++i) {
        peak = std::max(peak, logits[i]);
        is_faulty |= !(logits[i] <= most[0] && (SUPPRESSED || logits[i] >= least[0]));
    }
    if (is_faulty || peak == -INFINITY) return {peak, -1};
    i = 0;
    for (; i + LANES <= vocab; i += LANES) {
        if (any(load_floats(logits + i) == peak)) break;
    }
    while (logits[i] != peak) ++i;
    return {peak, i};
}

// Sets the logits of tokens whose bit is not set to minus infinity: bit t % 32 of word t / 32 is token t's.
inline void mask_logits(float* logits, int64_t vocab, const uint32_t* bits) {
    for (int64_t first = 0; first < vocab; first += 32) {
        const uint32_t word = bits[first / 32];
        if (word == ~uint32_t{0}) continue;
        const int64_t end = std::min<int64_t>(32, vocab - first);
        for (int64_t i = 0; i < end; ++i) logits[first + i] = (word >> i) & 1 ? logits[first + i] : -INFINITY;
    }
}

// Log-probabilities of one token of a row of logits, and of its top `count` in falling order, of equals the first first:
// a smaller count gives a prefix of the same tokens.
inline void top_logprobs(const float* logits, int64_t vocab, int64_t token, int64_t count, float* logprobs, int64_t* ids) {
    const float peak = find_argmax<true>(logits, vocab).logit;
    double sum = 0.0;
    int64_t i = 0;
    for (; i + LANES <= vocab; i += LANES) sum += total(exp2((load_floats(logits + i) - peak) * LOG2_E));
    for (; i < vocab; ++i) sum += exp2(splat((logits[i] - peak) * LOG2_E))[0];
    const double norm = peak + std::log(sum);

    float* best = logprobs + 1;
    int64_t found = 0;
    const auto take = [&](int64_t id) {
        int64_t place = found < count ? found++ : count - 1;
        for (; place > 0 && best[place - 1] < logits[id]; --place) {
            best[place] = best[place - 1];
            ids[place] = ids[place - 1];
        }
        best[place] = logits[id];
        ids[place] = id;
    };
    for (i = 0; i < count; ++i) take(i);
    while (count && i < vocab) {
        if (i + LANES <= vocab && !any(load_floats(logits + i) > best[count - 1])) {
            i += LANES;
            continue;
        }
        for (const int64_t end = std::min(vocab, i + LANES); i < end; ++i)
            if (logits[i] > best[count - 1]) take(i);
    }
    for (i = 0; i < count; ++i) best[i] = static_cast<float>(best[i] - norm);
    logprobs[0] = static_cast<float>(logits[token] - norm);
}

// One thread's work space.
class Sampler {
public:
    explicit Sampler(int64_t vocab)
        : vocab_(vocab), padded_((vocab + GROUP - 1) / GROUP * GROUP), weights_(padded_), sums_(BUCKETS),
          ends_(padded_ / GROUP) {
        members_.reserve(padded_);
    }

    // The token of a row of logits, some of which may be minus infinity; -1 where none can be sampled.
    int64_t sample(const float* logits, const SamplingParams& params) {
        const Argmax peak = find_argmax<true>(logits, vocab_);
        if (peak.token < 0) return -1;
        compute_weights(logits, peak.logit, params.temperature);
        float threshold = params.min_p;
        if (0 < params.top_k && params.top_k < vocab_)
            threshold = std::max(threshold, find_threshold<false>(0.0f, static_cast<double>(params.top_k)));
        if (params.top_p < 1.0) threshold = std::max(threshold, find_threshold<true>(threshold, params.top_p));
        return inverse_cdf(threshold, params.number);
    }

private:
    static constexpr int64_t GROUP = 64;
    // Weights from 0 to 1 are counted by exponent and five bits of the mantissa, which have the same order.
    static constexpr int SHIFT = 18;
    static constexpr int BUCKETS = (0x3f800000 >> SHIFT) + 1;

    static uint32_t bits_of(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        return bits;
    }

    // The weight of a token; that of the argmax is 1.
    void compute_weights(const float* logits, float peak, float temperature) {
        const float scale = LOG2_E / temperature;
        int64_t i = 0;
        for (; i + LANES <= vocab_; i += LANES)
            store(&weights_[i], exp2((load_floats(logits + i) - peak) * scale));
        for (; i < vocab_; ++i) weights_[i] = exp2(splat((logits[i] - peak) * scale))[0];
        std::fill_n(&weights_[vocab_], padded_ - vocab_, 0.0f);
    }

    // The least weight among the fewest, heaviest tokens of at least `kept` that together are `target` many, or with
    // MASS, have this share of the probability mass.
    template <bool MASS>
    float find_threshold(float kept, double target) {
        std::fill(sums_.begin(), sums_.end(), 0.0);
        double all = 0.0;
        for (int64_t i = 0; i < padded_; ++i) {
            const float weight = weights_[i];
            if (weight > 0.0f && weight >= kept) {
                sums_[bits_of(weight) >> SHIFT] += MASS ? weight : 1.0;
                all += MASS ? weight : 1.0;
            }
        }
        target = MASS ? target * all : target;
        double before = 0.0;
        int bucket = BUCKETS - 1, lowest = bucket;
        for (; bucket >= 0; --bucket) {
            if (sums_[bucket] > 0.0) lowest = bucket;
            if (before + sums_[bucket] >= target) break;
            before += sums_[bucket];
        }
        if (bucket < 0) bucket = lowest, before = INFINITY;  // not reached, by rounding: all
        members_.clear();
        for (int64_t i = 0; i < padded_; ++i)
            if (weights_[i] >= kept && static_cast<int>(bits_of(weights_[i]) >> SHIFT) == bucket && weights_[i] > 0.0f)
                members_.push_back(weights_[i]);
        if (before == INFINITY) return *std::min_element(members_.begin(), members_.end());
        std::sort(members_.begin(), members_.end(), std::greater<>());
        for (const float weight : members_) {
            before += MASS ? weight : 1.0;
            if (before >= target) return weight;
        }
        return members_.back();
    }

    // The first token, in the vocabulary's order, at which the cumulative weight exceeds the number's share of all.
    int64_t inverse_cdf(float threshold, double number) {
        const auto kept = [&](int64_t i) {
            const Floats x = load_floats(&weights_[i]);
            return select(x >= threshold, x, Floats{});
        };
        double end = 0.0;
        for (int64_t group = 0; group < padded_ / GROUP; ++group) {
            Floats sum = {};
            for (int64_t i = 0; i < GROUP; i += LANES) sum += kept(group * GROUP + i);
            ends_[group] = end += total(sum);
        }
        const double target = number * end;
        // Rounding may put the target at the very end, or beyond the last token of its group: one with weight is sampled.
        const auto found = std::min(std::upper_bound(ends_.begin(), ends_.end(), target),
                                    std::lower_bound(ends_.begin(), ends_.end(), end));
        const int64_t group = found - ends_.begin();
        double reached = group ? ends_[group - 1] : 0.0;
        int64_t last = -1;
        for (int64_t i = group * GROUP; i < (group + 1) * GROUP; ++i) {
            if (!(weights_[i] > 0.0f && weights_[i] >= threshold)) continue;
            last = i;
            reached += weights_[i];
            if (reached > target) break;
        }
        return last;
    }

    const int64_t vocab_, padded_;
    Buffer<float> weights_;
    std::vector<double> sums_, ends_;
    std::vector<float> members_;
};

}  // namespace quire
