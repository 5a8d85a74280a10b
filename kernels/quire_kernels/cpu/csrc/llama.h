// The Llama family's forward pass over a step: all layers in one call, with tiles of each phase handed out to threads.
//
// Hidden states between layers, rotation, scores and sums are float32; factors of products are T.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "linear.h"
#include "sample.h"
#include "simd.h"
#include "thread_pool.h"

namespace quire {

struct Layer {
    const float* attention_norm;  // [hidden]
    const float* query_norm;      // [head_dim], or null
    const float* key_norm;        // [head_dim], or null
    const float* mlp_norm;        // [hidden]
    Matrix qkv;                   // queries, keys, values
    Matrix output;
    Matrix gate_up;  // in each panel 16 outputs of the gate, and the same of up
    Matrix down;
    AttentionRule rule;
};

struct Model {
    int64_t hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim;
    float norm_epsilon;
    const Layer* layers;
    const float* norm;
    Matrix head;
    const void* embedding;  // [vocab, hidden]
    void* cache;            // [num_blocks, num_layers, 2, num_kv_heads, block_size * head_dim]
    int64_t block_size;
    const float* frequencies;  // [head_dim / 2], radians per position
    float rotation_factor;     // factor of the rotation
};

struct Step {
    int64_t num_tokens;
    const int64_t* token_ids;
    const int64_t* slots;  // -1: not stored
    const int64_t* positions;
    Sequences sequences;
    int64_t num_samples;
    const int64_t* logits_indices;
    float* logits;  // [num_draws, logits_stride]
    int64_t logits_stride;
    int64_t* argmax;  // [num_draws], of each row of logits, see `Argmax`
};

// Root mean square norm, times the weight (arXiv:1910.07467).
template <class T>
inline void normalize(const float* from, const float* weight, float epsilon, int64_t size, T* to) {
    Floats squares = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Floats x = load_floats(from + i);
        squares = multiply_add(x, x, squares);
    }
    float sum = total(squares);
    for (; i < size; ++i) sum += from[i] * from[i];
    const float factor = 1.0f / std::sqrt(sum / static_cast<float>(size) + epsilon);
    for (i = 0; i + LANES <= size; i += LANES)
        store_floats(to + i, load_floats(from + i) * factor * load_floats(weight + i));
    for (; i < size; ++i) convert(from[i] * factor * weight[i], to + i);
}

// Rotary positions (arXiv:2104.09864), halves of a head rotated against each other, in place.
inline void rotate(float* head, const float* cosine, const float* sine, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float left = head[i], right = head[i + half];
        head[i] = left * cosine[i] - right * sine[i];
        head[i + half] = right * cosine[i] + left * sine[i];
    }
}

inline void put(float* to, Floats sums, int64_t count) {
    if (count >= LANES) return store(to, sums);
    for (int64_t i = 0; i < count; ++i) to[i] = sums[i];
}

template <class T>
class Llama {
public:
    Llama(const Model& model, ThreadPool& pool) : model_(model), pool_(pool), layers_(model.layers, model.layers + model.num_layers) {
        int64_t panel = 0;
        const auto widen = [&](const Matrix& m) { panel = std::max(panel, panel_steps<T>(m) * Lane<T>::VALUES * PANEL); };
        for (const Layer& layer : layers_)
            for (const Matrix* m : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) widen(*m);
        widen(model.head);
        for (int i = 0; i < pool.size(); ++i)
            threads_.push_back(std::make_unique<Thread>(group(), model.head_dim, panel));
    }

    void run(const Step& step) {
        reserve(step.num_tokens);
        tiles_ = split_into_tiles(step.sequences, model_.num_kv_heads, group(), pool_.size());
        pool_.run([&](int thread) { run(step, *threads_[thread]); });
    }

private:
    struct Thread {
        Thread(int64_t group, int64_t head_dim, int64_t panel) : attention(group, head_dim), panel(panel), heads(2 * head_dim) {}
        TileAttention<T> attention;
        Buffer<T> panel;
        Buffer<T> heads;
    };

