// A decoder's forward pass over a step: all layers in one call, with tiles of each phase handed out to threads.
//
// Hidden states between layers, norms, rotation, scores and sums are float32; factors of products are of the model's type.
#pragma once

#include <algorithm>
#include <iterator>
#include <memory>
#include <type_traits>
#include <vector>

#include "activations.h"
#include "amx.h"
#include "amx_attention.h"
#include "amx_codes.h"
#include "attention.h"
#include "buffer.h"
#include "experts.h"
#include "latent.h"
#include "linear.h"
#include "norms.h"
#include "panel_peaks.h"
#include "rotary.h"
#include "simd.h"
#include "thread_pool.h"

namespace quire {

// down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x))).
struct Mlp {
    Matrix gate_up;  // with a gate, each panel has 16 of its outputs, then the same of up
    Matrix down;
    Activation activation;
    int64_t is_gated;
};

struct DecoderLayer {
    Norm attention_norm;  // without it, attention sees the hidden states as they are
    Norm query_norm;  // of each head, see also below
    Norm key_norm;
    Norm post_attention_norm;  // of what is added to the hidden states
    Norm mlp_norm;  // without it, so does the MLP
    Norm post_mlp_norm;
    Matrix qkv;  // queries, keys, values; see also DecoderModel::has_paired_halves
    Matrix output;
    AttentionRule rule;
    int64_t rope;  // which one of the model's; -1: none
    Mlp mlp;
    const Experts* experts;   // in place of the MLP, which then is all zeros; or null
    int64_t is_parallel;      // whether attention and MLP see the same hidden states
    int64_t has_joint_norms;  // whether query_norm and key_norm are of all heads together
    int64_t norms_after_rotation;  // of these, which then are of each head
    const Latent* latent;     // of all layers or none: qkv returns queries and what is stored of latent vectors; or null
};

struct DecoderModel {
    int64_t hidden_size, num_layers, num_heads, num_kv_heads, head_dim;
    const DecoderLayer* layers;
    Norm norm;
    Matrix head;            // all zeros, if no step has logits
    float logits_scale;     // before their soft cap
    float logits_soft_cap;  // 0: none
    const void* embedding;  // [vocab, hidden]
    float embedding_scale;
    const void* positions;  // [context, hidden], added to the embedding; or null
    char* cache;            // blocks of [num_layers, 2, num_kv_heads, block_size * head_dim]; without the 2 of latent vectors
    char* cache_scales;     // of the first block [num_layers, 2, num_kv_heads, block_size], where the cache has codes; or null
    int64_t cache_stride;   // bytes from one block to the next, also of scales
    int64_t block_size;
    int64_t shares_cache;   // whether blocks have one layer, which each layer overwrites: then a step must have whole sequences
    int64_t num_ropes;
    const Rope* ropes;
    int64_t has_paired_halves;  // whether a panel of qkv has sixteen outputs of the first half of a head, then the same of the second
};

struct DecoderStep {
    int64_t num_tokens;
    const int64_t* token_ids;
    const int64_t* slots;  // -1: not stored
    const int64_t* positions;
    Sequences sequences;
    int64_t num_samples;
    const int64_t* logits_indices;
    float* logits;  // [num_samples, logits_stride]
    int64_t logits_stride;
    const uint8_t* needs_logits;  // [num_samples], whether these logits are written; null: all are
    int64_t* argmax;  // [num_samples], as find_argmax<false>() of sample.h
    float* states;    // [num_samples, states_stride], after the last norm, in place of logits and argmax; or null
    int64_t states_stride;  // a multiple of LANES
};

class AnyDecoder {
public:
    virtual ~AnyDecoder() = default;
    virtual void run(const DecoderStep& step) = 0;
};

// `Product` is VectorFactors or AmxFactors, one for all numbers of rows: a token's bits do not depend on the rest of its step.
template <class Product>
class Decoder : public AnyDecoder {
public:
    Decoder(const DecoderModel& model, ThreadPool& pool)
        : model_(model), pool_(pool), layers_(model.layers, model.layers + model.num_layers),
          ropes_(model.ropes, model.ropes + model.num_ropes), mixture_(pool), latents_(pool, model.num_heads),
          num_kv_heads_(layers_[0].latent ? model.num_heads / latent_group(model.num_heads) : model.num_kv_heads),
          has_act_tiles_(takes_act_tiles()) {
        int64_t scratch = 0;
        include(model.head, scratch);
        for (const DecoderLayer& layer : layers_) {
            for (const Matrix* m : {&layer.qkv, &layer.output, &layer.mlp.gate_up, &layer.mlp.down})
                include(*m, scratch);
            act_stride_ = std::max(act_stride_, Product::stride(layer.mlp.down.inputs));
            if (layer.experts) mixture_.include(*layer.experts);
            if (!layer.latent) continue;
            latents_.include(*layer.latent);
            for (const Matrix* m : {&layer.latent->query_up, layer.latent->key_up, layer.latent->value_up}) include(*m, scratch);
        }
        scratch = std::max(scratch, mixture_.scratch_size());
        for (int i = 0; i < pool.size(); ++i) {
            threads_.push_back(std::make_unique<Thread>(group(), model.head_dim, latents_.summed_dim(), model.cache_scales, scratch));
            if (layers_[0].latent) threads_.back()->latent.reserve(*layers_[0].latent);
        }
        for (const Rope& rope : ropes_) {
            first_pairs_.push_back(num_pairs_);
            num_pairs_ += rope.num_pairs;
        }
        hidden_stride_ = round_up(model.hidden_size, PANEL);
        normed_stride_ = Product::stride(model.hidden_size);
        qkv_stride_ = round_up(layers_[0].qkv.outputs, PANEL);
        for (int64_t panel = 0; panel * PANEL < qkv_stride_; ++panel) places_.push_back(place_of(panel));
        query_stride_ = model.num_heads * model.head_dim;
        attended_stride_ = Product::stride(layers_[0].output.inputs);
        // Rows in order are at the stride of those that they are taken from.
        if (ordered_stride_)
            ordered_stride_ = std::max({ordered_stride_, normed_stride_, attended_stride_, act_stride_, latents_.normed_stride()});
    }

