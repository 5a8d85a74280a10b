// Tiles of keys and values in 8 bits, decoded to the numbers that the products of attention take.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_tiles.h"
#include "buffer.h"
#include "kv_cache.h"
#include "simd.h"

namespace quire {

// One thread's decoded tile, of integers that T has exactly, and their scales.
template <class T>
class DecodedTile {
public:
    static constexpr int64_t BLOCK_SIZE = LANES;  // of the decoded keys

    // `dim`: of a key. Without `has_values`, the keys are the values too.
    void reserve(int64_t dim, bool has_values) {
        keys_.reserve(TILE_KEYS * dim);
        if (has_values) values_.reserve(TILE_KEYS * dim);
    }

    // With FETCH, the codes of `next` are prefetched meanwhile.
    template <bool FETCH>
    KeyTile<T> decode(const CodeTile& tile, const CodeTile& next, const Cache& cache) {
        KeyTile<T> decoded{tile.first_key, tile.num_keys, tile.first_group, tile.num_groups, {}, {}};
        const int64_t dim = cache.head_dim, stride = cache.block_size;
        for (int64_t g = tile.first_group; g < tile.num_groups; ++g) {
            const int8_t *low = tile.keys[2 * g], *high = tile.keys[2 * g + 1];
            T* to = &keys_[g * LANES * dim];
            decoded.keys[2 * g] = to;
            decoded.keys[2 * g + 1] = to + LANES / 2 * V;
            if (stride == BLOCK_SIZE) {  // as it is decoded
                decode_line<FETCH>(low, next.keys[2 * g], to, LANES * dim);
                continue;
            }
            for (int64_t d = 0; d < dim; d += V, to += LANES * V) {
                decode_halves(low + d * stride, high + d * stride, to);
                if constexpr (FETCH) __builtin_prefetch(next.keys[2 * g] + d * stride, 0, 2);
            }
        }
        for (int64_t half = 0; half < TILE_KEYS / 8; ++half) {
            copy_scales(tile, half);
            if constexpr (FETCH) {
                __builtin_prefetch(next.key_scales[half], 0, 2);
                __builtin_prefetch(next.value_scales[half], 0, 2);
            }
            if (cache.is_shared()) continue;
            T* to = &values_[half * 8 * dim];
            decoded.values[half] = to;
            if (half < tile.first_key / 8 || half * 8 >= tile.num_keys) continue;
            decode_line<FETCH>(tile.values[half], next.values[half], to, 8 * dim);
        }
        return decoded;
    }

    float key_scales[TILE_KEYS], value_scales[TILE_KEYS];

private:
    static constexpr int V = Lane<T>::VALUES;

    // Of eight keys. The weight of a key that no query sees is 0, which stays 0 times a finite number alone.
    void copy_scales(const CodeTile& tile, int64_t half) {
        for (int64_t i = 0; i < 8; ++i) {
            const int64_t key = half * 8 + i;
            const bool is_seen = key >= tile.first_key && key < tile.num_keys;
            key_scales[key] = is_seen ? tile.key_scales[half][i] : 0.0f;
            value_scales[key] = is_seen ? tile.value_scales[half][i] : 0.0f;
        }
    }

    // `count` neighbouring codes, a multiple of 64.
    template <bool FETCH>
    static void decode_line(const int8_t* from, const int8_t* next, T* to, int64_t count) {
        for (int64_t i = 0; i < count; i += LINE) {
            if constexpr (FETCH) __builtin_prefetch(next + i, 0, 2);
            store_line(to + i, from + i);
        }
    }

    // 16 keys, eight from each address, V codes of each.
    static void decode_halves(const int8_t* low, const int8_t* high, T* to) {
        if constexpr (V == 2) {
            store_exact(to, floats_of(low));
            store_exact(to + LANES, floats_of(high));
        } else {
            int8_t codes[LANES];
            std::copy_n(low, LANES / 2, codes);
            std::copy_n(high, LANES / 2, codes + LANES / 2);
            store_exact(to, floats_of(codes));
        }
    }

    Buffer<T> keys_, values_;
};

}  // namespace quire