    int64_t group() const { return model_.num_heads / model_.num_kv_heads; }

    int64_t half() const { return model_.head_dim / 2; }

    // Rows are padded to whole pairs and vectors.
    void reserve(int64_t tokens) {
        hidden_stride_ = round_up(model_.hidden_size, PANEL);
        qkv_stride_ = round_up(layers_[0].qkv.outputs, PANEL);
        attended_stride_ = model_.num_heads * model_.head_dim;
        act_stride_ = round_up(model_.intermediate_size, PANEL);
        hidden_.reserve(tokens * hidden_stride_);
        normed_.reserve(tokens * hidden_stride_);
        qkv_.reserve(tokens * qkv_stride_);
        query_.reserve(tokens * attended_stride_);
        attended_.reserve(tokens * attended_stride_);
        act_.reserve(tokens * act_stride_);
        cosines_.reserve(tokens * half());
        sines_.reserve(tokens * half());
    }

    void run(const Step& step, Thread& own) {
        embed(step);
        int64_t rows = step.num_tokens;
        for (int64_t i = 0; i < model_.num_layers; ++i) {
            const Layer& layer = layers_[i];
            norm(layer.attention_norm, rows);
            multiply(pool_, layer.qkv, normed_.data(), rows, hidden_stride_, own.panel.data(),
                     [&](int64_t row, int64_t panel, Floats left, Floats right) {
                         float* to = &qkv_[row * qkv_stride_ + panel * PANEL];
                         store(to, left);
                         store(to + LANES, right);
                     });
            const Cache<T> cache = layer_cache(i);
            rotate_and_store(step, layer, cache, own);
            attend(pool_, own.attention, cache, step.sequences, tiles_, layer.rule, query_.data(),
                   put_in(attended_.data(), attended_stride_));
            if (i == model_.num_layers - 1) {
                // Beyond the last layer's keys and values, only tokens whose successor is sampled matter.
                if (!step.num_samples) return;
                rows = keep_sampled_rows(step);
            }
            add(layer.output, attended_.data(), rows, attended_stride_, own);
            norm(layer.mlp_norm, rows);
            multiply(pool_, layer.gate_up, normed_.data(), rows, hidden_stride_, own.panel.data(),
                     [&](int64_t row, int64_t panel, Floats gate, Floats up) {
                         store_floats(&act_[row * act_stride_ + panel * LANES], silu(gate) * up);
                     });
            add(layer.down, act_.data(), rows, act_stride_, own);
        }
        norm(model_.norm, rows);
        multiply(pool_, model_.head, normed_.data(), rows, hidden_stride_, own.panel.data(),
                 [&](int64_t row, int64_t panel, Floats left, Floats right) {
                     const int64_t output = panel * PANEL;
                     float* to = step.logits + row * step.logits_stride + output;
                     put(to, left, model_.head.outputs - output);
                     put(to + LANES, right, model_.head.outputs - output - LANES);
                 });
        // While they are in the caches and all threads awake: most requests need nothing else.
        pool_.parallel_for(rows, [&](int64_t row) {
            step.argmax[row] = find_argmax<false>(step.logits + row * step.logits_stride, model_.head.outputs).token;
        });
    }

    Cache<T> layer_cache(int64_t layer) const {
        const int64_t half = model_.num_kv_heads * model_.block_size * model_.head_dim;
        return {static_cast<T*>(model_.cache) + layer * 2 * half, model_.num_layers * 2 * half, half,
                model_.num_kv_heads, model_.block_size, model_.head_dim};
    }