    void run(const DecoderStep& step) override {
        reserve(step.num_tokens);
        peaks_.reserve(ceil_div(model_.head.outputs, PANEL), step.num_samples);
        tiles_ = split_into_tiles(step.sequences, num_kv_heads_, group(), pool_.size());
        last_tiles_.clear();
        std::copy_if(tiles_.begin(), tiles_.end(), std::back_inserter(last_tiles_), [&](const Tile& tile) { return has_samples(step, tile); });
        locate_slots(step.slots, step.num_tokens, model_.block_size, slots_);
        pool_.run([&](int thread) {
            const typename Product::Registers registers;
            run(step, *threads_[thread]);
        });
    }

private:
    using Element = typename Product::Element;
    static_assert(std::is_same_v<Element, typename Product::Value>);  // rows of one number for each column

    struct Thread {
        Thread(int64_t group, int64_t head_dim, int64_t value_dim, bool has_codes, int64_t scratch)
            : attention(group, head_dim, value_dim, has_codes), scratch(scratch), heads(2 * head_dim) {}
        TileAttention<Element, typename AttentionProductsOf<Product>::Type> attention;
        Buffer<Element> scratch;
        Buffer<Element> heads;
        LatentRow<Element> latent;
    };

    // Where the outputs of a panel of qkv are in its rows: `left` and the LANES - 1 after it, `right` and those after it. With
    // has_paired_halves, also of which head they are, and from which of its dimensions and of its second half's on.
    struct PanelPlace {
        int64_t left, right, head, dimension;
    };

    PanelPlace place_of(int64_t panel) const {
        const int64_t first = panel * PANEL, dim = model_.head_dim;
        if (!model_.has_paired_halves) return {first, first + LANES, 0, 0};
        const int64_t head = first / dim, dimension = first % dim / 2, left = head * dim + dimension;
        return {left, left + dim / 2, head, dimension};
    }

    int64_t group() const { return model_.num_heads / num_kv_heads_; }

