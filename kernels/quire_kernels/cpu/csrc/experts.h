// A mixture of experts in place of an MLP: a router scores the experts for each token, the token's row is multiplied by the
// matrices of its best ones alone, and their outputs are added, each times its weight (arXiv:2401.04088).
//
// A token's experts follow from its own row, and what they return is added in the order of their numbers: its bits do not
// depend on the other tokens of the step.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "activations.h"
#include "amx_codes.h"
#include "buffer.h"
#include "linear.h"
#include "simd.h"
#include "thread_pool.h"

namespace quire {

constexpr int64_t MAX_GROUPS = 256;

enum class ExpertScoring : int64_t { SOFTMAX = 0, SIGMOID = 1 };

struct Experts {
    int64_t num_experts, num_chosen;
    int64_t is_normalized;  // whether the weights of a token's experts are divided by their sum
    float scale;            // of the weights
    Activation activation;
    Matrix router;  // an output for each expert; one more, if there is one, is the gate of the shared MLP
    const Matrix* gate_up;  // of each expert, all in one format, with groups of one size and inputs in order: in each panel 16 outputs of the gate, then the same of up
    const Matrix* down;
    Matrix shared_gate_up, shared_down;  // of an MLP for all tokens; without outputs: there is none
    ExpertScoring scoring;
    const float* choice_bias;  // [num_experts], added to weights for the choice alone; or null
    // Groups of neighbouring experts. A token's experts are of the groups with the largest sums of their best weights
    // (arXiv:2405.04434, section 2.2.2). No groups: 0.
    int64_t num_groups, num_chosen_groups, num_summed;
    const float* weight_scales;  // [num_experts], of the weights in the end; or null

    bool has_shared() const { return shared_down.outputs != 0; }
    bool has_shared_gate() const { return router.outputs > num_experts; }
};

// The `count` experts with the largest scores, the best first; of equal scores the lower number first.
inline void choose_experts(const float* scores, int64_t num_experts, int64_t count, int64_t* chosen) {
    for (int64_t expert = 0, num_chosen = 0; expert < num_experts; ++expert) {
        if (num_chosen == count && !(scores[expert] > scores[chosen[count - 1]])) continue;
        int64_t place = num_chosen < count ? num_chosen++ : count - 1;
        for (; place > 0 && scores[expert] > scores[chosen[place - 1]]; --place) chosen[place] = chosen[place - 1];
        chosen[place] = expert;
    }
}

// Replaces a row's scores by exp(score - peak), and returns their sum.
inline float exponentiate(float* scores, int64_t count, float peak) {
    Floats masses = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats mass = exp2((load_floats(scores + i) - peak) * LOG2_E);
        const Floats known = select(LANE < static_cast<int32_t>(std::min<int64_t>(LANES, count - i)), mass, Floats{});
        store(scores + i, known);
        masses += known;
    }
    return total(masses);
}

// Sets all of a row's `ranks` to -inf that are not of its best groups; of equal groups the first one is better.
inline void keep_best_groups(const Experts& experts, float* ranks) {
    const int64_t size = experts.num_experts / experts.num_groups;
    float sums[MAX_GROUPS];
    int64_t best[MAX_GROUPS];
    for (int64_t group = 0; group < experts.num_groups; ++group) {
        choose_experts(ranks + group * size, size, experts.num_summed, best);
        sums[group] = 0.0f;
        for (int64_t i = 0; i < experts.num_summed; ++i) sums[group] += ranks[group * size + best[i]];
    }
    choose_experts(sums, experts.num_groups, experts.num_chosen_groups, best);
    for (int64_t group = 0; group < experts.num_groups; ++group)
        if (std::find(best, best + experts.num_chosen_groups, group) == best + experts.num_chosen_groups)
            std::fill_n(ranks + group * size, size, -INFINITY);
}

// A row's experts, and their weights, by its scores, which are overwritten. `ranks` is scratch memory for as many numbers.
inline void choose_and_weigh(const Experts& experts, float* scores, float* ranks, int64_t* chosen, float* weights) {
    const int64_t count = experts.num_experts;
    float sum = 1.0f;
    if (experts.scoring == ExpertScoring::SOFTMAX && !experts.choice_bias && !experts.num_groups) {
        // Of scores: a softmax keeps their order, but rounds.
        choose_experts(scores, count, experts.num_chosen, chosen);
        sum = exponentiate(scores, count, scores[chosen[0]]);
    } else {
        if (experts.scoring == ExpertScoring::SOFTMAX) {
            sum = exponentiate(scores, count, *std::max_element(scores, scores + count));
        } else {
            for (int64_t i = 0; i < count; ++i) scores[i] = 1.0f / (1.0f + std::exp(-scores[i]));
        }
        for (int64_t i = 0; i < count; ++i) ranks[i] = scores[i] / sum + (experts.choice_bias ? experts.choice_bias[i] : 0.0f);
        if (experts.num_groups) keep_best_groups(experts, ranks);
        choose_experts(ranks, count, experts.num_chosen, chosen);
    }
    if (experts.is_normalized) {
        sum = 0.0f;
        for (int64_t i = 0; i < experts.num_chosen; ++i) sum += scores[chosen[i]];
    }
    for (int64_t i = 0; i < experts.num_chosen; ++i) {
        weights[i] = scores[chosen[i]] / sum * experts.scale;
        if (experts.weight_scales) weights[i] *= experts.weight_scales[chosen[i]];
    }
}

