// The attention of encoders: every token sees all tokens of its prompt, and no others. A prompt's bits do not depend on the
// rest of the step.
#pragma once

#include <memory>
#include <vector>

#include "amx.h"
#include "attention.h"
#include "buffer.h"
#include "linear.h"
#include "simd.h"
#include "thread_pool.h"

namespace quire {

// The tokens of a step: those of prompt i are starts[i] to starts[i + 1] - 1.
class PromptLayout {
public:
    void place(int64_t num_prompts, const int32_t* starts) {
        starts_ = starts;
        lengths_.resize(num_prompts);
        prompts_.resize(starts[num_prompts]);
        for (int64_t i = 0; i < num_prompts; ++i) {
            lengths_[i] = starts[i + 1] - starts[i];
            std::fill(prompts_.begin() + starts[i], prompts_.begin() + starts[i + 1], i);
        }
    }

    int64_t num_prompts() const { return static_cast<int64_t>(lengths_.size()); }
    int64_t num_tokens() const { return static_cast<int64_t>(prompts_.size()); }
    const int32_t* starts() const { return starts_; }
    const int32_t* lengths() const { return lengths_.data(); }
    int64_t prompt(int64_t token) const { return prompts_[token]; }
    int64_t position(int64_t token) const { return token - starts_[prompts_[token]]; }

private:
    const int32_t* starts_ = nullptr;
    std::vector<int32_t> lengths_;
    std::vector<int64_t> prompts_;
};

enum class Projection : int64_t { QUERY = 0, KEY = 1, VALUE = 2 };

// By vectors, as decoders attend: keys and values are in blocks of LANES tokens.
template <class T>
class VectorAttention {
public:
    VectorAttention(int64_t num_heads, int64_t head_dim, int threads, const DistanceScores& distances)
        : heads_(num_heads), dim_(head_dim), threads_(threads) {
        for (int i = 0; i < threads; ++i) {
            attentions_.push_back(std::make_unique<TileAttention<T>>(1, head_dim));
            attentions_.back()->add_by_distance(distances);
        }
    }

    void place(const PromptLayout& layout) {
        layout_ = &layout;
        const int64_t prompts = layout.num_prompts();
        first_blocks_.resize(prompts);
        int64_t blocks = 0;
        max_blocks_ = 0;
        for (int64_t i = 0; i < prompts; ++i) {
            first_blocks_[i] = blocks;
            blocks += ceil_div(layout.lengths()[i], BLOCK);
            max_blocks_ = std::max(max_blocks_, ceil_div(layout.lengths()[i], BLOCK));
        }
        tables_.resize(prompts * max_blocks_);
        for (int64_t i = 0; i < prompts; ++i)
            for (int64_t block = 0; block < max_blocks_; ++block) {
                const int64_t last = (layout.lengths()[i] - 1) / BLOCK;
                tables_[i * max_blocks_ + block] = static_cast<int32_t>(first_blocks_[i] + std::min(block, last));
            }
        query_.reserve(layout.num_tokens() * heads_ * dim_);
        cache_.reserve(blocks * 2 * BLOCK * heads_ * dim_);
        tiles_ = split_into_tiles(sequences(), heads_, 1, threads_);
    }

    // LANES numbers of a token, from `number` of its heads * head_dim on.
    void store(int64_t token, Projection projection, int64_t number, Floats values) {
        constexpr int V = Lane<T>::VALUES;
        if (projection == Projection::QUERY) return store_floats(&query_[token * heads_ * dim_ + number], values);
        const int64_t position = layout_->position(token), offset = position % BLOCK;
        const int64_t block = first_blocks_[layout_->prompt(token)] + position / BLOCK;
        const int64_t head = number / dim_, d = number % dim_;
        T part[LANES];
        store_floats(part, values);
        if (projection == Projection::KEY) {
            put_key<V>(cache().template keys<T>(block, head) + d * BLOCK + offset * V, part, LANES, BLOCK);
        } else {
            put_value<V>(cache().template values<T>(block, head) + offset / V * V * dim_ + d * V + offset % V, part, LANES);
        }
    }

    // For all threads of the pool: calls put(token, number, values) for each vector of the output.
    template <class F>
    void attend(ThreadPool& pool, int thread, F&& put) {
        const AttentionRule rule{1.0f / std::sqrt(static_cast<float>(dim_)), 0.0f, 0, 1, nullptr};
        quire::attend(pool, *attentions_[thread], cache(), sequences(), tiles_, rule, query_.data(), put);
    }

private:
    static constexpr int64_t BLOCK = LANES;