    FactorRows<Element> normed_rows() const { return {normed_.data(), normed_stride_}; }

    // Whether the inputs of `down` are in tiles, in all layers or in none: columns past a layer's own would hold another layer's numbers
    // in the other layout.
    bool takes_act_tiles() const {
        return Product::TAKES_TILES && std::all_of(layers_.begin(), layers_.end(), [](const DecoderLayer& layer) {
            const Matrix& down = layer.mlp.down;
            return layer.experts || (!down.takes_codes() && !down.order);
        });
    }

    // What products with a matrix need beside it.
    void include(const Matrix& matrix, int64_t& scratch) {
        code_row_bytes_ = std::max(code_row_bytes_, code_row_bytes(matrix));
        if (matrix.order && !matrix.takes_codes()) ordered_stride_ = std::max(ordered_stride_, Product::stride(matrix.inputs));
        if (!matrix.takes_codes()) scratch = std::max(scratch, Product::scratch_size(matrix.inputs));
    }

    // Rows have zeros beyond their content, up to their stride.
    void reserve(int64_t tokens) {
        const int64_t rows = round_up(tokens, Product::ROWS);
        hidden_.reserve(tokens * hidden_stride_);
        branch_.reserve(tokens * hidden_stride_);
        qkv_.reserve(tokens * qkv_stride_);
        query_.reserve(tokens * query_stride_);
        cosines_.reserve(tokens * num_pairs_);
        sines_.reserve(tokens * num_pairs_);
        normed_.reserve(rows * normed_stride_);
        attended_.reserve(rows * attended_stride_);
        act_.reserve(rows * act_stride_);
        mixture_.reserve(tokens);
        latents_.reserve(tokens);
        ordered_.reserve(rows * ordered_stride_);
        code_rows_.reserve(tokens, code_row_bytes_);
    }

    void run(const DecoderStep& step, Thread& own) {
        embed(step);
        int64_t rows = step.num_tokens;
        const Norm* post = nullptr;  // see add()
        for (int64_t i = 0; i < model_.num_layers; ++i) {
            const DecoderLayer& layer = layers_[i];
            norm(post, &layer.attention_norm, rows, &layer.qkv);
            const Cache cache = layer_cache(i);
            const std::vector<Tile>& tiles = i == model_.num_layers - 1 ? last_tiles_ : tiles_;
            if (layer.latent) {
                multiply_qkv(layer, rows, own);
                attend_to_latents(step, layer, cache, tiles, own);
            } else {
                if (rotates_in_product(layer)) {
                    multiply_and_rotate(layer, cache, rows, own);
                } else {
                    multiply_qkv(layer, rows, own);
                    rotate_and_store(step, layer, cache, own);
                }
                attend(pool_, own.attention, cache, step.sequences, tiles, layer.rule, query_.data(),
                       put_in(attended_.data(), attended_stride_));
            }
            if (i == model_.num_layers - 1) {
                // Beyond the last layer's keys and values, only tokens whose successor is sampled matter.
                if (!step.num_samples) return;
                rows = keep_sampled_rows(step);
            }
            const Mlp* dense = layer.experts ? nullptr : &layer.mlp;
            if (layer.is_parallel) norm(nullptr, &layer.mlp_norm, rows);
            post = add(layer.output, {attended_.data(), attended_stride_}, layer.post_attention_norm, rows, own);
            if (!layer.is_parallel)
                norm(post, &layer.mlp_norm, rows, dense ? &dense->gate_up : nullptr);
            else if (post)
                norm(post, nullptr, rows);
            post = dense ? mlp(*dense, layer.post_mlp_norm, rows, !layer.is_parallel, own)
                         : mix(*layer.experts, layer.post_mlp_norm, rows, own);
        }
        if (step.states) {
            if (post) norm(post, nullptr, rows);
            put_states(step, rows);
            return;
        }
        norm(post, &model_.norm, rows, &model_.head);
        logits(step, rows, own);
    }

