// The two products of attention by the tile registers of AMX, of bfloat16: 16 queries, or as many as there are, by 16 keys and
// 32 dimensions, then by 16 dimensions and 16 keys. As elsewhere, a query's bits do not depend on others.
#pragma once

#include <cstdint>

#include "amx.h"
#include "attention_tiles.h"
#include "buffer.h"
#include "matrix.h"
#include "simd.h"

namespace quire {

// No tile registers: attention is computed in vectors.
struct NoAttentionProducts {
    static constexpr int64_t MOST_PADDING = 0;
    static bool suit(int64_t, int64_t) { return false; }
    static int64_t padded(int64_t rows) { return rows; }
    void reserve(int64_t) {}
    void configure(int64_t) {}
    void restore() {}
    template <bool FETCH, class... Arguments>
    void score(Arguments&&...) {}
    template <class... Arguments>
    static void prefetch_first_values(Arguments&&...) {}
    template <bool FETCH, class... Arguments>
    void gather(Arguments&&...) {}
};

#ifdef QUIRE_AMX

// One thread's registers: 0 to 3 are sums, 4 and 5 queries and weights, 6 and 7 keys and values.
class AmxAttentionProducts {
public:
    // Rows of padding: at most two heads of a tile have more than 16 rows, and each is padded by at most 15.
    static constexpr int64_t MOST_PADDING = 2 * AmxRegisters::ROWS;

    // Whether they compute heads of these dimensions, in blocks of so many tokens.
    static bool suit(int64_t head_dim, int64_t block_size) { return head_dim % DIMS == 0 && block_size % LANES == 0; }
    // Rows in whole blocks: fewer than a block's are one of their own.
    static int64_t padded(int64_t rows) { return rows <= AmxRegisters::ROWS ? rows : round_up(rows, AmxRegisters::ROWS); }

    // `value_stride`: the most from one key's values to the next one's.
    void reserve(int64_t value_stride) { edge_values_.reserve(2 * LANES * value_stride); }

    // Shapes for so many rows.
    void configure(int64_t num_rows) {
        const int64_t rows = std::min(num_rows, AmxRegisters::ROWS);
        if (rows == rows_) return;
        rows_ = rows;
        const auto count = static_cast<uint8_t>(rows);
        AmxRegisters::load({count, count, count, count, count, count, AmxRegisters::ROWS, LANES / 2}, {64, 64, 64, 64, 64, LANES * 2, 64, 64});
    }

    // The shapes of other products again.
    void restore() {
        if (rows_) AmxRegisters::load_products();
        rows_ = 0;
    }

    // Scores [num_rows, TILE_KEYS] of queries [num_rows, dim]; of whole blocks of rows, and of groups with a key that is seen.
    template <bool FETCH>
    void score(const KeyTile<BFloat16>& tile, const KeyTile<BFloat16>& next, const BFloat16* query, int64_t dim, int64_t block_size,
               int64_t num_rows, float* scores) {
        asm volatile("" ::: "memory");
        for (int64_t row = 0; row < num_rows; row += rows_, query += rows_ * dim, scores += rows_ * TILE_KEYS) {
            const auto for_groups = [&](auto&& body) {
                for_sums([&]<int G>() {
                    if (G >= tile.first_group && G < tile.num_groups) body.template operator()<G>();
                });
            };
            for_groups([&]<int G>() { zero<G>(); });
            for (int64_t d = 0; d < dim; d += DIMS) {
                _tile_loadd(4, query + d, dim * 2);
                for_groups([&]<int G>() {
                    _tile_loadd(6, tile.keys[2 * G] + d * block_size, block_size * 4);
                    if (FETCH && row == 0) prefetch_lines<DIMS / 8>(next.keys, d / 2 + G * DIMS / 8, 2 * block_size);
                    if constexpr (G == 0) _tile_dpbf16ps(0, 4, 6);
                    if constexpr (G == 1) _tile_dpbf16ps(1, 4, 6);
                    if constexpr (G == 2) _tile_dpbf16ps(2, 4, 6);
                    if constexpr (G == 3) _tile_dpbf16ps(3, 4, 6);
                });
            }
            for_groups([&]<int G>() { store<G>(scores + G * LANES, TILE_KEYS); });
        }
        asm volatile("" ::: "memory");
    }

    // What gather() leaves out. To be called before the softmax, so that lines keep coming from memory meanwhile.
    static void prefetch_first_values(const KeyTile<BFloat16>& next) { prefetch_lines<FIRST_LINES>(next.values, 0, 2 * LANES); }

