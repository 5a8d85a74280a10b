// The forward pass of an encoder of BERT's form over the prompts of a step: all layers in one call, without padding.
//
// Hidden states between layers, scores and sums are float32. Every token sees all tokens of its prompt, and no others: a
// prompt's bits do not depend on the rest of the step. Matrices may have any format: see matrix.h.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "activations.h"
#include "amx.h"
#include "amx_codes.h"
#include "buffer.h"
#include "encoder_attention.h"
#include "linear.h"
#include "norms.h"
#include "simd.h"
#include "thread_pool.h"

namespace quire {

struct EncoderLayer {
    Matrix qkv;  // queries, keys, values; with rotary positions, each panel has 16 outputs of the first half of a head, then the same of
                 // the second
    Matrix output;
    Norm attention_norm;
    Matrix gate_up;  // with a gate, each panel has 16 of its outputs, then the same of up
    Matrix down;
    Norm mlp_norm;
};

struct EncoderModel {
    int64_t hidden_size, intermediate_size, num_layers, num_heads;
    Activation activation;
    int64_t is_gated;        // whether MLPs are
    const void* words;       // [vocab, hidden]
    const float* positions;  // [context, hidden]; null: there are none
    const float* types;      // [types, hidden]
    const float* cosines;    // [context, hidden / num_heads / 2] of rotary positions; null: there are none
    const float* sines;      // as cosines
    Norm norm;          // of the sum of embeddings
    DistanceScores distances;  // of all layers; by vectors only
    const EncoderLayer* layers;
};

struct EncoderStep {
    int64_t num_prompts;
    const int64_t* token_ids;      // [tokens]
    const int32_t* starts;         // [prompts + 1], ascending: no prompt is empty
    const int64_t* num_first;      // [prompts], tokens of the first type, before those of the second; null: all
    int64_t num_rows;
    const int64_t* rows;           // [num_rows], ascending: the tokens whose last hidden states are wanted
    float* output;                 // [num_rows, hidden], these
};

// Products of factors T; as AmxProducts.
template <class T>
struct VectorProducts : VectorFactors<T> {
    using Factors = VectorFactors<T>;
    using Attention = VectorAttention<T>;
};

#ifdef QUIRE_AMX
template <int PARTS>
struct AmxProducts : AmxFactors<PARTS> {
    using Factors = AmxFactors<PARTS>;
    using Attention = AmxAttention<PARTS>;
};
#endif

class AnyEncoder {
public:
    virtual ~AnyEncoder() = default;
    virtual void run(const EncoderStep& step) = 0;
};

// Sizes of hidden states and heads are multiples of LANES.
template <class Product>
class Encoder : public AnyEncoder {
public:
    Encoder(const EncoderModel& model, ThreadPool& pool)
        : model_(model), pool_(pool), layers_(model.layers, model.layers + model.num_layers),
          attention_(model.num_heads, model.hidden_size / model.num_heads, pool.size(), model.distances) {
        const int64_t scratch = Product::scratch_size(std::max(model.hidden_size, model.intermediate_size));
        for (const EncoderLayer& layer : layers_)
            for (const Matrix* m : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) include(*m);
        for (int i = 0; i < pool.size(); ++i) scratches_.push_back(std::make_unique<Buffer<Element>>(scratch));
    }

    void run(const EncoderStep& step) override {
        layout_.place(step.num_prompts, step.starts);
        attention_.place(layout_);
        reserve();
        pool_.run([&](int thread) {
            const typename Product::Registers registers;
            run(step, thread);
        });
    }

private:
    using Element = typename Product::Element;
    using Factors = typename Product::Factors;
    using Value = typename Product::Value;

    // What products with a matrix need beside it.
    void include(const Matrix& matrix) {
        code_row_bytes_ = std::max(code_row_bytes_, code_row_bytes(matrix));
        if (matrix.takes_codes()) numbers_stride_ = std::max(numbers_stride_, round_up(matrix.inputs, PANEL));
        else if (matrix.order) has_orders_ = true;
    }

    void reserve() {
        hidden_stride_ = round_up(model_.hidden_size, PANEL);
        normed_stride_ = Product::stride(model_.hidden_size);
        act_stride_ = Product::stride(round_up(model_.intermediate_size, PANEL));
        const int64_t rows = round_up(layout_.num_tokens(), Product::ROWS);
        hidden_.reserve(rows * hidden_stride_);
        normed_.reserve(rows * normed_stride_);
        attended_.reserve(rows * normed_stride_);
        act_.reserve(rows * act_stride_);
        if (has_orders_) ordered_.reserve(rows * std::max(normed_stride_, act_stride_));
        numbers_.reserve(rows * numbers_stride_);
        code_rows_.reserve(rows, code_row_bytes_);
    }

