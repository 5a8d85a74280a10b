// Multi-head latent attention (arXiv:2405.04434, section 2.1), without the attention itself.
//
// The cache holds a latent vector and a rotated key of each token, which all heads share, and no values. The products that
// make keys of latent vectors are computed with the queries, and those that make values with what attention returns.
#pragma once

#include <algorithm>

#include "attention.h"
#include "buffer.h"
#include "linear.h"
#include "norms.h"
#include "rotary.h"
#include "simd.h"
#include "thread_pool.h"

namespace quire {

struct Latent {
    int64_t query_rank;  // dimensions of the latent vector of queries; 0: there is none
    int64_t rank, rotated_dim, plain_dim, value_dim;
    int64_t rotates_neighbours;  // whether pairs of rotated dimensions are neighbours, or of the two halves
    Norm query_norm, kv_norm;    // of latent vectors
    Matrix query_up;             // from a latent vector to the queries of all heads: of each plain_dim, then rotated_dim
    const Matrix* key_up;        // of each head: from the first part of a query [plain_dim] to [rank]
    const Matrix* value_up;      // of each head: from a sum of latent vectors [rank] to a value [value_dim]

    int64_t query_dim() const { return plain_dim + rotated_dim; }
    int64_t stored_dim() const { return rank + rotated_dim; }
};

// Heads of one query that are computed together with those of others, as one head of the cache.
inline int64_t latent_group(int64_t num_heads) {
    int64_t group = 8;
    while (num_heads % group) --group;
    return group;
}

// One thread's scratch memory for a token.
template <class Element>
struct LatentRow {
    void reserve(const Latent& latent) {
        row.reserve(round_up(std::max(latent.query_rank, latent.stored_dim()), LANES));
        turned.reserve(round_up(latent.rotated_dim, LANES));
        key.reserve(round_up(latent.stored_dim(), LANES));
    }

    Buffer<float> row, turned;
    Buffer<Element> key;
};

// What is computed before and after attention. All layers have the same sizes. `Product` is VectorFactors or AmxFactors<1>.
template <class Product>
class LatentProducts {
public:
    using Element = typename Product::Element;

    // Where a step's angles and slots are, and where its queries go [num_tokens, num_heads, stored_dim].
    struct Tokens {
        int64_t count;
        const float *cosines, *sines;
        int64_t angle_stride;
        const Slot* slots;
        Element* query;
    };

    LatentProducts(ThreadPool& pool, int64_t num_heads) : pool_(pool), num_heads_(num_heads) {}

    void include(const Latent& latent) {
        normed_stride_ = Product::stride(latent.query_rank);
        query_stride_ = round_up(num_heads_ * latent.query_dim(), PANEL);
        plain_width_ = Product::width(latent.plain_dim);
        plain_stride_ = Product::stride(num_heads_ * plain_width_);
        gathered_width_ = Product::width(latent.rank);
        gathered_stride_ = Product::stride(num_heads_ * gathered_width_);
        summed_dim_ = round_up(latent.rank, LANES);
    }

    // Dimensions of the cache's vectors that attention sums, whole vectors of numbers.
    int64_t summed_dim() const { return summed_dim_; }

    // Of the rows that the queries are computed from, where they have a rank.
    int64_t normed_stride() const { return normed_stride_; }

    void reserve(int64_t tokens) {
        const int64_t rows = round_up(tokens, Product::ROWS);
        normed_.reserve(rows * normed_stride_);
        if (normed_stride_) queries_.reserve(tokens * query_stride_);
        plain_.reserve(rows * plain_stride_);
        gathered_.reserve(rows * gathered_stride_);
    }

    // For all threads of the pool: the queries of `tokens`, whose latent vectors are stored, of rows `qkv` at a stride. `multiply`
    // is as the decoder's.
    template <class M>
    void before(const Latent& latent, const Tokens& tokens, const float* qkv, int64_t stride, const Cache& cache,
                LatentRow<Element>& own, Element* scratch, M&& multiply) {
        const float *queries = qkv, *latents = qkv + num_heads_ * latent.query_dim();
        int64_t query_stride = stride;
        if (latent.query_rank) {
            pool_.parallel_for_ranges(tokens.count, [&](int64_t token) {
                normalize_part(qkv + token * stride, latent.query_norm, latent.query_rank, own.row.data());
                for (int64_t i = 0; i < latent.query_rank; i += LANES)
                    Product::put(&normed_[token * normed_stride_], i, load_floats(&own.row[i]));
            });
            multiply(latent.query_up, normed_, normed_stride_, [&](int64_t token, int64_t panel, Floats left, Floats right) {
                float* to = &queries_[token * query_stride_ + panel * PANEL];
                store(to, left);
                store(to + LANES, right);
            });
            queries = queries_.data();
            query_stride = query_stride_;
            latents = qkv + latent.query_rank;
        }
        pool_.parallel_for_ranges(tokens.count, [&](int64_t i) { return begins_lines(tokens.slots, i); }, [&](int64_t token) {
            const float* cosines = tokens.cosines + token * tokens.angle_stride;
            const float* sines = tokens.sines + token * tokens.angle_stride;
            for (int64_t head = 0; head < num_heads_; ++head) {
                const float* query = queries + token * query_stride + head * latent.query_dim();
                Element* plain = &plain_[token * plain_stride_ + head * plain_width_];
                for (int64_t i = 0; i < latent.plain_dim; i += LANES)
                    Product::put(plain, i, load_part(query + i, latent.plain_dim - i));
                turn(latent, query + latent.plain_dim, cosines, sines, own.turned.data());
                Element* to = tokens.query + (token * num_heads_ + head) * latent.stored_dim() + latent.rank;
                for (int64_t i = 0; i < latent.rotated_dim; i += LANES)
                    store_part(to + i, load_floats(&own.turned[i]), latent.rotated_dim - i);
            }
            if (tokens.slots[token].exists()) store_latent(latent, latents + token * stride, cosines, sines, cache, tokens.slots[token], own);
        });
        multiply_heads(latent.key_up, plain_, plain_width_, plain_stride_, tokens.count, scratch,
                       [&](int64_t head, int64_t token, int64_t column, Floats v) {
                           Element* to = tokens.query + (token * num_heads_ + head) * latent.stored_dim();
                           store_part(to + column, v, latent.rank - column);
                       });
    }