    // Adds values times weights [num_rows, TILE_KEYS] to output [num_rows, output_stride].
    template <bool FETCH>
    void gather(KeyTile<BFloat16>& tile, const KeyTile<BFloat16>& next, const BFloat16* weights, int64_t num_rows, int64_t value_dim,
                int64_t value_stride, float* output, int64_t output_stride) {
        hide_edges(tile, value_stride);
        asm volatile("" ::: "memory");
        for (int64_t row = 0; row < num_rows; row += rows_, weights += rows_ * TILE_KEYS, output += rows_ * output_stride)
            for (int64_t first = 0; first < value_dim; first += 4 * LANES) {
                const auto for_dims = [&](auto&& body) {
                    for_sums([&]<int I>() {
                        if (first + I * LANES < value_dim) body.template operator()<I>(first + I * LANES);
                    });
                };
                for_dims([&]<int I>(int64_t d) { load<I>(output + d, output_stride); });
                for (int64_t g = tile.first_group; g < tile.num_groups; ++g) {
                    _tile_loadd(5, weights + g * LANES, TILE_KEYS * 2);
                    for_dims([&]<int I>(int64_t d) {
                        _tile_loadd(7, tile.values[2 * g] + d * 2, value_stride * 4);
                        const int64_t line = (g * value_dim + d) / LANES * 2;
                        if (FETCH && row == 0 && line >= FIRST_LINES) prefetch_lines<2>(next.values, line, 2 * LANES);
                        if constexpr (I == 0) _tile_dpbf16ps(0, 5, 7);
                        if constexpr (I == 1) _tile_dpbf16ps(1, 5, 7);
                        if constexpr (I == 2) _tile_dpbf16ps(2, 5, 7);
                        if constexpr (I == 3) _tile_dpbf16ps(3, 5, 7);
                    });
                }
                for_dims([&]<int I>(int64_t d) { store<I>(output + d, output_stride); });
            }
        asm volatile("" ::: "memory");
    }

private:
    static constexpr int64_t DIMS = 32;
    static constexpr int64_t FIRST_LINES = 6;  // of the values of each group

    // Lines `first` to first + COUNT - 1 of each group of 16 keys. Of all groups in turn: fewer pages at a time take a tenth longer.
    template <int COUNT>
    static void prefetch_lines(const BFloat16* const (&groups)[TILE_KEYS / 8], int64_t first, int64_t line_elements) {
        for (int64_t line = first; line < first + COUNT; ++line)
            for (int group = 0; group < TILE_KEYS / LANES; ++group) __builtin_prefetch(groups[2 * group] + line * line_elements, 0, 2);
    }

    template <class F>
    static void for_sums(F&& body) {
        body.template operator()<0>();
        body.template operator()<1>();
        body.template operator()<2>();
        body.template operator()<3>();
    }
    template <int I>
    static void zero() {
        if constexpr (I == 0) _tile_zero(0);
        if constexpr (I == 1) _tile_zero(1);
        if constexpr (I == 2) _tile_zero(2);
        if constexpr (I == 3) _tile_zero(3);
    }
    template <int I>
    static void load(const float* from, int64_t stride) {
        if constexpr (I == 0) _tile_loadd(0, from, stride * 4);
        if constexpr (I == 1) _tile_loadd(1, from, stride * 4);
        if constexpr (I == 2) _tile_loadd(2, from, stride * 4);
        if constexpr (I == 3) _tile_loadd(3, from, stride * 4);
    }
    template <int I>
    static void store(float* to, int64_t stride) {
        if constexpr (I == 0) _tile_stored(0, to, stride * 4);
        if constexpr (I == 1) _tile_stored(1, to, stride * 4);
        if constexpr (I == 2) _tile_stored(2, to, stride * 4);
        if constexpr (I == 3) _tile_stored(3, to, stride * 4);
    }

    // Copies the values of the first and last group, with zeros for keys outside the range. A tile load reads all 16 keys, and 0 × NaN
    // is NaN.
    void hide_edges(KeyTile<BFloat16>& tile, int64_t value_stride) {
        const int64_t last = tile.num_groups - 1;
        if (tile.first_key % LANES) hide(tile, tile.first_group, value_stride, 0);
        if (tile.num_keys % LANES && (last != tile.first_group || tile.first_key % LANES == 0)) hide(tile, last, value_stride, 1);
    }

    void hide(KeyTile<BFloat16>& tile, int64_t group, int64_t value_stride, int64_t place) {
        BFloat16* to = &edge_values_[place * LANES * value_stride];
        for (int64_t pair = 0; pair < LANES; pair += 2) {
            const int64_t key = group * LANES + pair;
            const BFloat16* from = tile.values[key / 8] + key % 8 * value_stride;
            uint32_t seen = 0;
            if (key >= tile.first_key && key < tile.num_keys) seen |= 0x0000ffffu;
            if (key + 1 >= tile.first_key && key + 1 < tile.num_keys) seen |= 0xffff0000u;
            for (int64_t d = 0; d < 2 * value_stride; d += 2 * LANES)
                quire::store(to + pair * value_stride + d, seen ? quire::load<Words>(from + d) & seen : Words{});
        }
        tile.values[2 * group] = to;
        tile.values[2 * group + 1] = to + 8 * value_stride;
    }

    int64_t rows_ = 0;  // of a block, as configured; 0: the shapes are those of other products
    Buffer<BFloat16> edge_values_;
};

#endif

// The attention that goes with a kind of product.
template <class Product>
struct AttentionProductsOf {
    using Type = NoAttentionProducts;
};

#ifdef QUIRE_AMX
template <>
struct AttentionProductsOf<AmxFactors<1>> {
    using Type = AmxAttentionProducts;
};
#endif

}  // namespace quire