    // From qkv_ to the values of all heads in attended_.
    void attend_to_latents(const DecoderStep& step, const DecoderLayer& layer, const Cache& cache, const std::vector<Tile>& tiles,
                           Thread& own) {
        const int64_t pair = first_pairs_[layer.rope], rows = step.num_tokens;
        latents_.before(*layer.latent, {rows, &cosines_[pair], &sines_[pair], num_pairs_, slots_.data(), query_.data()},
                        qkv_.data(), qkv_stride_, cache, own.latent, own.scratch.data(),
                        [&](const Matrix& matrix, const Buffer<Element>& from, int64_t stride, auto&& finish) {
                            multiply(matrix, {from.data(), stride}, rows, own, finish);
                        });
        attend(pool_, own.attention, cache, step.sequences, tiles, layer.rule, query_.data(), latents_.put_gathered());
        // In the last layer also of tokens whose tiles were left out, for which these are numbers of the layer before.
        latents_.after(*layer.latent, rows, attended_.data(), attended_stride_, own.scratch.data());
    }

    // Reads normed_, and adds the result to the hidden states; returns as add(). `has_codes`: norm() has written the rows for gate_up.
    const Norm* mlp(const Mlp& mlp, const Norm& post, int64_t rows, bool has_codes, Thread& own) {
        const auto multiply_up = [&](auto&& finish) {
            if (has_codes) multiply_normed(mlp.gate_up, rows, own, finish);
            else multiply(mlp.gate_up, normed_rows(), rows, own, finish);
        };
        const FactorRows<Element> act{act_.data(), act_stride_, has_act_tiles_};
        if (mlp.is_gated) {
            multiply_up([&](int64_t row, int64_t panel, Floats gate, Floats up) {
                store_floats(act.at(row, panel * LANES), gated(mlp.activation, gate, up));
            });
        } else {
            multiply_up([&](int64_t row, int64_t panel, Floats left, Floats right) {
                store_floats(act.at(row, panel * PANEL), activate(mlp.activation, left));
                store_floats(act.at(row, panel * PANEL + LANES), activate(mlp.activation, right));
            });
        }
        return add(mlp.down, act, post, rows, own);
    }

    // As mlp().
    const Norm* mix(const Experts& experts, const Norm& post, int64_t rows, Thread& own) {
        const bool has_norm = post.exists();
        mixture_.add(experts, normed_.data(), rows, has_norm ? branch_.data() : hidden_.data(), hidden_stride_, has_norm,
                     own.scratch.data());
        return has_norm ? &post : nullptr;
    }

    void logits(const DecoderStep& step, int64_t rows, Thread& own) {
        const float scale = model_.logits_scale, cap = model_.logits_soft_cap;
        multiply_normed(model_.head, rows, own, [&](int64_t row, int64_t panel, Floats left, Floats right) {
            left *= scale;
            right *= scale;
            if (cap != 0.0f) {
                left = soft_cap(left, cap);
                right = soft_cap(right, cap);
            }
            if (!step.needs_logits || step.needs_logits[row])
                put_outputs(model_.head, panel, left, right, step.logits + row * step.logits_stride);
            peaks_.put(row, panel, model_.head.outputs - panel * PANEL, left, right);
        });
        pool_.parallel_for(peaks_.num_groups(), [&](int64_t group) { peaks_.find_argmax(group, rows, step.argmax); });
    }

    void put_states(const DecoderStep& step, int64_t rows) {
        pool_.parallel_for_ranges(rows, [&](int64_t row) {
            float* states = step.states + row * step.states_stride;
            normalize(&hidden_[row * hidden_stride_], model_.norm, model_.hidden_size, [&](int64_t i, Floats v) { store(states + i, v); });
        });
    }

    Cache layer_cache(int64_t layer) const {
        if (model_.shares_cache) layer = 0;
        const bool is_latent = layers_[0].latent, has_codes = model_.cache_scales;
        const int64_t vectors = model_.num_kv_heads * model_.block_size, half = vectors * model_.head_dim, kinds = is_latent ? 1 : 2;
        const int64_t number_bytes = has_codes ? 1 : sizeof(Element), scale_bytes = sizeof(float);
        return {model_.cache + layer * kinds * half * number_bytes,
                model_.cache_stride,
                is_latent ? 0 : half,
                num_kv_heads_,
                model_.block_size,
                model_.head_dim,
                has_codes ? model_.cache_scales + layer * kinds * vectors * scale_bytes : nullptr};
    }