// Computes the experts of one layer after the other. `Product` is VectorFactors or AmxFactors.
template <class Product>
class ExpertMixture {
public:
    using Element = typename Product::Element;

    explicit ExpertMixture(ThreadPool& pool) : pool_(pool) {}

    // To be called for every layer, before `reserve`.
    void include(const Experts& experts) {
        score_stride_ = std::max(score_stride_, round_up(experts.router.outputs, PANEL));
        stride_ = Product::stride(experts.router.inputs);
        act_stride_ = std::max(act_stride_, Product::stride(experts.down[0].inputs));
        if (experts.has_shared()) shared_act_stride_ = std::max(shared_act_stride_, Product::stride(experts.shared_down.inputs));
        num_chosen_ = std::max(num_chosen_, experts.num_chosen);
        num_experts_ = std::max(num_experts_, experts.num_experts);
        for (const Matrix* m : {&experts.router, experts.gate_up, experts.down, &experts.shared_gate_up, &experts.shared_down}) {
            scratch_size_ = std::max(scratch_size_, Product::scratch_size(m->inputs));
            code_row_bytes_ = std::max(code_row_bytes_, code_row_bytes(*m));
        }
    }

    // Of the scratch memory that each thread brings along.
    int64_t scratch_size() const { return scratch_size_; }

    // Memory for steps of so many tokens, of which each row of each expert takes some: none without `include`.
    void reserve(int64_t tokens) {
        const int64_t rows = tokens * num_chosen_;
        scores_.reserve(tokens * score_stride_);
        ranks_.reserve(tokens * score_stride_);
        shared_gates_.reserve(tokens);
        shared_act_.reserve(round_up(tokens, Product::ROWS) * shared_act_stride_);
        chosen_.reserve(rows);
        weights_.reserve(rows);
        tokens_.reserve(rows);
        row_weights_.reserve(rows);
        // Products read whole tiles.
        grouped_.reserve((rows + Product::ROWS) * stride_);
        act_.reserve((rows + Product::ROWS) * act_stride_);
        code_rows_.reserve(std::max(tokens, rows), code_row_bytes_);
        groups_.resize(num_experts_);
        places_.resize(num_experts_);
    }

    // For all threads of the pool: adds the output for `num_tokens` rows `from` to the float32 rows `to`, which begin as zeros
    // with `clears`. The router scores the rows `scored`. Rows are padded to their strides with zeros; `scratch` is this thread's own.
    void add(const Experts& experts, const Element* from, const Element* scored, int64_t num_tokens, float* to, int64_t to_stride,
             bool clears, Element* scratch) {
        multiply(experts.router, scored, num_tokens, stride_, scratch, [&](int64_t token, int64_t panel, Floats left, Floats right) {
            put_outputs(experts.router, panel, left, right, &scores_[token * score_stride_]);
        });
        pool_.parallel_for_ranges(num_tokens, [&](int64_t token) {
            if (clears) std::fill_n(to + token * to_stride, to_stride, 0.0f);
            choose(experts, token);
        });
        pool_.parallel_for(1, [&](int64_t) { group(experts, num_tokens); });
        const int64_t num_rows = num_tokens * experts.num_chosen;
        pool_.parallel_for_ranges(num_rows, [&](int64_t row) {
            const Element* token = from + tokens_[row] * stride_;
            if (experts.gate_up[0].takes_codes())
                code_rows_.set(row, token, experts.gate_up[0]);
            else
                std::copy_n(token, stride_, &grouped_[row * stride_]);
        });
        multiply_gate_up(experts, num_tokens, scratch);
        if (experts.down[0].takes_codes())
            code_rows_.set_all(pool_, num_rows, act_.data(), act_stride_, experts.down[0]);
        add_down(experts, num_tokens, to, to_stride, scratch);
        if (experts.has_shared()) add_shared(experts, from, num_tokens, to, to_stride, scratch);
    }

private:
    using Codes = typename CodesOf<Product>::Type;

    // The rows of an expert, in the order of experts: a row is a token with one of its experts.
    struct Group {
        int64_t expert, first, last;
    };

