// What a decoder is, and what a step of it computes, as Python hands them over.
#pragma once

#include <cstdint>

#include "activations.h"
#include "attention.h"
#include "experts.h"
#include "latent.h"
#include "logit_bounds.h"
#include "matrix.h"
#include "norms.h"
#include "rotary.h"

namespace quire {

// down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x))).
struct Mlp {
    Matrix gate_up;  // with a gate, each panel has 16 of its outputs, then the same of up
    Matrix down;
    Activation activation;
    int64_t is_gated;
};

// The heads of a layer's attention: layers may differ.
struct Heads {
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t has_paired_halves;  // whether a panel of qkv has sixteen outputs of the first half of a head, then the same of the second

    bool operator==(const Heads&) const = default;
};

// An MLP beside the experts of a layer, both of the same x: together they return
// post_norm(mlp(norm(x))) + experts_post_norm(experts(mlp_norm(x))), where the router scores router_norm(x).
struct Beside {
    Mlp mlp;
    Norm norm, post_norm, experts_post_norm, router_norm;
};

// What a layer does with its own vector of LayerInputs: x += norm(up(activation(gate(x)) * vector)).
struct LayerInput {
    Matrix gate, up;
    Norm norm;
    Activation activation;
};

// A vector for each token and layer, of all layers side by side: (embedding * embedding_scale + norm(projection(x))) * scale, with a
// norm of each layer's.
struct LayerInputs {
    int64_t width;  // of each layer
    const void* embedding;  // [vocab, num_layers * width]
    float embedding_scale;
    Matrix projection;
    Norm norm;
    float scale;
};

struct DecoderLayer {
    Norm attention_norm;  // without it, attention sees the hidden states as they are
    Norm query_norm;  // of each head, see also below
    Norm key_norm;
    Norm value_norm;  // of each head
    Norm post_attention_norm;  // of what is added to the hidden states
    Norm mlp_norm;  // without it, so does the MLP
    Norm post_mlp_norm;
    Matrix qkv;  // queries, then what has_keys and values_are_keys say
    Matrix output;
    Heads heads;
    AttentionRule rule;
    int64_t rope;  // which one of the model's; -1: none
    Mlp mlp;
    const Experts* experts;   // in place of the MLP, which then is all zeros; or null
    const Beside* beside;     // beside experts, with a post_mlp_norm; or null
    int64_t is_parallel;      // whether attention and MLP see the same hidden states
    int64_t has_joint_norms;  // whether query_norm and key_norm are of all heads together
    int64_t norms_after_rotation;  // of these, which then are of each head
    const Latent* latent;     // of all layers or none: qkv returns queries and what is stored of latent vectors; or null
    int64_t has_keys;         // whether qkv also returns keys and values; otherwise those of a layer before are in the cache
    int64_t values_are_keys;  // whether qkv returns no values: they are what keys are before their norm and rotation
    const LayerInput* input;  // of all layers or none; or null
    float scale;              // of the hidden states, at the end
    char* cache;              // of the first block [2, num_kv_heads, block_size * head_dim]; without the 2 of latent vectors
    char* cache_scales;       // of the first block [2, num_kv_heads, block_size], where the cache has codes; or null
};

struct DecoderModel {
    int64_t hidden_size, num_layers;
    const DecoderLayer* layers;
    Norm norm;
    Matrix head;            // all zeros, if no step has logits
    const HeadBounds* head_bounds;  // of the same head; or null
    float logits_scale;     // before their soft cap
    float logits_soft_cap;  // 0: none
    const void* embedding;  // [vocab, hidden]
    float embedding_scale;
    const void* positions;  // [context, hidden], added to the embedding; or null
    const LayerInputs* layer_inputs;  // or null
    int64_t cache_stride;   // bytes from one block to the next, also of scales
    int64_t block_size;
    int64_t num_ropes;
    const Rope* ropes;
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

}  // namespace quire