    // Embeddings, and the angles of their positions.
    void embed(const DecoderStep& step) {
        const int64_t size = model_.hidden_size;
        const auto* embedding = static_cast<const Element*>(model_.embedding);
        const auto* positions = static_cast<const Element*>(model_.positions);
        pool_.parallel_for_ranges(step.num_tokens, [&](int64_t token) {
            const int64_t position = step.positions[token];
            const Element* from = embedding + step.token_ids[token] * size;
            float* to = &hidden_[token * hidden_stride_];
            for (int64_t i = 0; i < size; ++i) to[i] = as_float(from[i]) * model_.embedding_scale;
            std::fill_n(to + size, hidden_stride_ - size, 0.0f);  // it is not finite after a row that was not
            if (positions)
                for (int64_t i = 0; i < size; ++i) to[i] += as_float(positions[position * size + i]);
            for (size_t i = 0; i < ropes_.size(); ++i) {
                const int64_t first = token * num_pairs_ + first_pairs_[i];
                compute_angles(ropes_[i], position, &cosines_[first], &sines_[first]);
            }
        });
    }

    // Adds what add() has left in branch_, where there is a `post`, then computes the norm `next` of the hidden states, also in codes
    // where the matrix `used_by`, with which multiply_normed() comes next, takes them.
    void norm(const Norm* post, const Norm* next, int64_t rows, const Matrix* used_by = nullptr) {
        const bool in_codes = used_by && used_by->takes_codes();
        pool_.parallel_for_ranges(rows, [&](int64_t row) {
            float* hidden = &hidden_[row * hidden_stride_];
            Element* normed = &normed_[row * normed_stride_];
            if (post)
                normalize(&branch_[row * hidden_stride_], *post, model_.hidden_size,
                          [&](int64_t i, Floats v) { store(hidden + i, load_floats(hidden + i) + v); });
            const auto put = [&](int64_t i, Floats v) { Product::put(normed, i, v); };
            if (next && next->exists()) normalize(hidden, *next, model_.hidden_size, put);
            else if (next)
                for (int64_t i = 0; i < model_.hidden_size; i += LANES) put(i, load_floats(hidden + i));
            if (in_codes) code_rows_.set(row, normed, *used_by);
        });
    }

    // Of what norm() has computed last, for this matrix.
    template <class F>
    void multiply_normed(const Matrix& matrix, int64_t rows, Thread& own, F&& finish) {
        if (matrix.takes_codes()) multiply_code_rows<Product>(pool_, matrix, code_rows_, rows, finish);
        else multiply(matrix, normed_rows(), rows, own, finish);
    }

    template <class F>
    void multiply(const Matrix& matrix, const FactorRows<Element>& rows, int64_t num_rows, Thread& own, F&& finish) {
        if (matrix.takes_codes()) {
            multiply_in_codes<Product>(pool_, matrix, code_rows_, rows.data, num_rows, rows.stride, finish);
            return;
        }
        if (matrix.order) put_in_order(pool_, matrix, rows.data, num_rows, rows.stride, ordered_.data());
        const Element* ordered = matrix.order ? ordered_.data() : rows.data;
        Product::multiply(pool_, matrix, {ordered, rows.stride, rows.in_tiles}, num_rows, own.scratch.data(), finish);
    }

    // Adds a product to the hidden states. Where it has a norm `post`, which needs whole rows, it is left in branch_, and the
    // norm is returned; else null.
    const Norm* add(const Matrix& matrix, const FactorRows<Element>& from, const Norm& post, int64_t rows, Thread& own) {
        const bool has_norm = post.exists();
        float* sums = has_norm ? branch_.data() : hidden_.data();
        multiply(matrix, from, rows, own, [&](int64_t row, int64_t panel, Floats left, Floats right) {
            float* to = sums + row * hidden_stride_ + panel * PANEL;
            if (!has_norm) {
                left += load_floats(to);
                right += load_floats(to + LANES);
            }
            store(to, left);
            store(to + LANES, right);
        });
        return has_norm ? &post : nullptr;
    }