    void choose(const Experts& experts, int64_t token) {
        float* scores = &scores_[token * score_stride_];
        int64_t* chosen = &chosen_[token * experts.num_chosen];
        if (experts.has_shared_gate()) shared_gates_[token] = 1.0f / (1.0f + std::exp(-scores[experts.num_experts]));
        choose_and_weigh(experts, scores, &ranks_[token * score_stride_], chosen, &weights_[token * experts.num_chosen]);
    }

    void group(const Experts& experts, int64_t num_tokens) {
        const int64_t num_rows = num_tokens * experts.num_chosen;
        std::fill(places_.begin(), places_.end(), 0);
        for (int64_t i = 0; i < num_rows; ++i) ++places_[chosen_[i]];
        int64_t num_groups = 0, first = 0;
        for (int64_t expert = 0; expert < experts.num_experts; ++expert) {
            const int64_t count = places_[expert];
            if (count) groups_[num_groups++] = {expert, first, first + count};
            places_[expert] = first;
            first += count;
        }
        std::fill(groups_.begin() + num_groups, groups_.end(), Group{});
        for (int64_t i = 0; i < num_rows; ++i) {
            const int64_t row = places_[chosen_[i]]++;
            tokens_[row] = i / experts.num_chosen;
            row_weights_[row] = weights_[i];
        }
    }

    // How many groups there may be. Numbers of tasks follow from it, so that they do not depend on what a late thread reads
    // after the plan of the next layer has been made.
    static int64_t most_groups(const Experts& experts, int64_t num_tokens) {
        return std::min(experts.num_experts, num_tokens * experts.num_chosen);
    }

    // A group as it is now, of the layer's experts in any case.
    Group group_at(const Experts& experts, int64_t number) const {
        Group group = groups_[number];
        group.expert = std::min(group.expert, experts.num_experts - 1);
        return group;
    }

    // In how many ranges of panels a matrix is multiplied: about `wanted`, and more where a range would not fit the cache.
    int64_t num_ranges(const Matrix& matrix, int64_t wanted) const {
        const int64_t num_panels = ceil_div(matrix.outputs, PANEL);
        const int64_t panel_bytes = expanded_size(matrix.inputs) * sizeof(Element);
        const int64_t most = std::max<int64_t>(1, TaskGrid::TASK_BYTES / panel_bytes);
        return ceil_div(num_panels, std::clamp<int64_t>(num_panels / wanted, 1, most));
    }

    static Piece piece_of(const Matrix& matrix, int64_t range, int64_t num_ranges, int64_t num_rows) {
        const int64_t num_panels = ceil_div(matrix.outputs, PANEL);
        return {TaskGrid::begin(range, num_panels, num_ranges), TaskGrid::begin(range + 1, num_panels, num_ranges), 0, num_rows,
                matrix.takes_codes() ? Codes::tile_rows(matrix, num_rows) : Product::tile_rows(matrix, num_rows)};
    }

    // What a thread probably multiplies after a piece: a range of the panels of a group's expert.
    static void set_next(Piece& piece, const Matrix& matrix, const Group& group, int64_t range, int64_t num_ranges) {
        if (group.first >= group.last) return;
        const int64_t num_panels = ceil_div(matrix.outputs, PANEL);
        const int64_t bytes = matrix.takes_codes() ? panel_bytes<Code>(matrix) : panel_bytes<Element>(matrix);
        const char* panels = static_cast<const char*>(matrix.panels);
        piece.next = panels + TaskGrid::begin(range, num_panels, num_ranges) * bytes;
        piece.next_end = panels + TaskGrid::begin(range + 1, num_panels, num_ranges) * bytes;
    }

    // As multiply_piece() of linear.h, of `rows` or, where the matrix takes them, of their codes, from the row `first` on.
    template <class F>
    bool multiply_piece(const Matrix& matrix, const Piece& piece, int64_t units, const Buffer<Element>& rows, int64_t stride,
                        int64_t first, Element* scratch, TaskClaim& task_claim, F&& finish) {
        if (matrix.takes_codes())
            return Codes::multiply_piece(matrix, piece, units, code_rows_.row(first), code_rows_.stride(), task_claim, finish);
        return Product::multiply_piece(matrix, piece, units, {&rows[first * stride], stride}, scratch, task_claim, finish);
    }