    Sequences sequences() const {
        return {layout_->num_prompts(), max_blocks_, tables_.data(), layout_->starts(), layout_->lengths()};
    }
    Cache cache() const {
        const int64_t half = BLOCK * heads_ * dim_, bytes = 2 * half * sizeof(T);
        return {reinterpret_cast<char*>(cache_.data()), bytes, half, heads_, BLOCK, dim_, nullptr};
    }

    const int64_t heads_, dim_;
    const int threads_;
    std::vector<std::unique_ptr<TileAttention<T>>> attentions_;
    const PromptLayout* layout_ = nullptr;
    std::vector<int64_t> first_blocks_;
    std::vector<int32_t> tables_;
    int64_t max_blocks_ = 0;
    std::vector<Tile> tiles_;
    Buffer<T> query_, cache_;
};

#ifdef QUIRE_AMX

// By tile registers: of each prompt and head, keys are the panels of a matrix [keys, head_dim], and values those of a matrix
// [head_dim, keys]. 32 queries at a time, all their scores at once.
template <int PARTS>
class AmxAttention {
public:
    // Scores by distances are not computed: `distances` are null.
    AmxAttention(int64_t num_heads, int64_t head_dim, int threads, [[maybe_unused]] const DistanceScores& distances)
        : heads_(num_heads), dim_(head_dim), padded_dim_(round_up(head_dim, PANEL)), pool_size_(threads) {
        for (int i = 0; i < threads; ++i) threads_.push_back(std::make_unique<Thread>());
    }

    void place(const PromptLayout& layout) {
        layout_ = &layout;
        first_keys_.resize(layout.num_prompts());
        tasks_.clear();
        int64_t keys = 0, longest = 0;
        // Enough tasks for all threads, and each of some hundred keys.
        const int64_t most = std::max<int64_t>(1, layout.num_prompts() * heads_ / (4 * pool_size_));
        for (int64_t i = 0; i < layout.num_prompts(); ++i) {
            first_keys_[i] = keys;
            const int64_t length = layout.lengths()[i], padded = round_up(length, PANEL);
            const int64_t heads = std::clamp<int64_t>(KEYS_PER_TASK / padded, 1, std::min(most, heads_));
            for (int64_t query = 0; query < length; query += Factors::ROWS)
                for (int64_t head = 0; head < heads_; head += heads)
                    tasks_.push_back({i, query, std::min(length, query + Factors::ROWS), head, std::min(heads_, head + heads)});
            keys += padded;
            longest = std::max(longest, padded);
        }
        query_.reserve((layout.num_tokens() + Factors::ROWS) * query_stride());
        keys_.reserve(keys * query_stride());
        values_.reserve(keys * heads_ * padded_dim_ * PARTS);
        // Values beyond a prompt's end, whose weights are 0, must not be NaN.
        for (int64_t i = 0; i < layout.num_prompts(); ++i)
            for (int64_t head = 0; head < heads_; ++head)
                for (int64_t d = 0; d < dim_; d += PANEL) {
                    const int64_t rest = padded_keys(i) - PANEL;
                    std::fill_n(values_of(i, head, d) + rest * PANEL * PARTS, PANEL * PANEL * PARTS, BFloat16{});
                }
        for (auto& own : threads_) {
            own->scores.reserve(Factors::ROWS * longest);
            own->weights.reserve(Factors::ROWS * Factors::width(longest));
            own->outputs.reserve(Factors::ROWS * padded_dim_);
        }
    }

    // As VectorAttention.
    void store(int64_t token, Projection projection, int64_t number, Floats values) {
        const int64_t head = number / dim_, d = number % dim_;
        if (projection == Projection::QUERY) return Factors::put(query_of(token, head), d, values);
        const int64_t prompt = layout_->prompt(token), key = layout_->position(token);
        const int64_t block = key / PANEL, place = key % PANEL;
        for (int part = 0; part < PARTS; ++part) {
            const Halves rounded = round_to_bfloat16(values);
            BFloat16 factors[LANES];
            quire::store(factors, rounded);
            values -= floats_of(rounded);
            if (projection == Projection::KEY) {
                BFloat16* to = keys_of(prompt, head) + block * PANEL * Factors::width(dim_) +
                               (d / PANEL * PARTS + part) * PANEL * PANEL + d % PANEL * PANEL + place * 2;
                for (int i = 0; i < LANES; i += 2) std::copy_n(factors + i, 2, to + i * PANEL);
            } else {
                BFloat16* to = values_of(prompt, head, d) + (block * PARTS + part) * PANEL * PANEL + place / 2 * 2 * PANEL +
                               d % PANEL * 2 + place % 2;
                for (int i = 0; i < LANES; ++i) to[i * 2] = factors[i];
            }
        }
    }