    // In place, if there is such a norm.
    static void normalize_heads(float* heads, const Norm& norm, int64_t size) {
        if (norm.exists()) normalize(heads, norm, size, [&](int64_t i, Floats v) { store(heads + i, v); });
    }

    // From normed_ to qkv_.
    void multiply_qkv(const DecoderLayer& layer, int64_t rows, Thread& own) {
        multiply_normed(layer.qkv, rows, own, [&](int64_t row, int64_t panel, Floats left, Floats right) {
            float* to = &qkv_[row * qkv_stride_];
            const PanelPlace& place = places_[panel];
            store(to + place.left, left);
            store(to + place.right, right);
        });
    }

    // Whether a panel has all that its outputs become.
    bool rotates_in_product(const DecoderLayer& layer) const {
        const bool is_whole =
            layer.rope < 0 || (2 * ropes_[layer.rope].num_pairs == model_.head_dim && !ropes_[layer.rope].query_factors);
        return model_.has_paired_halves && is_whole && !layer.query_norm.exists() && !layer.key_norm.exists() && !model_.cache_scales;
    }

    // As multiply_qkv() and rotate_and_store(), without a pass through memory in float32.
    void multiply_and_rotate(const DecoderLayer& layer, const Cache& cache, int64_t rows, Thread& own) {
        const int64_t num_heads = model_.num_heads, first_value = num_heads + model_.num_kv_heads, half = model_.head_dim / 2;
        const int64_t num_rotated = layer.rope < 0 ? 0 : first_value, first_pair = layer.rope < 0 ? 0 : first_pairs_[layer.rope];
        multiply_normed(layer.qkv, rows, own, [&](int64_t row, int64_t panel, Floats left, Floats right) {
            const PanelPlace& place = places_[panel];
            if (place.head < num_rotated) {
                const int64_t pair = row * num_pairs_ + first_pair + place.dimension;
                const Floats cosine = load_floats(&cosines_[pair]), sine = load_floats(&sines_[pair]), turned = left * cosine - right * sine;
                right = right * cosine + left * sine;
                left = turned;
            }
            if (place.head < num_heads) {
                Element* query = &query_[row * query_stride_];
                store_floats(query + place.left, left);
                store_floats(query + place.right, right);
                return;
            }
            if (!slots_[row].exists()) return;
            Element numbers[PANEL];
            store_floats(numbers, left);
            store_floats(numbers + LANES, right);
            for (int side = 0; side < 2; ++side) {
                const int64_t dimension = place.dimension + side * half;
                if (place.head < first_value)
                    store_key_part(cache, slots_[row], place.head - num_heads, dimension, numbers + side * LANES, LANES);
                else
                    store_value_part(cache, slots_[row], place.head - first_value, dimension, numbers + side * LANES, LANES);
            }
        });
    }