    // Each piece is of one expert: at one token all threads share the products of its experts.
    void multiply_gate_up(const Experts& experts, int64_t num_tokens, Element* scratch) {
        const int64_t num_groups = most_groups(experts, num_tokens);
        const int64_t wanted = ceil_div(TaskGrid::TASKS_PER_THREAD * pool_.size(), std::max<int64_t>(1, num_groups));
        const int64_t ranges = num_ranges(experts.gate_up[0], wanted);
        pool_.parallel_for_tasks(num_groups * ranges, [&](int64_t i, TaskClaim& task_claim) {
            const Group group = group_at(experts, i / ranges);
            if (group.first >= group.last) return;
            const Matrix& matrix = experts.gate_up[group.expert];
            Piece piece = piece_of(matrix, i % ranges, ranges, group.last - group.first);
            if (const int64_t next = i + pool_.size(); next < num_groups * ranges) {
                const Group following = group_at(experts, next / ranges);
                set_next(piece, experts.gate_up[following.expert], following, next % ranges, ranges);
            }
            multiply_piece(matrix, piece, task_claim.next(), grouped_, stride_, group.first, scratch, task_claim,
                           [&](int64_t row, int64_t panel, Floats gate, Floats up) {
                               Product::put(&act_[(group.first + row) * act_stride_], panel * LANES,
                                            gated(experts.activation, gate, up));
                           });
        });
    }

    // Each piece is a range of outputs of all experts: what they return for a token is added by one thread, in their order.
    void add_down(const Experts& experts, int64_t num_tokens, float* to, int64_t to_stride, Element* scratch) {
        const int64_t num_groups = most_groups(experts, num_tokens);
        const int64_t ranges = num_ranges(experts.down[0], TaskGrid::TASKS_PER_THREAD * pool_.size());
        pool_.parallel_for_tasks(num_tokens ? ranges : 0, [&](int64_t range, TaskClaim& task_claim) {
            int64_t units = task_claim.next();  // to be skipped
            for (int64_t i = 0; i < num_groups; ++i) {
                const Group group = group_at(experts, i);
                const Matrix& matrix = experts.down[group.expert];
                Piece piece = piece_of(matrix, range, ranges, group.last - group.first);
                if (i + 1 < num_groups) {
                    const Group following = group_at(experts, i + 1);
                    set_next(piece, experts.down[following.expert], following, range, ranges);
                }
                const int64_t num_units = matrix.takes_codes() ? piece.num_units() : Product::num_units(matrix, piece);
                if (units >= num_units) {
                    units -= num_units;
                    continue;
                }
                const bool is_owned = multiply_piece(
                    matrix, piece, units, act_, act_stride_, group.first, scratch, task_claim,
                    [&](int64_t row, int64_t panel, Floats left, Floats right) {
                        const float weight = row_weights_[group.first + row];
                        add_to(to + tokens_[group.first + row] * to_stride + panel * PANEL, weight, left, right);
                    });
                if (!is_owned) return;
                units = 0;
            }
        });
    }

    template <class F>
    void multiply(const Matrix& matrix, const Element* rows, int64_t num_rows, int64_t stride, Element* scratch, F&& finish) {
        if (matrix.takes_codes())
            multiply_in_codes<Product>(pool_, matrix, code_rows_, rows, num_rows, stride, finish);
        else
            Product::multiply(pool_, matrix, {rows, stride}, num_rows, scratch, finish);
    }

    void add_shared(const Experts& experts, const Element* from, int64_t num_tokens, float* to, int64_t to_stride, Element* scratch) {
        multiply(experts.shared_gate_up, from, num_tokens, stride_, scratch,
                 [&](int64_t token, int64_t panel, Floats gate, Floats up) {
                     Product::put(&shared_act_[token * shared_act_stride_], panel * LANES,
                                  gated(experts.activation, gate, up));
                 });
        multiply(experts.shared_down, shared_act_.data(), num_tokens, shared_act_stride_, scratch,
                 [&](int64_t token, int64_t panel, Floats left, Floats right) {
                     const float weight = experts.has_shared_gate() ? shared_gates_[token] : 1.0f;
                     add_to(to + token * to_stride + panel * PANEL, weight, left, right);
                 });
    }

    static void add_to(float* to, float weight, Floats left, Floats right) {
        store(to, load_floats(to) + weight * left);
        store(to + LANES, load_floats(to + LANES) + weight * right);
    }

    ThreadPool& pool_;
    int64_t score_stride_ = 0, stride_ = 0, act_stride_ = 0, shared_act_stride_ = 0;
    int64_t num_chosen_ = 0, num_experts_ = 0, scratch_size_ = 0;
    std::vector<Group> groups_;
    std::vector<int64_t> places_;  // of each expert: where its next row goes
    Buffer<int64_t> chosen_, tokens_;  // by token; the token of each row, by expert
    Buffer<float> scores_, ranks_, weights_, row_weights_, shared_gates_;
    Buffer<Element> grouped_, act_, shared_act_;
    CodeRows code_rows_;
    int64_t code_row_bytes_ = 0;  // the most of a matrix that takes codes
};

}  // namespace quire