    void run(const EncoderStep& step, int thread) {
        embed(step);
        int64_t rows = layout_.num_tokens();
        for (int64_t i = 0; i < model_.num_layers; ++i) {
            const EncoderLayer& layer = layers_[i];
            const bool is_last = i == model_.num_layers - 1;
            if (model_.cosines) project_and_rotate(layer.qkv, rows, thread);
            else project(layer.qkv, rows, thread);
            attention_.attend(pool_, thread, [&](int64_t token, int64_t column, Floats values) {
                put(layer.output, attended_, normed_stride_, token, column, values);
            });
            // Of what follows in the last layer, only the wanted tokens matter.
            if (is_last) rows = keep_wanted_rows(step, layer.output);
            add(layer.output, attended_, normed_stride_, rows, thread);
            norm(layer.attention_norm, rows, &layer.gate_up, nullptr);
            widen(layer, rows, thread);
            add(layer.down, act_, act_stride_, rows, thread);
            norm(layer.mlp_norm, rows, is_last ? nullptr : &layers_[i + 1].qkv, is_last ? step.output : nullptr);
        }
    }

    void embed(const EncoderStep& step) {
        const int64_t size = model_.hidden_size;
        pool_.parallel_for_ranges(layout_.num_tokens(), [&](int64_t token) {
            const int64_t position = layout_.position(token);
            const bool is_second = step.num_first && position >= step.num_first[layout_.prompt(token)];
            const Value* word = static_cast<const Value*>(model_.words) + step.token_ids[token] * size;
            const float* place = model_.positions ? model_.positions + position * size : nullptr;
            const float* type = model_.types + is_second * size;
            float* to = &hidden_[token * hidden_stride_];
            for (int64_t i = 0; i < size; i += LANES) {
                const Floats of_type = load_floats(type + i);
                store(to + i, load_floats(word + i) + (place ? load_floats(place + i) + of_type : of_type));
            }
            norm_row(model_.norm, token, &layers_[0].qkv, nullptr);
        });
    }

    // Queries, keys and values.
    void project(const Matrix& qkv, int64_t rows, int thread) {
        multiply_normed(qkv, rows, thread, [&](int64_t token, int64_t panel, Floats left, Floats right) {
            store_part(token, panel * PANEL, left);
            store_part(token, panel * PANEL + LANES, right);
        });
    }

    void project_and_rotate(const Matrix& qkv, int64_t rows, int thread) {
        const int64_t size = model_.hidden_size, half = size / model_.num_heads / 2;
        multiply_normed(qkv, rows, thread, [&](int64_t token, int64_t panel, Floats left, Floats right) {
            const int64_t head = panel * LANES / half, dimension = panel * LANES % half, column = head * 2 * half + dimension;
            if (column < 2 * size) {
                const int64_t pair = layout_.position(token) * half + dimension;
                const Floats cosine = load_floats(model_.cosines + pair), sine = load_floats(model_.sines + pair);
                const Floats turned = left * cosine - right * sine;
                right = right * cosine + left * sine;
                left = turned;
            }
            store_part(token, column, left);
            store_part(token, column + half, right);
        });
    }

    // The inputs of `down`.
    void widen(const EncoderLayer& layer, int64_t rows, int thread) {
        const auto put_act = [&](int64_t row, int64_t column, Floats values) {
            put(layer.down, act_, act_stride_, row, column, values);
        };
        if (model_.is_gated) {
            multiply_normed(layer.gate_up, rows, thread, [&](int64_t row, int64_t panel, Floats gate, Floats up) {
                put_act(row, panel * LANES, gated(model_.activation, gate, up));
            });
            return;
        }
        multiply_normed(layer.gate_up, rows, thread, [&](int64_t row, int64_t panel, Floats left, Floats right) {
            put_act(row, panel * PANEL, activate(model_.activation, left));
            put_act(row, panel * PANEL + LANES, activate(model_.activation, right));
        });
    }

    // LANES outputs of the first product of a layer.
    void store_part(int64_t token, int64_t column, Floats values) {
        const int64_t size = model_.hidden_size;
        if (column < 3 * size) attention_.store(token, static_cast<Projection>(column / size), column % size, values);
    }

    // LANES inputs of a matrix: as its factors, or as numbers that are rounded to codes before they are multiplied.
    void put(const Matrix& matrix, Buffer<Element>& factors, int64_t stride, int64_t row, int64_t column, Floats values) {
        if (matrix.takes_codes()) store(&numbers_[row * numbers_stride_ + column], values);
        else Product::put(&factors[row * stride], column, values);
    }