    // Rotates queries and keys, and stores keys and values.
    void rotate_and_store(const DecoderStep& step, const DecoderLayer& layer, const Cache& cache, Thread& own) {
        const int64_t dim = model_.head_dim, num_turned = model_.num_heads + model_.num_kv_heads;
        const int64_t num_pairs = layer.rope < 0 ? 0 : ropes_[layer.rope].num_pairs;
        const int64_t first_pair = layer.rope < 0 ? 0 : first_pairs_[layer.rope];
        const float* query_factors = layer.rope < 0 ? nullptr : ropes_[layer.rope].query_factors;
        pool_.parallel_for_ranges(step.num_tokens, [&](int64_t i) { return begins_lines(slots_.data(), i); }, [&](int64_t token) {
            float* from = &qkv_[token * qkv_stride_];
            Element* query = &query_[token * query_stride_];
            const float* cosines = cosines_.data() + token * num_pairs_ + first_pair;  // null without positions
            const float* sines = sines_.data() + token * num_pairs_ + first_pair;
            if (layer.has_joint_norms) {
                normalize_heads(from, layer.query_norm, query_stride_);
                normalize_heads(from + query_stride_, layer.key_norm, model_.num_kv_heads * dim);
            }
            for (int64_t i = 0; i < num_turned; ++i) {
                float* head = from + i * dim;
                const Norm& norm = i < model_.num_heads ? layer.query_norm : layer.key_norm;
                if (!layer.has_joint_norms && !layer.norms_after_rotation) normalize_heads(head, norm, dim);
                rotate(head, cosines, sines, num_pairs);
                if (layer.norms_after_rotation) normalize_heads(head, norm, dim);
            }
            if (query_factors) {
                const float factor = query_factors[step.positions[token]];
                for (int64_t i = 0; i < query_stride_; ++i) from[i] *= factor;
            }
            for (int64_t i = 0; i < query_stride_; i += LANES) store_floats(query + i, load_floats(from + i));
            if (!slots_[token].exists()) return;
            Element* key = own.heads.data();
            Element* value = key + dim;
            for (int64_t head = 0; head < model_.num_kv_heads; ++head) {
                for (int64_t i = 0; i < dim; i += LANES) {
                    store_floats(key + i, load_floats(from + (model_.num_heads + head) * dim + i));
                    store_floats(value + i, load_floats(from + (num_turned + head) * dim + i));
                }
                store_token(cache, slots_[token], head, key, value);
            }
        });
    }

    // Whether a token is sampled after one of a tile's.
    static bool has_samples(const DecoderStep& step, const Tile& tile) {
        const int64_t first = step.sequences.query_starts[tile.sequence];
        const int64_t *begin = step.logits_indices, *end = begin + step.num_samples;
        const int64_t* sample = std::lower_bound(begin, end, first + tile.first);
        return sample < end && *sample < first + tile.last;
    }

    // Moves the rows after which a token is sampled to the front, and returns their number.
    int64_t keep_sampled_rows(const DecoderStep& step) {
        pool_.parallel_for(1, [&](int64_t) {  // one thread, since rows may overlap
            move_to_front(hidden_.data(), hidden_stride_, step.logits_indices, step.num_samples);
            move_to_front(attended_.data(), attended_stride_, step.logits_indices, step.num_samples);
        });
        return step.num_samples;
    }

    const DecoderModel model_;
    ThreadPool& pool_;
    const std::vector<DecoderLayer> layers_;
    const std::vector<Rope> ropes_;
    std::vector<int64_t> first_pairs_;  // of each rope, in a token's angles
    std::vector<std::unique_ptr<Thread>> threads_;
    std::vector<Tile> tiles_;
    std::vector<Tile> last_tiles_;  // those that the last layer computes
    std::vector<Slot> slots_;  // of the step's tokens
    std::vector<PanelPlace> places_;
    ExpertMixture<Product> mixture_;
    LatentProducts<Product> latents_;
    const int64_t num_kv_heads_;  // as attention takes them
    const bool has_act_tiles_;    // see FactorRows
    CodeRows code_rows_;
    PanelPeaks peaks_;
    int64_t code_row_bytes_ = 0;   // the most of a matrix that takes codes
    int64_t ordered_stride_ = 0;   // the most of another one that has an order
    int64_t num_pairs_ = 0;
    int64_t hidden_stride_ = 0, normed_stride_ = 0, qkv_stride_ = 0, query_stride_ = 0, attended_stride_ = 0, act_stride_ = 0;
    Buffer<float> hidden_, branch_, qkv_, cosines_, sines_;
    Buffer<Element> normed_, query_, attended_, act_, ordered_;
};

// With `use_amx`, products of bfloat16 are computed by AMX: only where may_use_amx().
inline std::unique_ptr<AnyDecoder> make_decoder(bool is_bfloat16, [[maybe_unused]] bool use_amx, const DecoderModel& model,
                                                ThreadPool& pool) {
    if (!is_bfloat16) return std::make_unique<Decoder<VectorFactors<float>>>(model, pool);
#ifdef QUIRE_AMX
    if (use_amx) return std::make_unique<Decoder<AmxFactors<1>>>(model, pool);
#endif
    return std::make_unique<Decoder<VectorFactors<BFloat16>>>(model, pool);
}

}  // namespace quire