    template <class F>
    void attend(ThreadPool& pool, int thread, F&& put) {
        Thread& own = *threads_[thread];
        pool.parallel_for_tasks(static_cast<int64_t>(tasks_.size()), [&](int64_t i, TaskClaim& task_claim) {
            const Task& task = tasks_[i];
            const int64_t first = layout_->starts()[task.prompt] + task.first, count = task.last - task.first;
            for (int64_t head = task.first_head + task_claim.next(); head < task.last_head; ++head) {
                compute(task.prompt, head, first, count, own);
                const bool is_owned = task_claim.write([&] {
                    for (int64_t row = 0; row < count; ++row)
                        for (int64_t d = 0; d < dim_; d += LANES)
                            put(first + row, head * dim_ + d, load_floats(&own.outputs[row * padded_dim_ + d]) / own.sums[row]);
                });
                if (!is_owned) return;
            }
        });
    }

private:
    using Factors = AmxFactors<PARTS>;
    static constexpr int64_t KEYS_PER_TASK = 256;

    // Queries first to last - 1 of a prompt, for some heads.
    struct Task {
        int64_t prompt, first, last, first_head, last_head;
    };

    struct Thread {
        Buffer<float> scores;      // [ROWS, padded keys]
        Buffer<BFloat16> weights;  // [ROWS, width of the padded keys]
        Buffer<float> outputs;     // [ROWS, padded_dim], to be divided by the sums
        float sums[Factors::ROWS];
    };

    int64_t query_stride() const { return heads_ * Factors::width(dim_); }
    int64_t padded_keys(int64_t prompt) const { return round_up(layout_->lengths()[prompt], PANEL); }
    BFloat16* query_of(int64_t token, int64_t head) const { return &query_[token * query_stride() + head * Factors::width(dim_)]; }
    BFloat16* keys_of(int64_t prompt, int64_t head) const {
        return &keys_[(first_keys_[prompt] * heads_ + head * padded_keys(prompt)) * Factors::width(dim_)];
    }
    BFloat16* values_of(int64_t prompt, int64_t head, int64_t d) const {
        const int64_t before = (first_keys_[prompt] * heads_ + head * padded_keys(prompt)) * padded_dim_;
        return &values_[(before + d / PANEL * PANEL * padded_keys(prompt)) * PARTS];
    }

    void compute(int64_t prompt, int64_t head, int64_t token, int64_t count, Thread& own) const {
        const int64_t length = layout_->lengths()[prompt], padded = padded_keys(prompt), width = Factors::width(padded);
        const int64_t depth = Factors::width(dim_);
        PrefetchStream no_ahead;
        for (int64_t key = 0; key < padded; key += PANEL)
            Factors::template multiply_panel<Factors::Kept::ROWS>({query_of(token, head), query_stride()}, keys_of(prompt, head) + key * depth,
                                                                  depth, count, &own.scores[key], padded, no_ahead);
        const float factor = LOG2_E / std::sqrt(static_cast<float>(dim_));
        for (int64_t row = 0; row < count; ++row)
            own.sums[row] = weigh(&own.scores[row * padded], length, factor, &own.weights[row * width]);
        for (int64_t d = 0; d < dim_; d += PANEL)
            Factors::template multiply_panel<Factors::Kept::ROWS>({own.weights.data(), width}, values_of(prompt, head, d), width, count,
                                                                  &own.outputs[d], padded_dim_, no_ahead);
    }

    // Weights of scores, 0 beyond the last one, without their division by the sum that is returned.
    static float weigh(const float* scores, int64_t length, float factor, BFloat16* weights) {
        const Floats hidden = splat(-INFINITY);
        const auto load = [&](int64_t i) {
            const Floats x = load_floats(scores + i);
            return i + LANES <= length ? x : select(LANE < static_cast<int32_t>(length - i), x, hidden);
        };
        Floats top = hidden, sum = {};
        for (int64_t i = 0; i < length; i += LANES) {
            const Floats x = load(i);
            top = select(x > top, x, top);
        }
        const Floats base = splat(largest(top) * factor);
        int64_t i = 0;
        for (; i < length; i += LANES) {
            const Floats weight = exp2(load(i) * factor - base);
            sum += weight;
            Factors::put(weights, i, weight);
        }
        for (; i < round_up(length, PANEL); i += LANES) Factors::put(weights, i, Floats{});
        return total(sum);
    }

    const int64_t heads_, dim_, padded_dim_;
    const int pool_size_;
    std::vector<std::unique_ptr<Thread>> threads_;
    const PromptLayout* layout_ = nullptr;
    std::vector<int64_t> first_keys_;  // of each prompt, in keys that are padded to panels
    std::vector<Task> tasks_;
    Buffer<BFloat16> query_, keys_, values_;
};

#endif

}  // namespace quire