    // Where attention puts its results, of each head summed_dim() numbers.
    auto put_gathered() {
        return [this](int64_t token, int64_t number, Floats v) {
            if (gathered_width_ != summed_dim_) number = number / summed_dim_ * gathered_width_ + number % summed_dim_;
            store_floats(&gathered_[token * gathered_stride_ + number], v);
        };
    }

    // For all threads of the pool: the values of all heads, of what attention has returned.
    void after(const Latent& latent, int64_t num_tokens, Element* values, int64_t stride, Element* scratch) {
        multiply_heads(latent.value_up, gathered_, gathered_width_, gathered_stride_, num_tokens, scratch,
                       [&](int64_t head, int64_t token, int64_t column, Floats v) {
                           store_part(values + token * stride + head * latent.value_dim + column, v, latent.value_dim - column);
                       });
    }

private:
    // Into `to`, with zeros up to a whole vector.
    static void normalize_part(const float* from, const Norm& norm, int64_t size, float* to) {
        for (int64_t i = 0; i < size; i += LANES) store(to + i, load_part(from + i, size - i));
        normalize(to, norm, size, [&](int64_t i, Floats v) { store(to + i, v); });
    }

    // Rotates `from` into `to`. Neighbours are taken apart: the same order in queries and keys changes no score.
    static void turn(const Latent& latent, const float* from, const float* cosines, const float* sines, float* to) {
        const int64_t num_pairs = latent.rotated_dim / 2;
        if (latent.rotates_neighbours) {
            for (int64_t i = 0; i < num_pairs; ++i) {
                to[i] = from[2 * i];
                to[num_pairs + i] = from[2 * i + 1];
            }
        } else {
            std::copy_n(from, latent.rotated_dim, to);
        }
        rotate(to, cosines, sines, num_pairs);
    }

    void store_latent(const Latent& latent, const float* from, const float* cosines, const float* sines,
                      const Cache& cache, Slot slot, LatentRow<Element>& own) {
        normalize_part(from, latent.kv_norm, latent.rank, own.row.data());
        turn(latent, from + latent.rank, cosines, sines, own.turned.data());
        std::copy_n(own.turned.data(), latent.rotated_dim, &own.row[latent.rank]);
        for (int64_t i = 0; i < latent.stored_dim(); i += LANES) store_floats(&own.key[i], load_floats(&own.row[i]));
        store_key(cache, slot, 0, own.key.data());
    }

    // Each head's part of the rows, `width` numbers, times its own matrix. Calls finish(head, row, column, values).
    template <class F>
    void multiply_heads(const Matrix* matrices, const Buffer<Element>& rows, int64_t width, int64_t stride, int64_t num_rows,
                        Element* scratch, F&& finish) {
        const int64_t num_panels = ceil_div(matrices[0].outputs, PANEL);
        const int64_t wanted = ceil_div(TaskGrid::TASKS_PER_THREAD * pool_.size(), num_heads_);
        const int64_t ranges = std::min(num_panels, wanted);
        pool_.parallel_for_tasks(num_rows ? num_heads_ * ranges : 0, [&](int64_t i, TaskClaim& task_claim) {
            const int64_t head = i / ranges, range = i % ranges;
            const Piece piece{TaskGrid::begin(range, num_panels, ranges), TaskGrid::begin(range + 1, num_panels, ranges), 0,
                              num_rows, Product::tile_rows(matrices[head], num_rows)};
            Product::multiply_piece(matrices[head], piece, task_claim.next(), {&rows[head * width], stride}, scratch,
                                    task_claim, [&](int64_t row, int64_t panel, Floats left, Floats right) {
                                        finish(head, row, panel * PANEL, left);
                                        finish(head, row, panel * PANEL + LANES, right);
                                    });
        });
    }

    ThreadPool& pool_;
    const int64_t num_heads_;
    int64_t normed_stride_ = 0, query_stride_ = 0, summed_dim_ = 0;
    int64_t plain_width_ = 0, gathered_width_ = 0;    // of a head
    int64_t plain_stride_ = 0, gathered_stride_ = 0;  // of all heads
    Buffer<float> queries_;
    Buffer<Element> normed_, plain_, gathered_;
};

}  // namespace quire