    // Of what put() has stored for this matrix.
    template <class F>
    void multiply(const Matrix& matrix, const Buffer<Element>& factors, int64_t stride, int64_t rows, int thread, F&& finish) {
        if (matrix.takes_codes()) {
            multiply_in_codes<Factors>(pool_, matrix, code_rows_, numbers_.data(), rows, numbers_stride_, finish);
            return;
        }
        if (matrix.order) put_in_order(pool_, matrix, factors.data(), rows, stride, ordered_.data());
        const Element* ordered = matrix.order ? ordered_.data() : factors.data();
        Product::multiply(pool_, matrix, {ordered, stride}, rows, scratches_[thread]->data(), finish);
    }

    // Of what norm() has computed last, for this matrix.
    template <class F>
    void multiply_normed(const Matrix& matrix, int64_t rows, int thread, F&& finish) {
        if (matrix.takes_codes()) multiply_code_rows<Factors>(pool_, matrix, code_rows_, rows, finish);
        else multiply(matrix, normed_, normed_stride_, rows, thread, finish);
    }

    // Moves the rows of wanted tokens to the front, with what their attention has put for a matrix, and returns their number.
    int64_t keep_wanted_rows(const EncoderStep& step, const Matrix& matrix) {
        pool_.parallel_for(1, [&](int64_t) {  // one thread, since rows may overlap
            move_to_front(hidden_.data(), hidden_stride_, step.rows, step.num_rows);
            if (matrix.takes_codes()) move_to_front(numbers_.data(), numbers_stride_, step.rows, step.num_rows);
            else move_to_front(attended_.data(), normed_stride_, step.rows, step.num_rows);
        });
        return step.num_rows;
    }

    void add(const Matrix& matrix, const Buffer<Element>& from, int64_t stride, int64_t rows, int thread) {
        multiply(matrix, from, stride, rows, thread, [&](int64_t row, int64_t panel, Floats left, Floats right) {
            float* to = &hidden_[row * hidden_stride_ + panel * PANEL];
            store(to, load_floats(to) + left);
            store(to + LANES, load_floats(to + LANES) + right);
        });
    }

    // For a matrix that is multiplied next. The last norm, whose result is the model's, has an `output` in its place.
    void norm(const Norm& norm, int64_t rows, const Matrix* used_by, float* output) {
        pool_.parallel_for_ranges(rows, [&](int64_t row) { norm_row(norm, row, used_by, output); });
    }

    void norm_row(const Norm& norm, int64_t row, const Matrix* used_by, float* output) {
        float* hidden = &hidden_[row * hidden_stride_];
        if (output) {
            float* to = output + row * model_.hidden_size;
            return normalize(hidden, norm, model_.hidden_size, [&](int64_t i, Floats v) { store(to + i, v); });
        }
        if (used_by->takes_codes()) {
            normalize(hidden, norm, model_.hidden_size, [&](int64_t i, Floats v) { store(hidden + i, v); });
            return code_rows_.set(row, hidden, *used_by);
        }
        Element* normed = &normed_[row * normed_stride_];
        normalize(hidden, norm, model_.hidden_size, [&](int64_t i, Floats v) {
            store(hidden + i, v);
            Product::put(normed, i, v);
        });
    }

    const EncoderModel model_;
    ThreadPool& pool_;
    const std::vector<EncoderLayer> layers_;
    PromptLayout layout_;
    typename Product::Attention attention_;
    std::vector<std::unique_ptr<Buffer<Element>>> scratches_;
    CodeRows code_rows_;
    int64_t code_row_bytes_ = 0;  // the most of a matrix that takes codes
    bool has_orders_ = false;     // whether another one has an order
    int64_t hidden_stride_ = 0, normed_stride_ = 0, act_stride_ = 0, numbers_stride_ = 0;
    Buffer<float> hidden_;
    Buffer<float> numbers_;  // see put()
    Buffer<Element> normed_, attended_, act_, ordered_;
};

// With `use_amx`, products are computed by AMX: only where may_use_amx().
inline std::unique_ptr<AnyEncoder> make_encoder(bool is_bfloat16, [[maybe_unused]] bool use_amx, const EncoderModel& model,
                                                ThreadPool& pool) {
#ifdef QUIRE_AMX
    if (use_amx && is_bfloat16) return std::make_unique<Encoder<AmxProducts<1>>>(model, pool);
    if (use_amx) return std::make_unique<Encoder<AmxProducts<2>>>(model, pool);
#endif
    if (is_bfloat16) return std::make_unique<Encoder<VectorProducts<BFloat16>>>(model, pool);
    return std::make_unique<Encoder<VectorProducts<float>>>(model, pool);
}

}  // namespace quire
