// A decoder's forward pass over a step: all layers in one call, with tiles of each phase handed out to threads.
//
// Hidden states between layers, norms, rotation, scores and sums are float32; factors of products are of the model's type.
#pragma once

#include <algorithm>
#include <deque>
#include <iterator>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "activations.h"
#include "amx.h"
#include "amx_attention.h"
#include "amx_codes.h"
#include "attention.h"
#include "buffer.h"
#include "decoder_model.h"
#include "experts.h"
#include "latent.h"
#include "linear.h"
#include "logit_bounds.h"
#include "norms.h"
#include "panel_peaks.h"
#include "rotary.h"
#include "simd.h"
#include "thread_pool.h"

namespace quire {

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
          ropes_(model.ropes, model.ropes + model.num_ropes), mixture_(pool), latents_(pool, layers_[0].heads.num_heads),
          logit_bounds_(Product::MULTIPLIES_SINGLE_PANELS && has_plain_logits(model) ? model.head_bounds : nullptr), has_act_tiles_(takes_act_tiles()) {
        int64_t scratch = 0;
        include(model.head, scratch);
        if (const LayerInputs* inputs = model.layer_inputs) {
            include(inputs->projection, scratch);
            // A panel of the last layer's gate may have more outputs than the layer's vector.
            inputs_stride_ = round_up(model.num_layers * inputs->width, PANEL) + PANEL;
            gate_stride_ = Product::stride(inputs->width);
        }
        for (const DecoderLayer& layer : layers_) {
            include(layer.heads, layer.latent);
            for (const Matrix* m : {&layer.qkv, &layer.output, &layer.mlp.gate_up, &layer.mlp.down})
                include(*m, scratch);
            if (layer.input)
                for (const Matrix* m : {&layer.input->gate, &layer.input->up}) include(*m, scratch);
            if (layer.beside) {
                has_beside_ = true;
                for (const Matrix* m : {&layer.beside->mlp.gate_up, &layer.beside->mlp.down}) include(*m, scratch);
                act_stride_ = std::max(act_stride_, Product::stride(layer.beside->mlp.down.inputs));
                least_act_ = std::min(least_act_, layer.beside->mlp.down.inputs);
            }
            attended_stride_ = std::max(attended_stride_, Product::stride(layer.output.inputs));
            least_attended_ = std::min(least_attended_, layer.output.inputs);
            act_stride_ = std::max(act_stride_, Product::stride(layer.mlp.down.inputs));
            if (!layer.experts) least_act_ = std::min(least_act_, layer.mlp.down.inputs);
            // Values that are keys have a place of their own.
            const Heads& heads = layer.heads;
            const int64_t all = layer.latent ? layer.qkv.outputs : (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim;
            qkv_stride_ = std::max(qkv_stride_, round_up(all, PANEL));
            if (layer.has_keys) last_with_keys_ = &layer - layers_.data();
            if (layer.experts) mixture_.include(*layer.experts);
            if (!layer.latent) continue;
            latents_.include(*layer.latent);
            for (const Matrix* m : {&layer.latent->query_up, layer.latent->key_up, layer.latent->value_up}) include(*m, scratch);
        }
        least_attended_ = std::min(least_attended_, attended_stride_);
        least_act_ = std::min(least_act_, act_stride_);
        scratch = std::max(scratch, mixture_.scratch_size());
        for (int i = 0; i < pool.size(); ++i) {
            threads_.push_back(std::make_unique<Thread>(shapes_, latents_.summed_dim(), layers_[0].cache_scales, scratch));
            if (model.layer_inputs) threads_.back()->vector.reserve(round_up(model.layer_inputs->width, LANES));
            if (layers_[0].latent) threads_.back()->latent.reserve(*layers_[0].latent);
        }
        for (const Rope& rope : ropes_) {
            first_pairs_.push_back(num_pairs_);
            num_pairs_ += rope.num_pairs;
        }
        hidden_stride_ = round_up(model.hidden_size, PANEL);
        normed_stride_ = Product::stride(model.hidden_size);
        // Rows in order are at the stride of those that they are taken from.
        if (ordered_stride_)
            ordered_stride_ = std::max({ordered_stride_, normed_stride_, attended_stride_, act_stride_, gate_stride_, latents_.normed_stride()});
    }

    void run(const DecoderStep& step) override {
        reserve(step.num_tokens);
        peaks_.reserve(ceil_div(model_.head.outputs, PANEL), step.num_samples);
        if (logit_bounds_.exist()) choose_rows(step);
        for (Shape& shape : shapes_) {
            shape.tiles = split_into_tiles(step.sequences, shape.num_kv_heads, shape.group(), pool_.size());
            shape.last_tiles.clear();
            std::copy_if(shape.tiles.begin(), shape.tiles.end(), std::back_inserter(shape.last_tiles),
                         [&](const Tile& tile) { return has_samples(step, tile); });
        }
        if (last_with_keys_ < model_.num_layers - 1) sample_sequences(step);
        locate_slots(step.slots, step.num_tokens, model_.block_size, slots_);
        pool_.run([&](int thread) {
            const typename Product::Registers registers;
            run(step, *threads_[thread]);
        });
    }

private:
    using Element = typename Product::Element;
    static_assert(std::is_same_v<Element, typename Product::Value>);  // rows of one number for each column

    // Where the outputs of a panel of qkv are in its rows: `left` and the LANES - 1 after it, `right` and those after it. With
    // has_paired_halves, also of which head they are, and from which of its dimensions and of its second half's on.
    struct PanelPlace {
        int64_t left, right, head, dimension;
    };

    // What layers of the same heads have in common.
    struct Shape {
        Heads heads;
        int64_t num_kv_heads;  // as attention takes them
        std::vector<PanelPlace> places;
        std::vector<Tile> tiles;       // of a step
        std::vector<Tile> last_tiles;  // those of sampled tokens
        std::vector<Tile> sampled_tiles;  // of SampledSequences

        int64_t group() const { return heads.num_heads / num_kv_heads; }
    };

    struct Thread {
        Thread(const std::vector<Shape>& shapes, int64_t value_dim, bool has_codes, int64_t scratch) : scratch(scratch) {
            int64_t widest = 0;
            for (const Shape& shape : shapes) {
                attentions.emplace_back(shape.group(), shape.heads.head_dim, value_dim, has_codes);
                widest = std::max(widest, shape.heads.head_dim);
            }
            heads.reserve(2 * widest);
        }
        std::deque<TileAttention<Element, typename AttentionProductsOf<Product>::Type>> attentions;  // of each shape
        Buffer<Element> scratch;
        Buffer<Element> heads;
        Buffer<float> vector;  // of LayerInputs, padded with zeros
        LatentRow<Element> latent;
    };

    // The tokens of a step that are sampled: each run of them is a sequence of its own, which ends behind the last one.
    struct SampledSequences {
        std::vector<int32_t> block_tables, query_starts, context_lens;
        Sequences sequences;
    };

    // What is left to do to the hidden states: to add branch_ by a norm, and to multiply them. See add().
    struct Update {
        const Norm* post = nullptr;
        float factor = 1.0f;

        bool exists() const { return post || factor != 1.0f; }
    };

    static PanelPlace place_of(const Heads& heads, int64_t panel) {
        const int64_t first = panel * PANEL, dim = heads.head_dim;
        if (!heads.has_paired_halves) return {first, first + LANES, 0, 0};
        const int64_t head = first / dim, dimension = first % dim / 2, left = head * dim + dimension;
        return {left, left + dim / 2, head, dimension};
    }

    void include(const Heads& heads, bool is_latent) {
        const auto same = std::find_if(shapes_.begin(), shapes_.end(), [&](const Shape& shape) { return shape.heads == heads; });
        shape_of_layers_.push_back(same - shapes_.begin());
        if (same != shapes_.end()) return;
        Shape& shape = shapes_.emplace_back();
        shape.heads = heads;
        shape.num_kv_heads = is_latent ? heads.num_heads / latent_group(heads.num_heads) : heads.num_kv_heads;
        // Latent vectors follow queries, so that rows have any width.
        const int64_t width = is_latent ? layers_[0].qkv.outputs : (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim;
        for (int64_t panel = 0; panel * PANEL < width; ++panel) shape.places.push_back(place_of(heads, panel));
        query_size_ = std::max(query_size_, heads.num_heads * heads.head_dim);
    }

    FactorRows<Element> normed_rows() const { return {normed_.data(), normed_stride_}; }

    // Whether the largest logit is that of the largest product with the head's numbers.
    static bool has_plain_logits(const DecoderModel& model) {
        return model.head.format == Format::PLAIN && !model.head.bias && !model.head.order && model.logits_soft_cap == 0.0f;
    }

    // Whether the inputs of `down` are in tiles, in all layers or in none: columns past a layer's own would hold another layer's numbers
    // in the other layout.
    bool takes_act_tiles() const {
        return Product::TAKES_TILES && std::all_of(layers_.begin(), layers_.end(), [](const DecoderLayer& layer) {
            const Matrix& down = layer.beside ? layer.beside->mlp.down : layer.mlp.down;
            return (layer.experts && !layer.beside) || (!down.takes_codes() && !down.order);
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
        query_.reserve(tokens * query_size_);
        cosines_.reserve(tokens * num_pairs_);
        sines_.reserve(tokens * num_pairs_);
        normed_.reserve(rows * normed_stride_);
        attended_.reserve(rows * attended_stride_);
        act_.reserve(rows * act_stride_);
        inputs_.reserve(tokens * inputs_stride_);
        gate_.reserve(rows * gate_stride_);
        scored_.reserve(has_beside_ ? rows * normed_stride_ : 0);
        mixed_.reserve(has_beside_ ? tokens * hidden_stride_ : 0);
        mixture_.reserve(tokens);
        latents_.reserve(tokens);
        ordered_.reserve(rows * ordered_stride_);
        code_rows_.reserve(tokens, code_row_bytes_);
    }

    // Behind the last layer that has keys and values of its own, only tokens whose successor is sampled matter.
    void run(const DecoderStep& step, Thread& own) {
        embed(step);
        int64_t rows = step.num_tokens;
        const int64_t* tokens = nullptr;  // of the rows; null: all
        if (model_.layer_inputs) compute_layer_inputs(step, own);
        Update update;
        for (int64_t i = 0; i < model_.num_layers; ++i) {
            const DecoderLayer& layer = layers_[i];
            norm(update, &layer.attention_norm, rows, &layer.qkv);
            const Shape& shape = shapes_[shape_of_layers_[i]];
            const Cache cache = layer_cache(layer, shape);
            const Sequences& sequences = tokens ? sampled_.sequences : step.sequences;
            const std::vector<Tile>& tiles = tokens ? shape.sampled_tiles : i == last_with_keys_ ? shape.last_tiles : shape.tiles;
            auto& attention = own.attentions[shape_of_layers_[i]];
            if (layer.latent) {
                multiply_qkv(layer, shape, rows, own);
                attend_to_latents(step, layer, cache, tiles, attention, own);
            } else {
                if (rotates_in_product(layer)) {
                    multiply_and_rotate(layer, shape, cache, tokens, rows, own);
                } else {
                    multiply_qkv(layer, shape, rows, own);
                    rotate_and_store(step, layer, cache, tokens, rows, own);
                }
                attend(pool_, attention, cache, sequences, tiles, layer.rule, query_.data(),
                       put_in(attended_.data(), attended_stride_));
            }
            if (i == last_with_keys_) {
                if (!step.num_samples) return;
                rows = keep_sampled_rows(step);
                tokens = step.logits_indices;
            }
            const Mlp* dense = layer.experts ? nullptr : &layer.mlp;
            if (layer.is_parallel) norm({}, &layer.mlp_norm, rows);
            update = {add(layer.output, {attended_.data(), attended_stride_}, layer.post_attention_norm, rows, own)};
            if (layer.beside)
                norm(update, &layer.beside->norm, rows, &layer.beside->mlp.gate_up);
            else if (!layer.is_parallel)
                norm(update, &layer.mlp_norm, rows, dense ? &dense->gate_up : nullptr);
            else if (update.exists())
                norm(update, nullptr, rows);
            update = {dense          ? mlp(*dense, layer.post_mlp_norm, rows, !layer.is_parallel, own)
                      : layer.beside ? mix_beside(layer, rows, own)
                                     : mix(*layer.experts, layer.post_mlp_norm, rows, own)};
            if (layer.input) {
                norm(update, &NO_NORM, rows, &layer.input->gate);
                update = {add_input(*layer.input, i, tokens, rows, own)};
            }
            update.factor = layer.scale;
        }
        if (step.states) {
            if (update.exists()) norm(update, nullptr, rows);
            put_states(step, rows);
            return;
        }
        norm(update, &model_.norm, rows, &model_.head);
        logits(step, rows, own);
    }

    // From the embeddings in hidden_ to the vectors of all layers in inputs_.
    void compute_layer_inputs(const DecoderStep& step, Thread& own) {
        const LayerInputs& inputs = *model_.layer_inputs;
        const int64_t width = inputs.width, all = model_.num_layers * width;
        norm({}, &NO_NORM, step.num_tokens, &inputs.projection);
        multiply_normed(inputs.projection, step.num_tokens, own, [&](int64_t row, int64_t panel, Floats left, Floats right) {
            float* to = &inputs_[row * inputs_stride_ + panel * PANEL];
            store(to, left);
            store(to + LANES, right);
        });
        const auto* embedding = static_cast<const Element*>(inputs.embedding);
        pool_.parallel_for_ranges(step.num_tokens, [&](int64_t token) {
            const Element* from = embedding + step.token_ids[token] * all;
            float* to = &inputs_[token * inputs_stride_];
            float* vector = own.vector.data();
            for (int64_t first = 0; first < all; first += width) {
                std::copy_n(to + first, width, vector);
                std::fill(vector + width, vector + round_up(width, LANES), 0.0f);  // not finite after a vector that was not
                normalize(vector, inputs.norm, width, [&](int64_t i, Floats v) { store(vector + i, v); });
                for (int64_t i = first; i < first + width; ++i)
                    to[i] = (vector[i - first] + as_float(from[i]) * inputs.embedding_scale) * inputs.scale;
            }
        });
    }

    // Of normed_ and the vectors of a layer; as add(). `tokens` are those of the rows; null: all.
    const Norm* add_input(const LayerInput& input, int64_t number, const int64_t* tokens, int64_t rows, Thread& own) {
        const FactorRows<Element> gate{gate_.data(), gate_stride_};
        const int64_t first = number * model_.layer_inputs->width;
        multiply_normed(input.gate, rows, own, [&](int64_t row, int64_t panel, Floats left, Floats right) {
            const float* vector = &inputs_[(tokens ? tokens[row] : row) * inputs_stride_ + first + panel * PANEL];
            store_floats(gate.at(row, panel * PANEL), activate(input.activation, left) * load_floats(vector));
            store_floats(gate.at(row, panel * PANEL + LANES), activate(input.activation, right) * load_floats(vector + LANES));
        });
        return add(input.up, gate, input.norm, rows, own);
    }

    // From qkv_ to the values of all heads in attended_.
    void attend_to_latents(const DecoderStep& step, const DecoderLayer& layer, const Cache& cache, const std::vector<Tile>& tiles,
                           auto& attention, Thread& own) {
        const int64_t pair = first_pairs_[layer.rope], rows = step.num_tokens;
        latents_.before(*layer.latent, {rows, &cosines_[pair], &sines_[pair], num_pairs_, slots_.data(), query_.data()},
                        qkv_.data(), qkv_stride_, cache, own.latent, own.scratch.data(),
                        [&](const Matrix& matrix, const Buffer<Element>& from, int64_t stride, auto&& finish) {
                            multiply(matrix, {from.data(), stride}, rows, own, finish);
                        });
        attend(pool_, attention, cache, step.sequences, tiles, layer.rule, query_.data(), latents_.put_gathered());
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
        mixture_.add(experts, normed_.data(), normed_.data(), rows, has_norm ? branch_.data() : hidden_.data(), hidden_stride_, has_norm,
                     own.scratch.data());
        return has_norm ? &post : nullptr;
    }

    // As mlp(), of the experts of a layer and what is beside them.
    const Norm* mix_beside(const DecoderLayer& layer, int64_t rows, Thread& own) {
        const Beside& beside = *layer.beside;
        mlp(beside.mlp, beside.post_norm, rows, true, own);  // in branch_, not normalised yet
        pool_.parallel_for_ranges(rows, [&](int64_t row) {
            const float* hidden = &hidden_[row * hidden_stride_];
            const auto norm_to = [&](const Norm& norm, Element* to) {
                normalize(hidden, norm, model_.hidden_size, [&](int64_t i, Floats v) { Product::put(to, i, v); });
            };
            norm_to(layer.mlp_norm, &normed_[row * normed_stride_]);
            norm_to(beside.router_norm, &scored_[row * normed_stride_]);
        });
        mixture_.add(*layer.experts, normed_.data(), scored_.data(), rows, mixed_.data(), hidden_stride_, true, own.scratch.data());
        pool_.parallel_for_ranges(rows, [&](int64_t row) {
            float* sum = &branch_[row * hidden_stride_];
            normalize(sum, beside.post_norm, model_.hidden_size, [&](int64_t i, Floats v) { store(sum + i, v); });
            normalize(&mixed_[row * hidden_stride_], beside.experts_post_norm, model_.hidden_size,
                      [&](int64_t i, Floats v) { store(sum + i, load_floats(sum + i) + v); });
        });
        return &layer.post_mlp_norm;
    }

    // Logits where they are needed, and the largest of each row: where it alone is needed, of the panels that may have it.
    void logits(const DecoderStep& step, int64_t rows, Thread& own) {
        if (!logit_bounds_.exist()) return multiply_head(step, nullptr, rows, own);
        if constexpr (Product::MULTIPLIES_SINGLE_PANELS) {
            if (!written_.empty()) multiply_chosen_rows(step, written_, own);
            if (searched_.empty()) return;
            const auto count = std::ssize(searched_);
            const auto row_of = [&](int64_t i) { return &normed_[searched_[i] * normed_stride_]; };
            const auto peak_of = [&](int64_t i, int64_t panel) {
                alignas(LINE) float sums[PANEL];
                Product::multiply_single_panel(model_.head, row_of(i), panel, own.scratch.data(), sums);
                const float scale = model_.logits_scale;
                return peak_of_panel(model_.head.outputs - panel * PANEL, load_floats(sums) * scale, load_floats(sums + LANES) * scale);
            };
            pool_.parallel_for_ranges(count, [&](int64_t i) { logit_bounds_.set_row(i, row_of(i)); });
            multiply_code_rows<Product>(pool_, logit_bounds_.codes(), logit_bounds_.code_rows(), count,
                                        [&](int64_t i, int64_t panel, Floats left, Floats right) { logit_bounds_.put(i, panel, left, right); });
            pool_.parallel_for(count, [&](int64_t i) { logit_bounds_.begin(i, peak_of); });
            if (logit_bounds_.leave_many()) return multiply_chosen_rows(step, searched_, own);
            pool_.parallel_for(logit_bounds_.num_parts(), [&](int64_t part) { logit_bounds_.search(part, peak_of); });
            pool_.parallel_for_ranges(count, [&](int64_t i) { step.argmax[searched_[i]] = logit_bounds_.argmax(i); });
        }
    }

    // Rows whose logits are computed, and those that are searched for the largest one.
    void choose_rows(const DecoderStep& step) {
        written_.clear();
        searched_.clear();
        const int64_t rows = step.num_samples;
        const auto is_written = [&](int64_t row) { return !step.needs_logits || step.needs_logits[row]; };
        bool any = false;
        for (int64_t row = 0; row < rows; ++row) any |= is_written(row);
        // As few rows as one tile has are computed while the head is read once: codes would be read beside it.
        const bool all = any && Product::tile_rows(model_.head, rows) >= rows;
        for (int64_t row = 0; row < rows; ++row) (all || is_written(row) ? written_ : searched_).push_back(row);
        logit_bounds_.reserve(std::ssize(searched_), pool_.size());
        chosen_.reserve(round_up(step.num_samples, Product::ROWS) * normed_stride_);
    }

    void multiply_chosen_rows(const DecoderStep& step, const std::vector<int64_t>& chosen, Thread& own) {
        const auto count = std::ssize(chosen);
        if (count == step.num_samples) return multiply_head(step, nullptr, count, own);
        pool_.parallel_for_ranges(count, [&](int64_t i) {
            std::copy_n(&normed_[chosen[i] * normed_stride_], normed_stride_, &chosen_[i * normed_stride_]);
        });
        multiply_head(step, chosen.data(), count, own);
    }

    // Logits where they are needed, and the largest of each row. `chosen`: the numbers of the rows that are in chosen_; null: all, in normed_.
    void multiply_head(const DecoderStep& step, const int64_t* chosen, int64_t rows, Thread& own) {
        const float scale = model_.logits_scale, cap = model_.logits_soft_cap;
        const auto number_of = [&](int64_t row) { return chosen ? chosen[row] : row; };
        const auto put = [&](int64_t row, int64_t panel, Floats left, Floats right) {
            left *= scale;
            right *= scale;
            if (cap != 0.0f) {
                left = soft_cap(left, cap);
                right = soft_cap(right, cap);
            }
            const int64_t number = number_of(row);
            if (!step.needs_logits || step.needs_logits[number])
                put_outputs(model_.head, panel, left, right, step.logits + number * step.logits_stride);
            peaks_.put(row, panel, model_.head.outputs - panel * PANEL, left, right);
        };
        if (chosen) multiply(model_.head, {chosen_.data(), normed_stride_}, rows, own, put);
        else multiply_normed(model_.head, rows, own, put);
        pool_.parallel_for(ceil_div(rows, LANES), [&](int64_t group) {
            peaks_.find_argmax(group, rows, [&](int64_t row, int64_t token) { step.argmax[number_of(row)] = token; });
        });
    }

    void put_states(const DecoderStep& step, int64_t rows) {
        pool_.parallel_for_ranges(rows, [&](int64_t row) {
            float* states = step.states + row * step.states_stride;
            normalize(&hidden_[row * hidden_stride_], model_.norm, model_.hidden_size, [&](int64_t i, Floats v) { store(states + i, v); });
        });
    }

    Cache layer_cache(const DecoderLayer& layer, const Shape& shape) const {
        const Heads& heads = layer.heads;
        const int64_t half = heads.num_kv_heads * model_.block_size * heads.head_dim;
        return {layer.cache,      model_.cache_stride, layer.latent ? 0 : half,
                shape.num_kv_heads, model_.block_size,   heads.head_dim,
                layer.cache_scales};
    }

    // Beyond the columns of a layer, rows have numbers of wider ones, which must not be those of another token: these may not be finite.
    void clear_act(int64_t row) {
        const FactorRows<Element> act{act_.data(), act_stride_, has_act_tiles_};
        for (int64_t i = round_up(least_act_, LANES); i < act_stride_; i += LANES) store_floats(act.at(row, i), Floats{});
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
            Element* attended = &attended_[token * attended_stride_];
            std::fill(attended + least_attended_, attended + attended_stride_, Element{});
            clear_act(token);
            for (size_t i = 0; i < ropes_.size(); ++i) {
                const int64_t first = token * num_pairs_ + first_pairs_[i];
                compute_angles(ropes_[i], position, &cosines_[first], &sines_[first]);
            }
        });
    }

    // Does what is left to do to the hidden states, then computes the norm `next` of them, also in codes where the matrix `used_by`, with
    // which multiply_normed() comes next, takes them.
    void norm(const Update& update, const Norm* next, int64_t rows, const Matrix* used_by = nullptr) {
        const Norm* post = update.post;
        const float factor = update.factor;
        const bool in_codes = used_by && used_by->takes_codes();
        pool_.parallel_for_ranges(rows, [&](int64_t row) {
            float* hidden = &hidden_[row * hidden_stride_];
            Element* normed = &normed_[row * normed_stride_];
            if (post)
                normalize(&branch_[row * hidden_stride_], *post, model_.hidden_size,
                          [&](int64_t i, Floats v) { store(hidden + i, load_floats(hidden + i) + v); });
            if (factor != 1.0f)
                for (int64_t i = 0; i < model_.hidden_size; i += LANES) store(hidden + i, load_floats(hidden + i) * factor);
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
    void multiply_qkv(const DecoderLayer& layer, const Shape& shape, int64_t rows, Thread& own) {
        multiply_normed(layer.qkv, rows, own, [&](int64_t row, int64_t panel, Floats left, Floats right) {
            float* to = &qkv_[row * qkv_stride_];
            const PanelPlace& place = shape.places[panel];
            store(to + place.left, left);
            store(to + place.right, right);
        });
    }

    // Whether a panel has all that its outputs become.
    bool rotates_in_product(const DecoderLayer& layer) const {
        const bool is_whole =
            layer.rope < 0 || (2 * ropes_[layer.rope].num_pairs == layer.heads.head_dim && !ropes_[layer.rope].query_factors);
        const bool has_norms = layer.query_norm.exists() || layer.key_norm.exists() || layer.value_norm.exists();
        return layer.heads.has_paired_halves && is_whole && !has_norms && !layer.cache_scales;
    }

    // As multiply_qkv() and rotate_and_store(), without a pass through memory in float32.
    void multiply_and_rotate(const DecoderLayer& layer, const Shape& shape, const Cache& cache, const int64_t* tokens, int64_t rows,
                             Thread& own) {
        const auto [num_heads, num_kv_heads, dim, _] = layer.heads;
        const int64_t first_value = num_heads + num_kv_heads, half = dim / 2, query_stride = num_heads * dim;
        const int64_t num_rotated = layer.rope < 0 ? 0 : first_value, first_pair = layer.rope < 0 ? 0 : first_pairs_[layer.rope];
        multiply_normed(layer.qkv, rows, own, [&](int64_t row, int64_t panel, Floats left, Floats right) {
            const PanelPlace& place = shape.places[panel];
            if (place.head < num_rotated) {
                const int64_t pair = (tokens ? tokens[row] : row) * num_pairs_ + first_pair + place.dimension;
                const Floats cosine = load_floats(&cosines_[pair]), sine = load_floats(&sines_[pair]), turned = left * cosine - right * sine;
                right = right * cosine + left * sine;
                left = turned;
            }
            if (place.head < num_heads) {
                Element* query = &query_[row * query_stride];
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

    // Rotates queries and keys, and stores keys and values. Layers without them may have fewer rows than tokens.
    void rotate_and_store(const DecoderStep& step, const DecoderLayer& layer, const Cache& cache, const int64_t* tokens, int64_t rows,
                          Thread& own) {
        const auto [num_heads, num_kv_heads, dim, _] = layer.heads;
        const int64_t num_turned = num_heads + (layer.has_keys ? num_kv_heads : 0), first_value = num_heads + num_kv_heads;
        const int64_t num_pairs = layer.rope < 0 ? 0 : ropes_[layer.rope].num_pairs, query_stride = num_heads * dim;
        const int64_t first_pair = layer.rope < 0 ? 0 : first_pairs_[layer.rope];
        const float* query_factors = layer.rope < 0 ? nullptr : ropes_[layer.rope].query_factors;
        const auto begins = [&](int64_t row) { return tokens || begins_lines(slots_.data(), row); };
        pool_.parallel_for_ranges(rows, begins, [&](int64_t row) {
            const int64_t token = tokens ? tokens[row] : row;
            float* from = &qkv_[row * qkv_stride_];
            Element* query = &query_[row * query_stride];
            const float* cosines = cosines_.data() + token * num_pairs_ + first_pair;  // null without positions
            const float* sines = sines_.data() + token * num_pairs_ + first_pair;
            if (layer.values_are_keys) std::copy_n(from + num_heads * dim, num_kv_heads * dim, from + first_value * dim);
            if (layer.has_joint_norms) {
                normalize_heads(from, layer.query_norm, query_stride);
                normalize_heads(from + query_stride, layer.key_norm, num_kv_heads * dim);
            }
            for (int64_t i = 0; i < num_turned; ++i) {
                float* head = from + i * dim;
                const Norm& norm = i < num_heads ? layer.query_norm : layer.key_norm;
                if (!layer.has_joint_norms && !layer.norms_after_rotation) normalize_heads(head, norm, dim);
                rotate(head, cosines, sines, num_pairs);
                if (layer.norms_after_rotation) normalize_heads(head, norm, dim);
            }
            if (query_factors) {
                const float factor = query_factors[step.positions[token]];
                for (int64_t i = 0; i < query_stride; ++i) from[i] *= factor;
            }
            for (int64_t i = 0; i < query_stride; i += LANES) store_floats(query + i, load_floats(from + i));
            if (!layer.has_keys || !slots_[token].exists()) return;
            Element* key = own.heads.data();
            Element* value = key + dim;
            for (int64_t head = 0; head < num_kv_heads; ++head) {
                float* values = from + (first_value + head) * dim;
                normalize_heads(values, layer.value_norm, dim);
                for (int64_t i = 0; i < dim; i += LANES) {
                    store_floats(key + i, load_floats(from + (num_heads + head) * dim + i));
                    store_floats(value + i, load_floats(values + i));
                }
                store_token(cache, slots_[token], head, key, value);
            }
        });
    }

    void sample_sequences(const DecoderStep& step) {
        const Sequences& all = step.sequences;
        SampledSequences& own = sampled_;
        own.query_starts.assign(1, 0);
        own.context_lens.clear();
        own.block_tables.clear();
        int64_t sequence = 0, next = -1;  // the token after the last one
        for (int64_t i = 0; i < step.num_samples; ++i) {
            const int64_t token = step.logits_indices[i];
            if (token == next && token < all.query_starts[sequence + 1]) {
                own.query_starts.pop_back();
                own.context_lens.pop_back();
            } else {
                while (all.query_starts[sequence + 1] <= token) ++sequence;
                const auto* table = all.block_tables + sequence * all.max_blocks;
                own.block_tables.insert(own.block_tables.end(), table, table + all.max_blocks);
            }
            own.query_starts.push_back(static_cast<int32_t>(i + 1));
            own.context_lens.push_back(static_cast<int32_t>(step.positions[token] + 1));
            next = token + 1;
        }
        own.sequences = {std::ssize(own.context_lens), all.max_blocks, own.block_tables.data(), own.query_starts.data(),
                         own.context_lens.data()};
        for (Shape& shape : shapes_)
            shape.sampled_tiles = split_into_tiles(own.sequences, shape.num_kv_heads, shape.group(), pool_.size());
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
            for (int64_t row = 0; row < step.num_samples; ++row) clear_act(row);
        });
        return step.num_samples;
    }

    static constexpr Norm NO_NORM{};

    const DecoderModel model_;
    ThreadPool& pool_;
    const std::vector<DecoderLayer> layers_;
    const std::vector<Rope> ropes_;
    std::vector<int64_t> first_pairs_;  // of each rope, in a token's angles
    std::vector<std::unique_ptr<Thread>> threads_;
    std::vector<Shape> shapes_;
    std::vector<int64_t> shape_of_layers_;
    int64_t last_with_keys_ = 0;
    SampledSequences sampled_;
    std::vector<Slot> slots_;  // of the step's tokens
    ExpertMixture<Product> mixture_;
    LatentProducts<Product> latents_;
    LogitBounds logit_bounds_;
    std::vector<int64_t> written_, searched_;  // of a step with bounds: see choose_rows()
    const bool has_act_tiles_;  // see FactorRows
    CodeRows code_rows_;
    PanelPeaks peaks_;
    int64_t code_row_bytes_ = 0;   // the most of a matrix that takes codes
    int64_t ordered_stride_ = 0;   // the most of another one that has an order
    int64_t num_pairs_ = 0;
    int64_t hidden_stride_ = 0, normed_stride_ = 0, qkv_stride_ = 0, query_size_ = 0, attended_stride_ = 0, act_stride_ = 0;
    int64_t inputs_stride_ = 0, gate_stride_ = 0;
    // The columns of the narrowest layer.
    int64_t least_attended_ = std::numeric_limits<int64_t>::max(), least_act_ = std::numeric_limits<int64_t>::max();
    bool has_beside_ = false;
    Buffer<float> hidden_, branch_, mixed_, qkv_, cosines_, sines_, inputs_;
    Buffer<Element> normed_, scored_, query_, attended_, act_, gate_, ordered_, chosen_;
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