    // Embeddings, and the angles of their positions.
    void embed(const Step& step) {
        const T* embedding = static_cast<const T*>(model_.embedding);
        pool_.parallel_for_ranges(step.num_tokens, [&](int64_t token) {
            const T* from = embedding + step.token_ids[token] * model_.hidden_size;
            float* to = &hidden_[token * hidden_stride_];
            for (int64_t i = 0; i < model_.hidden_size; ++i) to[i] = as_float(from[i]);
            for (int64_t i = 0; i < half(); ++i) {
                // One by one, by the C library: vector code could compute the last ones differently.
                const float angle = static_cast<float>(step.positions[token]) * model_.frequencies[i];
                cosines_[token * half() + i] = std::cos(angle) * model_.rotation_factor;
                sines_[token * half() + i] = std::sin(angle) * model_.rotation_factor;
            }
        });
    }

    void norm(const float* weight, int64_t rows) {
        pool_.parallel_for_ranges(rows, [&](int64_t row) {
            normalize(&hidden_[row * hidden_stride_], weight, model_.norm_epsilon, model_.hidden_size,
                      &normed_[row * hidden_stride_]);
        });
    }

    void add(const Matrix& matrix, const T* from, int64_t rows, int64_t stride, Thread& own) {
        multiply(pool_, matrix, from, rows, stride, own.panel.data(),
                 [&](int64_t row, int64_t panel, Floats left, Floats right) {
                     float* to = &hidden_[row * hidden_stride_ + panel * PANEL];
                     store(to, load_floats(to) + left);
                     store(to + LANES, load_floats(to + LANES) + right);
                 });
    }

    // Rotates queries and keys, and stores keys and values.
    void rotate_and_store(const Step& step, const Layer& layer, const Cache<T>& cache, Thread& own) {
        const int64_t dim = model_.head_dim;
        pool_.parallel_for_ranges(step.num_tokens, [&](int64_t token) {
            float* from = &qkv_[token * qkv_stride_];
            T* query = &query_[token * attended_stride_];
            const float* cosine = &cosines_[token * half()];
            const float* sine = &sines_[token * half()];
            const int64_t num_turned = model_.num_heads + model_.num_kv_heads;
            for (int64_t head = 0; head < num_turned; ++head) {
                const float* weight = head < model_.num_heads ? layer.query_norm : layer.key_norm;
                if (weight) normalize(from + head * dim, weight, model_.norm_epsilon, dim, from + head * dim);
                rotate(from + head * dim, cosine, sine, half());
            }
            for (int64_t i = 0; i < model_.num_heads * dim; i += LANES) store_floats(query + i, load_floats(from + i));
            if (step.slots[token] < 0) return;
            T* key = own.heads.data();
            T* value = key + dim;
            for (int64_t head = 0; head < model_.num_kv_heads; ++head) {
                for (int64_t i = 0; i < dim; i += LANES) {
                    store_floats(key + i, load_floats(from + (model_.num_heads + head) * dim + i));
                    store_floats(value + i, load_floats(from + (num_turned + head) * dim + i));
                }
                store_token(cache, step.slots[token], head, key, value);
            }
        });
    }

    // Moves the rows after which a token is sampled to the front, and returns their number.
    int64_t keep_sampled_rows(const Step& step) {
        // Row numbers ascend, so no row is overwritten before it is moved; one thread does it, since rows may overlap.
        pool_.parallel_for(1, [&](int64_t) {
            for (int64_t i = 0; i < step.num_samples; ++i) {
                const int64_t row = step.logits_indices[i];
                if (row == i) continue;
                std::copy_n(&hidden_[row * hidden_stride_], hidden_stride_, &hidden_[i * hidden_stride_]);
                std::copy_n(&attended_[row * attended_stride_], attended_stride_, &attended_[i * attended_stride_]);
            }
        });
        return step.num_samples;
    }

    const Model model_;
    ThreadPool& pool_;
    std::vector<Layer> layers_;
    std::vector<std::unique_ptr<Thread>> threads_;
    std::vector<Tile> tiles_;
    int64_t hidden_stride_ = 0, qkv_stride_ = 0, attended_stride_ = 0, act_stride_ = 0;
    Buffer<float> hidden_, qkv_, cosines_, sines_;
    Buffer<T> normed_, query_, attended_, act_;
};

}  // namespace quire
